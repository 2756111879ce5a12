"""How much two correct implementations of one call may differ: the noise floor, from dtype and op.

All figures are relative to the largest magnitude of the output. Rounding of the output costs one ULP;
sums of K terms in fp32 may be taken in any order, which costs about sqrt(K) roundings. Calls that only
move or select elements must agree bit for bit. Loads no torch.
"""

from __future__ import annotations

import numpy as np

from bridge.verify.columns import KINDS, OUTPUT, Columns, Floats, Ints, short_op

#: One ULP relative to the bottom of its binade; dtypes that are not here hold exact values.
EPS = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e4m3fnuz": 2.0**-3,
    "float8_e5m2": 2.0**-2,
    "float8_e5m2fnuz": 2.0**-2,
    "float8_e8m0fnu": 1.0,
    "float4_e2m1fn_x2": 0.5,
    "complex64": 2.0**-23,
    "complex128": 2.0**-52,
}

#: Constants of the floor, as documents record them.
ORDER_FACTOR = 4.0  #: multiples of sqrt(K) * fp32 roundoff that another order of summation may cost
FUSED_ULPS = 4.0  #: ULPs that a chain of eager roundings may differ from one fused kernel
BIAS_ULPS = 0.1  #: mean signed difference that correct kernels stay below, in ULP of the output
COMPUTE_ULPS = 8.0  #: fp32 ULPs by which elementary functions may differ between libraries
LOG_DIGITS = 2e-6  #: relative precision of the figures in a torchtitan activation log

EXACT, ELEMENTWISE, REDUCTION, FUSED = range(4)

_EXACT_OPS = frozenset(
    """view _unsafe_view reshape _reshape_alias alias detach clone copy_ copy _to_copy to contiguous t
    transpose permute expand squeeze unsqueeze slice select narrow split split_with_sizes chunk unbind
    cat stack as_strided index index_select gather embedding where masked_fill masked_fill_ tril triu
    flip roll pad constant_pad_nd zeros ones full zeros_like ones_like full_like new_zeros new_full
    new_ones empty empty_like fill_ zero_ arange relu neg abs sign clamp clamp_min clamp_max maximum
    minimum max min amax amin argmax argmin threshold_backward eq ne lt le gt ge logical_and logical_or
    logical_not bitwise_and bitwise_or bitwise_not isnan isinf isfinite repeat repeat_interleave unfold
    movedim diagonal sort topk all_gather_into_tensor _allgather_base_ wait_tensor all_to_all_single
    broadcast view_as_complex view_as_real real imag slice_backward select_backward lift_fresh
    split_with_sizes_copy all_gather_copy_in _foreach_copy_ _local_scalar_dense set_ resize_
    is_same_size unsafe_split new_empty new_empty_strided empty_strided lift_fresh_copy _pin_memory
    scatter_ masked_select
    """.split()
)
_REDUCTION_OPS = frozenset(
    """mm bmm addmm baddbmm addmv mv dot linear matmul convolution convolution_backward einsum sum mean var
    std norm var_mean linalg_vector_norm logsumexp cumsum prod softmax log_softmax _softmax _log_softmax
    _softmax_backward_data _log_softmax_backward_data native_layer_norm native_layer_norm_backward
    _fused_rms_norm _fused_rms_norm_backward native_group_norm native_batch_norm rms_norm index_add
    index_put embedding_dense_backward index_add_ index_put_ scatter_add scatter_add_ all_reduce
    reduce_scatter_tensor _reduce_scatter_base_ allreduce_ reduce_scatter_tensor_ nll_loss_forward
    nll_loss_backward mse_loss chunk_cat _foreach_norm _scaled_mm _grouped_mm cross_entropy_loss
    scatter_reduce slice_scatter index_reduce cumprod lerp
    """.split()
)


def op_class(op: str, kind: str) -> int:
    """Which rule applies to an op; whole modules, launches and unknown libraries count as fused."""
    if kind != "op":
        return FUSED
    name = short_op(op)
    if name in _EXACT_OPS:
        return EXACT
    if name in _REDUCTION_OPS:
        return REDUCTION
    if not op.startswith("aten::") and "::" in op:
        return FUSED
    if "attention" in name or "norm" in name or "loss" in name or name.startswith(("_fused", "_foreach")):
        return FUSED
    return ELEMENTWISE


