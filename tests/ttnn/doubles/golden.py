"""ttnn without a device: the same calls answered by the reference functions that ttnn ships, on torch tensors.

Like the hardware, every call computes on fp32 and rounds once, to the dtype of its result. Tensors without values hold
NaN, so that reading one before it was written shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ttrain.core.spec import TensorSpec
from ttrain.device.base import Launch, chain
from ttrain.device.ttnn.device import TenstorrentDevice
from ttrain.device.ttnn.runtime.mesh import NOTES, Mesh
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.device.ttnn.tensors.store import shares_memory

# Keywords that name buffers for results, in the order of the results.
_OUTPUTS = {
    "matmul": ("optional_output_tensor",),
    "linear": ("optional_output_tensor",),
    "gelu_bw": ("input_grad",),
    "moreh.softmax_backward": ("input_grad_tensor",),
    "moreh.layer_norm_backward": ("input_grad", "gamma_grad", "beta_grad"),
    "moreh.adamw": ("param_out", "exp_avg_out", "exp_avg_sq_out"),
}
_HARDWARE_ONLY = (
    "compute_kernel_config", "core_grid", "memory_config", "program_config", "queue_id", "cq_id",
    "sub_core_grids", "sub_device_id",
)  # fmt: skip


@dataclass
class GoldenTensor:
    """A torch tensor with a device dtype and layout."""

    data: torch.Tensor
    dtype: Any
    layout: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)


class GoldenRuntime:
    """Answers like the module ttnn. `calls` counts the device ops by name."""

    def __init__(self) -> None:
        import ttnn

        self._ttnn = ttnn
        self.calls: dict[str, int] = {}
        floats = {ttnn.float32: torch.float32, ttnn.bfloat16: torch.bfloat16, ttnn.bfloat8_b: torch.bfloat16}
        self._dtypes = {**floats, ttnn.int32: torch.int32, ttnn.uint32: torch.int32}
        given = ttnn.operations.moreh
        names = ("softmax_backward", "layer_norm_backward", "adamw")
        moreh = {name: self._op(f"moreh.{name}", getattr(given, name)) for name in names}
        self.operations = SimpleNamespace(moreh=SimpleNamespace(**moreh))
        self.experimental = SimpleNamespace(view=self.view, nlp_create_qkv_heads=self.create_heads)
        heads = ("split_query_key_value_and_split_heads", "concatenate_heads")
        self.transformer = SimpleNamespace(**{name: self._op(name, getattr(ttnn.transformer, name)) for name in heads})

    def __getattr__(self, name: str) -> Any:
        given = getattr(self._ttnn, name)
        if type(given).__name__ != "FastOperation" and not hasattr(given, "golden_function"):
            return given
        call = self._op(name, given)
        setattr(self, name, call)
        return call

    # Calls that move values instead of computing them.

    def allocate_tensor_on_device(self, shape: Sequence[int], dtype: Any, layout: Any, *_: Any) -> GoldenTensor:
        kind = self._dtypes[dtype]
        data = torch.full(tuple(shape), float("nan") if kind.is_floating_point else -1, dtype=kind)
        return GoldenTensor(data, dtype, layout)

    def from_torch(self, values: torch.Tensor, dtype: Any, layout: Any, mesh_mapper: Any = None) -> GoldenTensor:
        return GoldenTensor(values.to(self._dtypes[dtype]).clone(), dtype, layout)

    def copy_host_to_device_tensor(self, host: GoldenTensor, tensor: GoldenTensor, cq_id: int = 0) -> None:
        assert (host.dtype, host.layout, host.shape) == (tensor.dtype, tensor.layout, tensor.shape)
        tensor.data.copy_(host.data)

    def synchronize_device(self, *_: Any, **__: Any) -> None:
        return

    init_device_compute_kernel_config = synchronize_device

    def get_memory_view(self, *_: Any) -> Any:
        return SimpleNamespace(num_banks=12)

    def to_torch(self, tensor: GoldenTensor, cq_id: int = 0) -> torch.Tensor:
        return tensor.data.clone()

    def narrow(self, tensor: GoldenTensor, axis: int, start: int, length: int) -> GoldenTensor:
        """A view of rows."""
        assert axis == 0 and start % (12 * 32) == 0, "a view has to start at the first bank"
        return GoldenTensor(tensor.data[start : start + length], tensor.dtype, tensor.layout)

    def view(self, tensor: GoldenTensor, shape: Sequence[int]) -> GoldenTensor:
        """The tiles in another arrangement; their order is all that elementwise ops see of it."""
        return GoldenTensor(tensor.data.view(tuple(shape)), tensor.dtype, tensor.layout)

    def reshape(
        self, tensor: GoldenTensor, shape: Sequence[int], padded: Sequence[int] | None = None, **_: Any
    ) -> GoldenTensor:
        """A view where ttnn gives one, else a copy. With the padded shape, what is not padding, or all with padding."""
        if padded is not None:
            return GoldenTensor(_resized(tensor.data, tuple(shape)), tensor.dtype, tensor.layout)
        shares = shares_memory(TensorSpec(tensor.shape), TensorSpec(tuple(shape)))
        if not shares:
            self._count("reshape")
        data = tensor.data if shares else tensor.data.clone()
        return GoldenTensor(data.view(tuple(shape)), tensor.dtype, tensor.layout)

    def create_heads(self, x: GoldenTensor, num_heads: int, num_kv_heads: int) -> list[GoldenTensor]:
        """ttnn ships no reference for it: [B, 1, T, H*D] -> [B, H, T, D]."""
        assert num_kv_heads == 0
        self._count("nlp_create_qkv_heads")
        batch, _, time, width = x.shape
        split = x.data.view(batch, time, num_heads, width // num_heads).transpose(1, 2)
        heads = split.clone(memory_format=torch.contiguous_format)  # with one head too
        return [GoldenTensor(heads, x.dtype, x.layout)]

    def copy(self, source: GoldenTensor, target: GoldenTensor) -> GoldenTensor:
        self._count("copy")
        assert source.shape == target.shape, (source.shape, target.shape)
        target.data.copy_(source.data)
        return target

    def to_layout(self, tensor: GoldenTensor, layout: Any, **_: Any) -> GoldenTensor:
        self._count("to_layout")
        return GoldenTensor(tensor.data.clone(), tensor.dtype, layout)

    def embedding(self, ids: GoldenTensor, weight: GoldenTensor, layout: Any = None, **_: Any) -> GoldenTensor:
        self._count("embedding")
        reference = self._ttnn.get_golden_function(self._ttnn.embedding)
        return GoldenTensor(reference(ids.data.long(), weight.data), weight.dtype, layout)

    def embedding_bw(self, ids: GoldenTensor, weight: GoldenTensor, gradient: GoldenTensor, **_: Any) -> GoldenTensor:
        self._count("embedding_bw")
        reference = self._ttnn.get_golden_function(self._ttnn.embedding_bw)
        rows = reference(ids.data.long(), weight.data.float(), gradient.data.float()).reshape(1, 1, *weight.shape[-2:])
        return GoldenTensor(rows.to(gradient.data.dtype), gradient.dtype, gradient.layout)

    def bitcast(self, tensor: GoldenTensor, dtype: Any) -> GoldenTensor:
        """Return the bits as numbers of another kind."""
        self._count("bitcast")
        return GoldenTensor(tensor.data.clone().view(self._dtypes[dtype]), dtype, tensor.layout)

    # Everything else.

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def _op(self, name: str, op: Any) -> Callable[..., Any]:
        """The reference of an op behind the device's calling convention."""
        reference = self._ttnn.get_golden_function(op)
        buffers = _OUTPUTS.get(name, ("output_tensor",))
        keeps = name.startswith("moreh.")  # these references leave out a result that has no buffer

        def call(*arguments: Any, **options: Any) -> Any:
            self._count(name)
            if name.endswith("_in_place"):
                options["output_tensor"] = arguments[0]
            outputs = [options.get(key) if keeps else options.pop(key, None) for key in buffers]
            options = {key: _plain(value) for key, value in options.items() if key not in _HARDWARE_ONLY}
            dtype = arguments[1] if name == "typecast" else options.pop("dtype", None)
            if dtype is None and isinstance(_first(arguments), GoldenTensor):
                dtype = _first(arguments).dtype
            given = list(map(_plain, arguments))
            for position, key in enumerate(("input_tensor_a_activations", "input_tensor_b_activations")):
                if key in options:
                    given[position] = _activated(given[position], options.pop(key))
            last = options.pop("activations", ())
            results = reference(*given, **options)
            results = _activated(results, last) if last else results
            several = isinstance(results, (list, tuple))
            delivered = [
                self._deliver(result, outputs[index] if index < len(outputs) else None, dtype)
                for index, result in enumerate(results if several else [results])
            ]
            return delivered if several else delivered[0]

        return call

    def _deliver(self, result: Any, output: GoldenTensor | None, dtype: Any) -> GoldenTensor | None:
        if result is None:
            return None
        if output is not None:
            assert result.numel() == output.data.numel(), (tuple(result.shape), output.shape)
            output.data.copy_(result.reshape(output.data.shape))
            return output
        return GoldenTensor(result.to(self._dtypes[dtype]).contiguous().clone(), dtype, self._ttnn.TILE_LAYOUT)


