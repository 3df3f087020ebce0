"""Tools of the kernel families: dtypes, chains of launches, flat views over neighbouring tensors, small constants."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Attributes, Delivery, GivenSpecs, Group, Kernel, Launch, Specs, chain
from ttrain.device.torch.kernels.costs import multiplies_faster_in_fp32
from ttrain.device.torch.triton.installed import has_triton

Tensor = torch.Tensor

TORCH_DTYPES: dict[DType, torch.dtype] = {dtype: getattr(torch, dtype.in_torch) for dtype in DType}
NARROW = (torch.bfloat16, torch.float16)  # come to the host as fp32
DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}
# Logits of a head that are formed at a time, 32 MiB in fp32: on a CPU enough for full-speed products.
CHUNK_LOGITS = 2**23
_LEAST_ROWS = 32
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
    batch_invariant: whether compiled kernels give a row the same bits among any number of rows, see DeviceConfig.
    group: the ranks that this device belongs to; None where it is alone.
    capability: compute capability of a GPU; a plan that is made without one takes that of an A100.
    triton: True where kernels of Triton run, see triton/rows.py.
    fp64: whether the device computes in fp64. Apple's GPUs do not, nor do all of Intel's.
    attention: how a GPU's way of attention is found, `planned` by rule or `measured` on it; or the way itself.
    """

    device: torch.device
    block: int
    kind: str = "cpu"  # cpu, cuda, mps or xpu: which kernels; tests run those of cuda on a CPU
    norm_row: int = 2**14
    explicit_up_to: int | None = None
    query_rows: int = 0
    logits: int = CHUNK_LOGITS
    matmul: str = "auto"
    batch_invariant: bool = False
    group: Group | None = None
    capability: tuple[int, int] = (8, 0)
    triton: bool = False
    fp64: bool = True
    attention: str = "planned"

    @staticmethod
    def of(device: torch.device, threads: int = 1, group: Group | None = None) -> Context:
        """The context of a device whose kernels use that many CPU threads, with sizes as measured."""
        if device.type == "cpu":
            return Context(device, block=2**18 * threads, group=group)
        # Not measured: a chunk of 2^23 logits is short work for a GPU beside what it costs to add chunks up.
        cuda = device.type == "cuda"  # alone has attention that never forms the probabilities
        made = Context(device, 2**25, device.type, logits=2**27, group=group, triton=cuda and has_triton(), fp64=cuda)
        return replace(made, explicit_up_to=0 if cuda else sys.maxsize)

    @property
    def on_cpu(self) -> bool:
        return self.kind == "cpu"


class _Planned(Exception):
    """A call that only takes scratch memory has come to what it would launch."""