def noise_floors(a: Columns, pairs_a: Ints, b: Columns, pairs_b: Ints, fused: Ints) -> tuple[Floats, Floats]:
    """Per pair: the floor for one element, and the mean signed difference that is still noise.

    Both relative to the largest magnitude of the output. `fused` marks pairs that stand for several calls.
    """
    pool = a.pool.items()
    classes = {
        (op, kind): op_class(str(pool[op]), KINDS[kind])
        for op, kind in set(zip(a.op.tolist(), a.kind.tolist(), strict=True))
        | set(zip(b.op.tolist(), b.kind.tolist(), strict=True))
    }
    kinds = []
    for columns, pairs in ((a, pairs_a), (b, pairs_b)):
        places = zip(columns.op[pairs].tolist(), columns.kind[pairs].tolist(), strict=True)
        kinds.append(np.array([classes[place] for place in places], np.int64).reshape(-1))
    rule = np.maximum(kinds[0], kinds[1])
    rule[fused.astype(bool) | (a.op[pairs_a] != b.op[pairs_b])] = FUSED
    eps = np.maximum(_output_eps(a)[pairs_a], _output_eps(b)[pairs_b])
    compute = np.where(eps < EPS["float32"], EPS["float64"], EPS["float32"])
    terms = np.maximum(_terms(a)[pairs_a], _terms(b)[pairs_b])
    order = ORDER_FACTOR * np.sqrt(terms) * compute / 2
    inner = np.select(
        [rule == EXACT, rule == ELEMENTWISE, rule == REDUCTION],
        [np.zeros(len(eps)), COMPUTE_ULPS * compute, order],
        COMPUTE_ULPS * compute + order,
    )
    rounding = np.select([rule == EXACT, rule == FUSED], [np.zeros(len(eps)), FUSED_ULPS * eps], eps)
    bias = np.where(rule == EXACT, 0.0, BIAS_ULPS * eps + 0.5 * inner)
    return rounding + inner, bias


def _output_eps(columns: Columns) -> Floats:
    """Coarsest EPS among a call's floating outputs; 0 where there is none."""
    writes, pool = columns.writes, columns.pool.items()
    numbers, place = np.unique(writes.dtype, return_inverse=True)
    table = np.array([EPS.get(str(pool[number]), 0.0) for number in numbers.tolist()])
    eps: Floats = np.zeros(len(columns))
    if len(writes.call):
        np.maximum.at(eps, writes.call, table[place.reshape(-1)])
    return eps


def narrowing(columns: Columns) -> Floats:
    """EPS of a call's coarsest output where some floating input has finer digits; else 0."""
    reads, pool = columns.reads, columns.pool.items()
    numbers, place = np.unique(reads.dtype, return_inverse=True)
    table = np.array([EPS.get(str(pool[number]), np.inf) for number in numbers.tolist()])
    finest = np.full(len(columns), np.inf)
    if len(reads.call):
        np.minimum.at(finest, reads.call, table[place.reshape(-1)])
    coarsest = _output_eps(columns)
    return np.asarray(np.where(coarsest > finest, coarsest, 0.0))


def _terms(columns: Columns) -> Floats:
    """How many terms are summed into one output element: the inner size of matmuls, else a ratio of sizes."""
    reads, writes = columns.reads, columns.writes
    largest, smallest = np.ones(len(columns)), np.full(len(columns), np.inf)
    if len(reads.call):
        np.maximum.at(largest, reads.call, reads.numel)
    outputs = writes.role == OUTPUT
    if outputs.any():
        np.minimum.at(smallest, writes.call[outputs], np.maximum(writes.numel[outputs], 1.0))
    smallest = np.where(np.isfinite(smallest), smallest, 1.0)
    two = np.zeros(len(columns))
    has_two = np.diff(reads.start) >= 2
    if has_two.any():
        # The last two operands: addmm(bias, x, w) and mm(x, w) alike.
        last = reads.start[1:][has_two]
        sizes = np.maximum(reads.numel[last - 1], 1) * np.maximum(reads.numel[last - 2], 1)
        two[has_two] = np.sqrt(sizes / smallest[has_two])
    return np.asarray(np.maximum(1.0, np.maximum(np.minimum(two, largest), largest / smallest)))
