"""Kernel rows of torch devices, one module a family.

Every row is bound once: its function makes the views and constants, and emits calls of aten `out=` functions, which are
what is launched. A launch allocates nothing, except where aten has no kernel that writes into a buffer:

- layer_norm, add_layer_norm, layer_norm_grad: `native_layer_norm` and its backward return new tensors, copied out;
- log_sum_exp, which no planned step launches: `logsumexp` keeps parts of its own;
- top_k and sort_by_expert: `sort` copies what it sorts; gather and scatter in bf16, which no model has;
- attention and its gradient where a kernel of aten is chosen (blockwise.py): the same;
- embedding_grad on CUDA: `embedding_dense_backward` sums without atomics, into a new tensor;
- bf16 matrix products on a CPU for which oneDNN has them, as it has with AVX-512: scratch memory;
- large fp32 products where oneDNN is the faster (matmul.py): the same;
- arithmetic on operands of different dtypes: aten casts one of them first.

`tests/ops/test_allocations.py` holds the list exactly.
"""

from __future__ import annotations

from ttrain.device.base import Kernel
from ttrain.device.torch.kernels import (
    attention,
    elementwise,
    experts,
    layout,
    loss,
    matmul,
    norm,
    random,
    reduce,
    update,
)
from ttrain.device.torch.kernels.common import ROWS, Context


def kernel_table(context: Context) -> dict[str, Kernel]:
    """A row for every op; on a GPU Triton's in front of those of aten."""
    rows = {op: made(context) for op, made in ROWS.items()}
    if context.triton:
        from ttrain.device.torch.triton.rows import triton_rows

        rows |= triton_rows(context)
    return rows