class Call:
    """One launch of a row: what it is bound to, its scratch memory, and the calls of torch that it consists of.

    Absent operands are None. A row takes all of its scratch before it emits anything, so a plan learns of it from a
    call without `work`: operands and scratch are tensors without memory then, and the first call of torch ends it. Up
    to there a row may also tell its `way` and how many bytes a library allocates `outside`, see Kernel.
    """

    def __init__(
        self,
        context: Context,
        ins: Sequence[Any],
        outs: Sequence[Any],
        attributes: Attributes,
        work: Sequence[Tensor] | None = None,
    ) -> None:
        self.launches: list[Launch] = []
        self.context, self.ins, self.outs, self.attributes = context, ins, outs, attributes
        self.planning, self.taken, self._work = work is None, list[TensorSpec](), iter(work or ())
        self.way, self.outside = "aten", 0

    def emit(self, function: Callable[..., Any], *given: Any, **settings: Any) -> None:
        """Add a call of torch. It allocates nothing where it writes into buffers, such as `out`."""
        self.begin()
        self.launches.append(partial(function, *given, **settings) if given or settings else function)

    def begin(self) -> None:
        """End a call that only takes scratch memory. Constants are made afterwards, as torch is slow without memory."""
        if self.planning:
            raise _Planned

    def copy(self, source: Tensor | None, target: Tensor | None) -> None:
        """target <- source, unless they are one, or absent."""
        if target is not None and target is not source:
            self.emit(target.copy_, source)

    def emit_returned(self, function: Callable[[], Sequence[Tensor]], targets: Sequence[Tensor]) -> None:
        """Emit a call that returns new tensors, and copies of them into the targets."""

        def launch() -> None:
            for target, result in zip(targets, function(), strict=False):
                target.copy_(result)

        self.emit(launch)

    def scratch(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Take scratch memory, whose values are not known."""
        assert not self.launches, "scratch memory is taken before anything is emitted"
        if not self.planning:
            given = next(self._work)
            assert given.shape == tuple(shape) and given.dtype is dtype, "a launch takes other scratch than was planned"
            return given
        found = torch.empty(shape, dtype=dtype, device="meta")
        self.taken.append(spec_of(found))
        return found

    def wide(self, x: Tensor) -> Tensor:
        """Take scratch for x in the dtype of sums over it; x itself where that is its own."""
        return x if accumulation(x.dtype) is x.dtype else self.scratch(x.shape, accumulation(x.dtype))


Bind = Callable[[Call], None]  # takes scratch memory, then emits the calls
ROWS: dict[str, partial[Kernel]] = {}  # by the name of an op, filled by the modules of this folder


def kernel(bind: Bind, context: Context, delivery: Delivery = Delivery.OUT, tells: str = "", **facts: Any) -> Kernel:
    """Return the kernel of a row that works on calls; on devices of the kind `tells` it tells its way."""

    def bound(ins: Sequence[Any], outs: Sequence[Any], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        call = Call(context, ins, outs, attributes, work)
        bind(call)
        return chain(*call.launches)

    @lru_cache(maxsize=1024)
    def known(ins: GivenSpecs, outs: Specs, attributes: tuple[tuple[str, Any], ...]) -> Call:
        call = Call(context, [*map(_without_memory, ins)], [*map(_without_memory, outs)], dict(attributes))
        with suppress(_Planned):
            bind(call)
        return call

    def planned(ins: GivenSpecs, outs: Specs, attributes: Attributes) -> Call:
        return known(tuple(ins), tuple(outs), tuple(attributes.items()))

    way = (lambda *node: planned(*node).way) if context.kind == tells else None
    return Kernel(
        bound,
        delivery,
        workspace=lambda *node: list(planned(*node).taken),
        outside=lambda *node: planned(*node).outside,
        way=way,
        **facts,
    )


def row(op: str, delivery: Delivery = Delivery.OUT, widens: bool = False, **facts: Any) -> Callable[[Bind], Bind]:
    """Decorator: a function of a call becomes the row of an op. Output 0 may take the buffer of one in `overwrites`.

    A row that `widens` computes on fp32 copies of its bf16 tensors if this CPU multiplies fp32 faster.
    """

    def declare(bind: Bind) -> Bind:
        ROWS[op] = partial(kernel, partial(_widened, bind) if widens else bind, delivery=delivery, **facts)
        return bind

    return declare


def _widened(bind: Bind, call: Call) -> None:
    """Bind a row to fp32 copies of its bf16 tensors if that is faster. The copies are scratch memory.

    A product of one row is never copied: reading its matrix takes all of its time.
    """
    given, split = (*call.ins, *call.outs), len(call.ins)
    one_row = call.ins[0].numel() == call.ins[0].shape[-1]
    narrow = [x is not None and x.dtype is torch.bfloat16 for x in given]
    if not (any(narrow) and call.context.on_cpu) or one_row or not multiplies_faster_in_fp32():
        return bind(call)
    wide = [call.scratch(x.shape, torch.float32) if each else x for x, each in zip(given, narrow, strict=True)]
    call.ins, call.outs = wide[:split], wide[split:]
    bind(call)
    copies = [(x, copy) for x, copy in zip(given, wide, strict=True) if x is not copy]
    read = sum(narrow[:split])
    call.launches[:0] = [partial(copy.copy_, x) for x, copy in copies[:read]]
    call.launches += [partial(x.copy_, copy) for x, copy in copies[read:]]


def _without_memory(spec: TensorSpec | None) -> Tensor | None:
    return None if spec is None else torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")


def spec_of(x: Tensor) -> TensorSpec:
    """Return the spec of a tensor."""
    return TensorSpec(tuple(x.shape), DTYPES[x.dtype])


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are formed, see DType."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def chunk_rows(rows: int, vocabulary: int, logits: int, summed: int) -> int:
    """Return how many of all rows a chunk of about `logits` logits has.

    Several chunks of bf16 need fp32 sums of the head's gradient: `summed` bytes for each id of the vocabulary, 0 where
    there are no such sums. All rows are one chunk where their logits take no more than that, which is faster too.
    """
    if 2 * rows <= summed:  # 2 bytes a logit in bf16
        return rows
    return min(max(min(_LEAST_ROWS, logits), logits // vocabulary), rows)


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
    exact = float(rounded) == value or x.dtype not in NARROW
    return constant(value, x.dtype if exact else torch.float32, x.device)


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
