"""Tools of the kernel families: dtypes, chains of launches, flat views over neighbouring tensors, small constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Attributes, Delivery, Group, Kernel, Launch, chain
from ttrain.device.torch.chunks import CHUNK_LOGITS

Tensor = torch.Tensor

TORCH_DTYPES = {
    DType.FP64: torch.float64,
    DType.FP32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.INT64: torch.int64,
    DType.INT32: torch.int32,
    DType.INT16: torch.int16,
    DType.BOOL: torch.bool,
}
FLAT_GAP = 64  # elements; neighbours of one flat parameter lie less than this apart


@dataclass(frozen=True)
class Context:
    """Facts of a device that a family needs to build its rows: its place, and the sizes at which ways change.

    block: elements that a chain of passes works on at a time; on the CPU they stay in a core's cache.
    norm_row: elements that the norm sums in one go; sums of such sums keep its rounding error small.
    explicit_up_to: time steps up to which attention forms its probabilities; None takes what measured fastest.
    query_rows: rows of probabilities that it forms at a time, each up to the block's last column; 0 takes what
        measured fastest.
    logits: of how many logits the cross-entropy of a head forms at a time.
    matmul: who multiplies matrices on the CPU, see DeviceConfig.
    group: the ranks that this device belongs to; None where it is alone.
    """

    device: torch.device
    block: int
    kind: str = "cpu"  # cpu or cuda: which kernels; tests run those of cuda on a CPU
    norm_row: int = 2**14
    explicit_up_to: int | None = None
    query_rows: int = 0
    logits: int = CHUNK_LOGITS
    matmul: str = "auto"
    group: Group | None = None

    @staticmethod
    def of(device: torch.device, threads: int = 1, group: Group | None = None) -> Context:
        """The context of a device whose kernels use that many CPU threads, with sizes as measured."""
        if device.type == "cpu":
            return Context(device, block=2**18 * threads, group=group)
        # Not measured: a chunk of 2^23 logits is short work for a GPU beside what it costs to add chunks up.
        return Context(device, block=2**25, kind="cuda", explicit_up_to=0, logits=2**27, group=group)

    @property
    def on_cpu(self) -> bool:
        return self.kind == "cpu"


class Emitter:
    """Takes down the calls of torch that a launch consists of, in order."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def emit(self, function: Callable[..., Any], *given: Any, **settings: Any) -> None:
        """Add a call. It allocates nothing where it writes into buffers, such as `out`."""
        self.launches.append(partial(function, *given, **settings) if given or settings else function)


class Call(Emitter):
    """One launch of a row: what it is bound to, and the calls that it consists of.

    Operands are tensors where a row is bound, and specs where it is asked for its workspace. Absent ones are None.
    """

    def __init__(
        self, context: Context, ins: Sequence[Any], outs: Sequence[Any], attributes: Attributes, work: Sequence[Any]
    ) -> None:
        super().__init__()
        self.context, self.ins, self.outs, self.attributes, self.work = context, ins, outs, attributes, work


Bind = Callable[[Call], None]  # emits the calls
Workspace = Callable[[Call], list[TensorSpec]]
ROWS: dict[str, Callable[[Context], Kernel]] = {}  # by the name of an op, filled by the modules of this folder


def kernel(
    context: Context, bind: Bind, workspace: Workspace | None = None, delivery: Delivery = Delivery.OUT, **facts: Any
) -> Kernel:
    """Return the kernel of a row that works on calls."""

    def bound(ins: Sequence[Any], outs: Sequence[Any], attributes: Attributes, work: Sequence[Any]) -> Launch:
        call = Call(context, ins, outs, attributes, work)
        bind(call)
        return chain(*call.launches)

    def wanted(ins: Sequence[Any], outs: Sequence[Any], attributes: Attributes) -> list[TensorSpec]:
        return [] if workspace is None else workspace(Call(context, ins, outs, attributes, ()))

    return Kernel(bound, delivery, wanted, **facts)


def row(
    op: str, workspace: Workspace | None = None, delivery: Delivery = Delivery.OUT, **facts: Any
) -> Callable[[Bind], Bind]:
    """Decorator: a function of a call becomes the row of an op. Output 0 may take the buffer of one in `overwrites`."""

    def declare(bind: Bind) -> Bind:
        ROWS[op] = lambda context: kernel(context, bind, workspace, delivery, **facts)
        return bind

    return declare


def rows_of(x: Tensor) -> Tensor:
    """x [..., C] as [N, C]."""
    return x.view(-1, x.shape[-1]) if x.numel() else x.reshape(0, x.shape[-1])


def shaped(scratch: Tensor, shape: Sequence[int]) -> Tensor:
    """The first elements of a scratch buffer under another shape."""
    return scratch.view(-1)[: math.prod(shape)].view(tuple(shape))


@lru_cache(maxsize=256)
def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a scalar tensor: aten takes it without making one at every launch."""
    return torch.tensor(value, dtype=dtype, device=device)


def constant_like(value: float, x: Tensor) -> Tensor:
    """A number as a scalar tensor in the dtype of x."""
    return constant(value, x.dtype, x.device)


def scalar_like(value: float, x: Tensor) -> Tensor:
    """A scalar tensor to combine with x, in x's dtype where that holds the number exactly, else in fp32."""
    rounded = torch.tensor(value, dtype=x.dtype)
    exact = float(rounded) == value or x.dtype is not torch.bfloat16
    return constant(value, x.dtype if exact else torch.float32, x.device)


def blocks(x: Tensor, size: int) -> list[Tensor]:
    """x as vectors of `size` elements, the last one shorter."""
    return list(x.view(-1).split(size)) if x.numel() else []


def flatten(*slots: Sequence[Tensor]) -> list[Tensor] | None:
    """One flat view per slot, or None.

    A slot is a list of tensors. It has a flat view where its tensors lie in one storage, in order, less than 64
    elements apart; the slots need equal element offsets. The views take in the elements between neighbours: only for
    kernels that treat every element alike, on slots whose gaps belong to nobody else.
    """
    offsets = [_flat_offsets(slot, FLAT_GAP) for slot in slots]
    if offsets[0] is None or any(each != offsets[0] for each in offsets):
        return None
    return [_flat_view(slot) for slot in slots]


def runs(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Flat views that cover the tensors and nothing else; tensors without a gap between them share one."""
    groups: list[list[Tensor]] = []
    for tensor in tensors:
        if groups and _flat_offsets([*groups[-1][-1:], tensor], 1) is not None:
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
    return [_flat_view(group) for group in groups]


def _flat_offsets(tensors: Sequence[Tensor], reach: int) -> list[int] | None:
    """Element offsets from the first tensor, where each begins less than `reach` elements after the last one's end."""
    if not tensors:
        return None
    first = tensors[0]
    base, end = first.untyped_storage().data_ptr(), int(first.storage_offset())
    offsets: list[int] = []
    for tensor in tensors:
        start = int(tensor.storage_offset())
        neighbour = tensor.untyped_storage().data_ptr() == base and tensor.dtype == first.dtype
        if not (neighbour and tensor.is_contiguous() and 0 <= start - end < reach):
            return None
        offsets.append(start - int(first.storage_offset()))
        end = start + tensor.numel()
    return offsets


def _flat_view(tensors: Sequence[Tensor]) -> Tensor:
    first, last = tensors[0], tensors[-1]
    length = last.storage_offset() + last.numel() - first.storage_offset()
    return first.as_strided((length,), (1,), first.storage_offset())
