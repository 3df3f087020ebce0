"""Every op, declared once: shape rule, gradient rule, reference, cost, test cases, decomposition.

Importing this package fills the registry; the functions here record nodes into the graph of their inputs.
"""

from ttrain.ops import collective
from ttrain.ops.activation import activation, gated_activation, gelu, log_sigmoid
from ttrain.ops.attention import attention, cache_write, cached_attention, log_sum_exp, softmax
from ttrain.ops.elementwise import (
    add,
    at_least,
    cast,
    cos,
    divide,
    dropout,
    erf,
    exp,
    expm1,
    full,
    greater,
    log,
    maximum,
    multiply,
    relu,
    scale,
    sigmoid,
    sign,
    sin,
    sqrt,
    subtract,
    tanh,
)
from ttrain.ops.embedding import embedding, one_hot, token_windows
from ttrain.ops.experts import combine, dispatch, gather, grouped_matmul, scatter, sort_by_expert, top_k, valid
from ttrain.ops.layout import expand, index_put, index_select, merge_heads, reshape, split_heads, transpose
from ttrain.ops.loss import cross_entropy, head_cross_entropy, head_log_probs, log_probs, squared_error
from ttrain.ops.matmul import head_matmul, linear, matmul, quantized_linear
from ttrain.ops.norm import layer_norm, rms_norm
from ttrain.ops.program import fused, step
from ttrain.ops.reduce import amax, global_norm, mean, reduce_sum
from ttrain.ops.rotary import rotary
from ttrain.ops.update import Rule, accumulate, assign, clip_factor, update
