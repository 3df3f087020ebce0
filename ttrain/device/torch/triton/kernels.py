"""Kernels in Triton, which its compiler reads as text. Sums are fp32.

Sizes are constants of a kernel, except how many rows there are: more rows take the same one. A tensor that is absent
is None. A tile is [rows, columns]; `inside` tells which of its elements there are.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm(
    x, branch, weight, bias, total, y, mean, rstd,
    COUNT, WIDTH: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Layer norm, or RMS norm where there is no `mean`, of x [COUNT, WIDTH], or of total <- x + branch."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    known, there = row < COUNT, column < WIDTH
    inside, at = known[:, None] & there[None, :], row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    given = tl.load(x + at, inside, 0.0)
    if branch is not None:
        given = (given.to(tl.float32) + tl.load(branch + at, inside, 0.0)).to(total.dtype.element_ty)
        tl.store(total + at, given, inside)
    normal = given.to(tl.float32)
    if mean is not None:
        centre = tl.sum(normal, 1) / WIDTH
        tl.store(mean + row, centre, known)
        normal = tl.where(inside, normal - centre[:, None], 0.0)
    root = 1.0 / tl.sqrt(tl.sum(normal * normal, 1) / WIDTH + EPS)
    tl.store(rstd + row, root, known)
    made = normal * root[:, None] * tl.load(weight + column, there, 0.0).to(tl.float32)[None, :]
    if bias is not None:
        made += tl.load(bias + column, there, 0.0).to(tl.float32)[None, :]
    tl.store(y + at, made.to(y.dtype.element_ty), inside)


@triton.jit
def norm_grad(
    dy, x, mean, rstd, weight, residual, dx, sums,
    COUNT, PART, WIDTH: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient dx of a norm, and sums [1 or 2, parts, WIDTH] of those of weight and bias over PART rows each."""
    part, column = tl.program_id(0), tl.arange(0, COLUMNS)
    there = column < WIDTH
    factors = tl.load(weight + column, there, 0.0).to(tl.float32)[None, :]
    dweight, dbias = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, PART, ROWS):
        row = part * PART + first + tl.arange(0, ROWS)
        known = row < COUNT
        inside, at = known[:, None] & there[None, :], row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        given, normal = tl.load(dy + at, inside, 0.0).to(tl.float32), tl.load(x + at, inside, 0.0).to(tl.float32)
        root = tl.load(rstd + row, known, 0.0)[:, None]
        if mean is not None:
            normal = tl.where(inside, normal - tl.load(mean + row, known, 0.0)[:, None], 0.0)
        normal *= root
        dweight += given * normal
        dbias += given
        scaled = given * factors
        made = scaled - normal * (tl.sum(scaled * normal, 1) / WIDTH)[:, None]
        if mean is not None:
            made -= (tl.sum(scaled, 1) / WIDTH)[:, None]
        made *= root
        if residual is not None:
            made += tl.load(residual + at, inside, 0.0).to(tl.float32)
        tl.store(dx + at, made.to(dx.dtype.element_ty), inside)
    tl.store(sums + part * WIDTH + column, tl.sum(dweight, 0), there)
    if BIASED:
        tl.store(sums + (tl.num_programs(0) + part) * WIDTH + column, tl.sum(dbias, 0), there)