# The references of ttnn know only some of the activations that ride on a binary op.
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name.lower()) for name in ("EXP", "LOG", "NEG", "SQRT", "RSQRT", "SIGMOID")},
    "RECIP": torch.reciprocal,
    "GTZ": lambda x: (x > 0).to(x.dtype),
    "SILU": torch.nn.functional.silu,
}


def _activated(value: Any, activations: Sequence[Any]) -> Any:
    for activation in activations:
        value = _ACTIVATIONS[activation.name](value)
    return value


def _resized(data: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The corner of a tensor where it is larger, a view; NaN around it where it is smaller."""
    if all(size <= given for size, given in zip(shape, data.shape, strict=True)):
        return data[tuple(map(slice, shape))]
    larger = torch.full(shape, float("nan"), dtype=data.dtype)
    larger[tuple(map(slice, data.shape))] = data
    return larger


def _first(arguments: Sequence[Any]) -> Any:
    """The first tensor of a call, also out of a list."""
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            argument = _first(argument)
        if isinstance(argument, GoldenTensor):
            return argument
    return None


def _plain(argument: Any) -> Any:
    """A torch tensor in fp32, in which the hardware computes too; integers stay."""
    if isinstance(argument, (list, tuple)):
        return type(argument)(_plain(part) for part in argument)
    if not isinstance(argument, GoldenTensor):
        return argument
    return argument.data.float() if argument.data.is_floating_point() else argument.data


class GoldenMesh(Mesh):
    """Stands for the open chips: nothing to open, one chip, no traces but running the launches again."""

    def __init__(self, runtime: GoldenRuntime | None = None, config: TenstorrentConfig | None = None) -> None:
        grid = SimpleNamespace(y=8, x=8)
        handle = SimpleNamespace(arch=lambda: "none", compute_with_storage_grid_size=lambda: grid)
        super().__init__(runtime or GoldenRuntime(), handle, config or TenstorrentConfig())

    def capture(self, launches: Sequence[Launch], name: str) -> Launch:
        return chain(*launches)

    def memory(self) -> dict[str, int]:
        return {"in_use": 0, "peak": 0, "total": 0}

    def launched(self) -> int:
        return sum(self.tt.calls.values())

    def step_facts(self) -> dict[str, int]:
        return {"device_ops": self.launched()}

    def describe(self) -> dict[str, Any]:
        return {"mode": self.config.mode, "note": NOTES.get(self.config.mode, "reference functions on torch tensors")}

    def close(self) -> None:
        return


def open_golden(config: TenstorrentConfig) -> TenstorrentDevice:
    """Return the device of this config, answering by reference functions."""
    return TenstorrentDevice(GoldenMesh(config=config), config)
