"""Frozen weights in fewer bits: int8 by rows, and NF4 in blocks whose scales take 8 bits (Dettmers et al., 2023).

Codes, scales and values are those of bitsandbytes: int8_vectorwise_quant, and quantize_4bit with compressed statistics.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain.core.spec import DType, TensorSpec

# The tensors of a weight by code; the codes are the first, under the name of the code.
PARTS = {"int8": ("int8", "absmax"), "nf4": ("nf4", "absmax", "absmax_absmax", "absmax_mean")}
BLOCK, GROUP = 64, 256  # weights that share a scale of NF4, and scales that share one of theirs
INVERSE = 7.874015718698502e-3  # 1/127 as bitsandbytes writes it
_LEAST = np.float32(1e-36)  # that a scale is divided by, for weights that are all zero
_AT_ONCE = 2**10  # blocks, which stay in a core's cache
_Weight = NDArray[np.float32]
# Quantiles of a normal distribution between -1 and 1, of which one is zero; appendix E of the paper.
NF4: _Weight = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)  # fmt: skip


@cache
def scale_values() -> _Weight:
    """The 256 numbers that a scale in 8 bits may be, in order: seven powers of ten, with more steps in larger ones.

    They are those of Dettmers et al. (2022), "8-bit optimizers via block-wise quantization", section 1.3.
    """
    found = [0.0, 1.0]
    for power in range(7):
        count, lowest = 2**power, np.float32(0.1)
        step, place = float(np.float32((1 - float(lowest)) / count)), np.arange(count + 1)
        # From both ends and rounded once, as torch.linspace does.
        ends = np.where(2 * place < count, lowest + step * place, 1 - step * (count - place)).astype(np.float32)
        means = (ends[:-1] + ends[1:]) / np.float32(2) * np.float32(10.0 ** (power - 6))
        found += [*means.tolist(), *(-means).tolist()]
    return np.array(sorted(found), np.float32)


def part_specs(code: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
    """Specs of the parts of a weight [outputs, inputs], by name.

    For nf4, `inputs` is a multiple of BLOCK. A byte holds two codes, the first in its upper half.
    """
    outputs, inputs = shape
    if code == "int8":
        specs = [TensorSpec(shape, DType.INT8), TensorSpec((outputs,))]
    else:
        packed, scales = ((outputs, inputs // each) for each in (2, BLOCK))
        groups = -(-outputs * inputs // (BLOCK * GROUP))
        specs = [*(TensorSpec(each, DType.UINT8) for each in (packed, scales)), TensorSpec((groups,)), TensorSpec((1,))]
    return dict(zip(PARTS[code], specs, strict=True))


def code_of(path: str, names: Container[str]) -> str | None:
    """The code of a weight whose parts are among `names` of tensors; None where it is kept as it is."""
    return next((code for code in PARTS if f"{path}/{code}" in names), None)


@dataclass(frozen=True, eq=False)
class Quantized:
    """A weight [outputs, inputs] as the arrays of `part_specs`; numpy makes the fp32 values of it."""

    code: str
    parts: Mapping[str, NDArray[Any]]

    @staticmethod
    def of(code: str, weight: NDArray[Any]) -> Quantized:
        """The nearest codes. A block of NF4, or row of int8, that is zero stays zero but for the rounding of scales."""
        weight = np.ascontiguousarray(weight, np.float32)
        made = _int8(weight) if code == "int8" else _nf4(weight)
        return Quantized(code, dict(zip(PARTS[code], made, strict=True)))

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.parts[self.code].shape
        return rows, columns if self.code == "int8" else 2 * columns

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        codes, absmax = self.parts[self.code], self.parts["absmax"]
        if self.code == "int8":
            values: NDArray[Any] = codes.astype(np.float32) * absmax[:, None] * absmax.dtype.type(INVERSE)
            return values.astype(dtype or np.float32, copy=False)
        above = np.repeat(self.parts["absmax_absmax"], GROUP)[: absmax.size].reshape(absmax.shape)
        scales = scale_values()[absmax] * above + self.parts["absmax_mean"]
        pairs = np.stack(np.broadcast_arrays(NF4[:, None], NF4), -1).reshape(-1, 2)
        values = pairs[codes].reshape(*absmax.shape, BLOCK) * scales[..., None]
        return values.reshape(self.shape).astype(dtype or np.float32, copy=False)


def _int8(weight: _Weight) -> tuple[NDArray[Any], ...]:
    absmax = np.abs(weight).max(1)
    factor = 1 / np.maximum(absmax, _LEAST) * np.float32(127)
    return np.rint(weight * factor[:, None]).astype(np.int8), absmax


def _nf4(weight: _Weight) -> tuple[NDArray[Any], ...]:
    blocks, outputs = weight.reshape(-1, BLOCK), len(weight)
    absmax = np.maximum(blocks.max(1), -blocks.min(1))
    inverse = 1 / np.maximum(absmax, _LEAST)
    codes = np.zeros(blocks.shape, np.uint8)
    for first in range(0, len(blocks), _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        scaled = blocks[some] * inverse[some, None]
        for bound in (NF4[:-1] + NF4[1:]) / np.float32(2):
            codes[some] += scaled > bound
    mean = _mean(absmax)
    scales, above = _eight_bits(absmax - mean)
    return (codes[:, ::2] << 4 | codes[:, 1::2]).reshape(outputs, -1), scales.reshape(outputs, -1), above, mean


def _mean(values: _Weight) -> _Weight:
    """The mean [1] as one thread of torch sums it, however many a run has."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return torch.from_numpy(values).mean(0, keepdim=True).numpy()
    finally:
        torch.set_num_threads(threads)


def _eight_bits(scales: _Weight) -> tuple[NDArray[np.uint8], _Weight]:
    """Numbers of the nearest `scale_values`, and the largest magnitude of each group."""
    known, count, half = scale_values(), -(-len(scales) // GROUP), np.float32(32767.5)
    groups = np.zeros((count, GROUP), np.float32)
    groups.reshape(-1)[: len(scales)] = scales
    above = np.abs(groups).max(1)
    scaled = (groups * (1 / np.maximum(above, _LEAST))[:, None]).reshape(-1)[: len(scales)]
    # bitsandbytes looks them up in a table of 65,536 places on the CPU.
    placed = np.floor((scaled + np.float32(1)) * half + np.float32(0.5)) / half - np.float32(1)
    return np.searchsorted((known[:-1] + known[1:]) / np.float32(2), placed).astype(np.uint8), above