@triton.jit
def add_parts(sums, dweight, dbias, PARTS, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add up the sums [1 or 2, PARTS, WIDTH] of norm_grad, in an order that is always the same."""
    which, column = tl.program_id(1), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there, total = column < WIDTH, tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, PARTS, ROWS):
        part = first + tl.arange(0, ROWS)
        at = (which * PARTS + part)[:, None] * WIDTH + column[None, :]
        total += tl.load(sums + at, (part < PARTS)[:, None] & there[None, :], 0.0)
    if which == 0:
        tl.store(dweight + column, tl.sum(total, 0).to(dweight.dtype.element_ty), there)
    elif dbias is not None:
        tl.store(dbias + column, tl.sum(total, 0).to(dbias.dtype.element_ty), there)


@triton.jit
def rotary(
    x, cos, sin, y,
    COUNT, HEADS: tl.constexpr, WIDTH: tl.constexpr, PLACES, PAIRS: tl.constexpr,
    SIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Turn the first 2 PAIRS features of heads [COUNT, WIDTH] by the angles of their places, and copy the rest."""
    row, pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    known, start = (row < COUNT)[:, None], row.to(tl.int64)[:, None] * WIDTH
    inside, at = known & (pair < PAIRS)[None, :], start + pair[None, :]
    angle = ((row // HEADS) % PLACES).to(tl.int64)[:, None] * PAIRS + pair[None, :]
    along, across = tl.load(cos + angle, inside, 0.0), tl.load(sin + angle, inside, 0.0) * SIGN
    a, b = tl.load(x + at, inside, 0.0).to(tl.float32), tl.load(x + at + PAIRS, inside, 0.0).to(tl.float32)
    tl.store(y + at, (a * along - b * across).to(y.dtype.element_ty), inside)
    tl.store(y + at + PAIRS, (b * along + a * across).to(y.dtype.element_ty), inside)
    if REST:
        feature = 2 * PAIRS + tl.arange(0, REST)
        left = known & (feature < WIDTH)[None, :]
        tl.store(y + start + feature[None, :], tl.load(x + start + feature[None, :], left, 0.0), left)


@triton.jit
def cross_entropy(
    logits, targets, weight, log_sum_exp, loss, plain, dlogits,
    COUNT, WIDTH: tl.constexpr, EACH: tl.constexpr, SMOOTHING: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The weighted losses [COUNT] of logits [COUNT, WIDTH], and their gradient, which may take the logits' place.

    Without a loss to form, `log_sum_exp` is given. A target beyond the ids gives NaN.
    """
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)[None, :]
    known, start = row < COUNT, row.to(tl.int64)[:, None] * WIDTH
    target = tl.load(targets + row, known, -1)
    factor = tl.where(target < 0, 0.0, tl.load(weight + row * EACH, known, 0.0))
    if loss is None:
        most, total = tl.load(log_sum_exp + row, known, 0.0), tl.full([ROWS], 1.0, tl.float32)
    else:
        most, total = tl.full([ROWS], -3e38, tl.float32), tl.zeros([ROWS], tl.float32)
        picked, mean = tl.where(target < WIDTH, 0.0, float("nan")), tl.zeros([ROWS], tl.float32)
        for first in range(0, WIDTH, COLUMNS):
            inside = known[:, None] & (first + column < WIDTH)
            value = tl.load(logits + start + first + column, inside, float("-inf")).to(tl.float32)
            higher = tl.maximum(most, tl.max(value, 1))
            most, total = higher, total * tl.exp(most - higher) + tl.sum(tl.exp(value - higher[:, None]), 1)
            picked += tl.sum(tl.where(first + column == target[:, None], value, 0.0), 1)
            mean += tl.sum(tl.where(inside, value, 0.0), 1) / WIDTH
        cost = factor * (tl.log(total) - (picked - most))
        if plain is not None:
            tl.store(plain + row, cost, known)
            cost += SMOOTHING * factor * (picked - mean)
        tl.store(loss + row, cost, known)
        if log_sum_exp is not None:
            tl.store(log_sum_exp + row, most + tl.log(total), known)
    if dlogits is not None:
        for first in range(0, WIDTH, COLUMNS):
            inside = known[:, None] & (first + column < WIDTH)
            value = tl.load(logits + start + first + column, inside, 0.0).to(tl.float32)
            hot = tl.where(first + column == target[:, None], 1.0 - SMOOTHING, 0.0) + SMOOTHING / WIDTH
            made = factor[:, None] * (tl.exp(value - most[:, None]) / total[:, None] - hot)
            tl.store(dlogits + start + first + column, made.to(dlogits.dtype.element_ty), inside)


@triton.jit
def grouped_product(
    a, b, offsets, y,
    OUTER: tl.constexpr, TRANSPOSED: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, LENGTH: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The panel of rows of each expert, times its matrix: a [M, LENGTH], b [EXPERTS, LENGTH, WIDTH] -> y [M, WIDTH].

    With OUTER the transposed panel of a, times that of b: a [M, LENGTH], b [M, WIDTH] -> y [EXPERTS, LENGTH, WIDTH].
    Each sum goes in the order of its terms, whatever other rows there are.
    """
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    tile, column = tl.program_id(0) // across, tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    if OUTER:
        down: tl.constexpr = (LENGTH + ROWS - 1) // ROWS
        expert, row = tile // down, tile % down * ROWS + tl.arange(0, ROWS)
        known, begin, end = row < LENGTH, tl.load(offsets + expert), tl.load(offsets + expert + 1)
        y += expert.to(tl.int64) * (LENGTH * WIDTH)
    else:
        # Tiles of expert e are numbered from offsets[e] // ROWS + e on; there is room for all up to the next expert's.
        each = tl.arange(0, SLOTS)
        least = tl.load(offsets + each, each < EXPERTS, 2**40) // ROWS + each
        expert = tl.sum((least <= tile).to(tl.int32), 0) - 1
        first, last = tl.load(offsets + expert), tl.load(offsets + expert + 1)
        first += (tile - first // ROWS - expert) * ROWS
        if first >= last:
            return
        row = first + tl.arange(0, ROWS)
        known, begin, end = row < last, 0, LENGTH
        b += expert.to(tl.int64) * (LENGTH * WIDTH)
    there, total = (column < WIDTH)[None, :], tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(begin, end, DEPTH):
        inner = start + tl.arange(0, DEPTH)
        near = inner < end
        left = inner[None, :] * LENGTH + row[:, None] if OUTER else row[:, None] * LENGTH + inner[None, :]
        right = column[None, :] * LENGTH + inner[:, None] if TRANSPOSED else inner[:, None] * WIDTH + column[None, :]
        factor = tl.load(a + left, known[:, None] & near[None, :], 0.0)
        total = tl.dot(factor, tl.load(b + right, near[:, None] & there, 0.0), total, input_precision=PRECISION)
    tl.store(y + row[:, None] * WIDTH + column[None, :], total.to(y.dtype.element_ty), known[:, None] & there)


@triton.jit
def v_sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def v_tanh(x):
    """A series near 0, where the difference of exponentials loses digits."""
    e, square = tl.exp(-2.0 * tl.abs(x)), x * x
    far = (1.0 - e) / (1.0 + e)
    near = x + x * square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    return tl.where(square < 0.09, near, tl.where(x < 0, -far, far))


@triton.jit
def v_silu_grad(dy, x):
    """dy times the derivative of x sigmoid(x)."""
    s = v_sigmoid(x)
    return dy * s * (1.0 + x * (1.0 - s))


@triton.jit
def v_gelu(x):
    """x Phi(x)."""
    return 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))


@triton.jit
def v_gelu_grad(dy, x):
    """dy times the derivative of x Phi(x)."""
    below = 0.5 * (1.0 + tl.erf(0.7071067811865476 * x))
    return dy * (below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x))


@triton.jit
def v_gelu_tanh(x):
    """x sigmoid(z) for twice the argument z of the tangent."""
    return x * v_sigmoid(x * (1.5957691216057308 + 0.07135481282 * x * x))


@triton.jit
def v_gelu_tanh_grad(dy, x):
    """Take sigmoid(-z) for 1 - sigmoid(z) which keeps its digits. A slope that overflows counts for nothing."""
    z = x * (1.5957691216057308 + 0.07135481282 * x * x)
    s = v_sigmoid(z)
    bent = s * v_sigmoid(-z)
    slope = x * (1.5957691216057308 + 0.21406443846 * x * x)
    return dy * (s + tl.where(bent == 0.0, 0.0, bent * slope))


@triton.jit
def mixed(x):
    """The hash `mix` of core/random_bits.py, of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def stream_key(seed, STREAM: tl.constexpr):
    """The key of a stream of random bits, see core/random_bits.py; STREAM is mixed already."""
    return mixed(seed.to(tl.uint32) ^ mixed((seed >> 32).to(tl.uint32) ^ STREAM))


@triton.jit
def v_dropout(x, seed, index, STREAM: tl.constexpr, THRESHOLD: tl.constexpr, FACTOR: tl.constexpr):
    """Dropout of elements by their numbers."""
    return x * tl.where(mixed(index.to(tl.uint32) + stream_key(seed, STREAM)) >= THRESHOLD, FACTOR, 0.0)


@triton.jit
def bits_of(x):
    """The bits of fp32 numbers as int32, those of a NaN without any that bf16 lacks."""
    return tl.where(x == x, x, float("nan")).to(tl.int32, bitcast=True)


@triton.jit
def rounded(x, seed, index, STREAM: tl.constexpr):
    """One of the two bf16 numbers beside x, as fp32; the nearer one is as much more likely as it is nearer."""
    hashes = mixed(index.to(tl.uint32) + stream_key(seed, STREAM)) & 0xFFFF
    return ((bits_of(x).to(tl.uint32) + hashes) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def joined(upper, lower):
    """fp32 numbers of bf16 copies and int16 low bits."""
    return ((upper.to(tl.int16, bitcast=True).to(tl.int32) << 16) + lower.to(tl.int32)).to(tl.float32, bitcast=True)
