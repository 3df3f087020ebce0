"""Small configs for the layers of any model: dtypes (precision) and adapters (LoRA)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ttrain.core.options import option, rule
from ttrain.core.spec import DType
from ttrain.device.info import info_of

if TYPE_CHECKING:
    from ttrain.nn.module import Parameter

_COMPUTE = {"fp32": DType.FP32, "tf32": DType.FP32, "fp16": DType.FP16}
_COMPUTE |= dict.fromkeys(("bf16", "bf16_true", "bf8"), DType.BF16)
PRECISIONS = tuple(_COMPUTE)


@dataclass
class PrecisionConfig:
    """Dtypes of a run; see also optimizer.state_dtype."""

    name: str = option(
        "fp32",
        "tf32 rounds what fp32 products read, on CUDA; bf16 computes in bf16 with fp32 master weights, fp16 in fp16 "
        "with a scaled loss, on CUDA; bf16_true keeps everything in bf16, best with optimizer.stochastic_rounding; bf8 "
        "is bf16 with matrices in 8-bit block floats, on devices that have them; auto is bf16 if the device has "
        "instructions for it, else fp32",
        choices=(*PRECISIONS, "auto"),
    )

    @property
    def compute(self) -> DType:
        """dtype of activations and of the weights as matmuls read them."""
        return _COMPUTE[self.name]

    @property
    def master(self) -> DType:
        """dtype of the weights that updates change, and of the optimizer state unless optimizer.state_dtype is set."""
        return DType.BF16 if self.name == "bf16_true" else DType.FP32

    def set_masters(self, parameters: Iterable[Parameter]) -> None:
        """Keep trained weights in the master dtype, and frozen ones only as layers read them, or in bf16 for fp16."""
        frozen = DType.BF16 if self.compute is DType.FP16 else self.compute
        for parameter in parameters:
            narrow = not parameter.trainable and parameter.follows_compute
            parameter.master = frozen if narrow else self.master

    @rule
    def _device_has_it(self, others: Any) -> Iterator[str]:
        yield from others.lacks_precision("precision", self.name, "precision=bf16 or precision=fp32")


@dataclass
class LoraConfig:
    """Low-rank adapters beside the linear layers of a frozen model (Hu et al., 2021)."""

    rank: int | None = option(None, "columns of each adapter, such as 8; null or 0 trains the model itself", minimum=0)
    alpha: float = option(16.0, "adapters' output is scaled by alpha/rank", above=0)
    dropout: float = option(0.0, "dropout of the adapters' input", minimum=0, below=1)
    targets: list[str] = option(
        ["all-linear"],
        "name endings of layers that get an adapter, such as [qkv] or [c_attn]; * is any text, all-linear every "
        "linear layer of the blocks",
    )
    base: str | None = option(
        None,
        "bits in which the matrices of the blocks are kept: int8 by rows, or nf4, 4 bits in blocks of 64",
        choices=("int8", "nf4"),
    )
    from_: str | None = option(None, "folder of PEFT with which a new run starts; it sets other lora keys", path=True)

    @property
    def scale(self) -> float:
        """The factor of the product that adapters add: alpha / rank."""
        return self.alpha / (self.rank or 1)

    @rule
    def _device_has_base(self, others: Any) -> Iterator[str]:
        if self.base is not None and not info_of(others.device).quantizes:
            told = f"device={others.device.name} has no products with such weights"
            yield f"lora.base={self.base}: {told}. Give lora.base=null, or device=cpu or cuda."
