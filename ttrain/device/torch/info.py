"""Answers for the devices of torch before one is open."""

from __future__ import annotations

import sys
from contextlib import suppress

from ttrain.core.errors import DeviceUnavailable, UserError
from ttrain.core.processor import vector_extensions
from ttrain.device.info import DeviceInfo
from ttrain.device.settings import DeviceConfig, Tf32Config

# Extensions with instructions that multiply in bf16. Without them bf16 is converted to fp32 and takes longer than fp32.
BF16_EXTENSIONS = ("amx_bf16", "avx512_bf16", "bf16")
# Torch's modules of GPUs, and the titles that they have; ROCm is `cuda` to torch. Steps are captured on cuda alone.
GPUS = {"cuda": "CUDA", "mps": "MPS", "xpu": "XPU"}


class Torch(DeviceInfo):
    """The CPU, or a GPU that torch can use."""

    title = "CUDA"
    example = "cuda"
    precisions = frozenset({"tf32", "fp16"})

    def require(self, config: DeviceConfig) -> None:
        if config.name in GPUS:
            require_gpu(config.index, config.name)

    def best_engine(self, config: DeviceConfig) -> tuple[str, str]:
        if config.name in ("mps", "xpu"):
            return super().best_engine(config)
        compiler = _compiler()
        if compiler is not None and config.name == "auto" and "torch" not in sys.modules:
            return "traced", f"a GPU captures the step, or {compiler} compiles it"  # to look for a GPU takes seconds
        if is_gpu(config):
            return "traced", "a GPU captures the step"
        if compiler is None:
            return "static", "there is no C++ compiler that could compile the step"
        return "traced", f"{compiler} compiles the step"

    def best_precision(self, config: DeviceConfig) -> tuple[str, str]:
        if config.name in ("mps", "xpu"):
            return super().best_precision(config)
        if is_gpu(config):
            import torch

            if torch.cuda.is_bf16_supported(including_emulation=False):
                return "bf16", "the GPU computes in bf16"
            return "fp32", "the GPU has no bf16 units; precision=fp16 may be faster"
        found = [name for name in BF16_EXTENSIONS if name in vector_extensions()]
        if found:
            return "bf16", f"the processor has {found[0]}"
        return "fp32", "the processor has no bf16 instructions, so bf16 takes longer"

    def lacks_invariance(self, config: DeviceConfig) -> str | None:
        if config.name in GPUS or is_gpu(config):
            return super().lacks_invariance(config)
        lacking = "engine=traced and a compiler, and there is no g++ or clang++ (or CXX names none)"
        return None if _compiler() else lacking

    def computes_in(self, config: DeviceConfig, precision: str) -> bool:
        return precision in self.precisions and is_gpu(config)

    def held(self, config: DeviceConfig, precision: str) -> DeviceConfig:
        """tf32 is how the GPU multiplies."""
        return Tf32Config(**vars(config)) if precision == "tf32" else config


def _compiler() -> str | None:
    """Return the command of the C++ compiler that is here; None where there is none."""
    from ttrain.device.torch.native.toolchain import find_compiler

    with suppress(UserError):
        return find_compiler()[0][0]
    return None


def is_gpu(config: DeviceConfig) -> bool:
    """Return True if the device is a GPU of torch's `cuda`."""
    if config.name != "auto":
        return config.name == "cuda"
    import torch

    return torch.cuda.is_available()


def why_no_gpu(name: str) -> str:
    """Return why torch can't use a GPU of this name, which it can't."""
    import torch

    built = torch.backends.mps.is_built() if name == "mps" else getattr(torch.version, name, None)
    if built or (name == "cuda" and torch.version.hip):
        return "torch finds no usable GPU"
    return f"this torch is built without {GPUS[name]}"


def require_gpu(index: int, name: str = "cuda") -> None:
    """Raise DeviceUnavailable where torch can't use the GPU of this number."""
    import torch

    backend = getattr(torch, name)
    if not backend.is_available():
        auto = ", or device=auto to take a GPU only where there is one" if name == "cuda" else ""
        raise DeviceUnavailable(f"device={name}: {why_no_gpu(name)} (torch {torch.__version__}). Use device=cpu{auto}.")
    count = backend.device_count()
    if index >= count:
        told = f"device.index={index}: this machine has {count} GPU{'s' if count > 1 else ''}, numbered from 0"
        raise DeviceUnavailable(f"{told}. Use device.index=0{f' to {count - 1}' if count > 1 else ''}.")
