"""`moe_experts`: the routed experts of a mixture-of-experts layer, as one token-wise op.

It is one op, not code in the model, for two reasons: the best way to dispatch tokens to experts differs by device and
dtype, and a pass can move a gather of tokens above one op, but not above a sort.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.batch import MLABatch
from mla_compile.errors import MLAError
from mla_compile.ops import validate
from mla_compile.ops.batch_invariant import product_by_row
from mla_compile.ops.dispatch import (
    FLOAT8,
    FLOATS,
    HALF,
    SOME,
    Allowed,
    at_least,
    by_token,
    reference,
    triton,
)
from mla_compile.ops.experts.operands import ExpertOperands
from mla_compile.ops.experts.tiles import MAX_UNSORTED_PAIRS, MIN_FP8_PRODUCT_PAIRS, MIN_ROUNDED_PAIRS
from mla_compile.ops.library import define_op, empty
from mla_compile.ops.linear import fp8
from mla_compile.torch_internals import statically_known_true

_TRITON = triton(
    "each program gathers its expert's tokens; many are sorted by expert first",
    "mla_compile.ops.experts.kernels.moe:moe_triton",
    constraints={
        "dtype": FLOATS,
        "(token, expert) pairs": SOME,
        "topk_weights.dtype": FLOATS,  # float64 would need a float64 sum
        "w_gate_up.is_contiguous()": (True,),
        "w_down.is_contiguous()": (True,),
        "weights": ("of the dtype",),
    },
    batch_invariant=True,
)
_TRITON_FP8 = replace(
    _TRITON,
    name="triton_fp8",
    description="as triton, for FP8 weights, which are converted in registers",
    min_capability=FLOAT8,
    constraints={**_TRITON.constraints, "weights": ("FP8",)},
    batch_invariant=False,
)
_FP8_PRODUCTS = replace(
    _TRITON_FP8,
    name="fp8_products",
    description="bfloat16 tokens as sums of two FP8 vectors: FP8 by FP8, and no weight is converted",
    function="mla_compile.ops.experts.kernels.moe_fp8:moe_fp8",
    min_capability=(9, 0),
    max_capability=(9, 0),
    constraints={
        **_TRITON_FP8.constraints,
        "dtype": (torch.bfloat16,),
        "pairs per expert": at_least(MIN_FP8_PRODUCT_PAIRS),
        "hidden": range(fp8.BLOCK, 2**31, fp8.BLOCK),
        "intermediate": range(fp8.BLOCK, 2**31, fp8.BLOCK),
    },
)
_MANY: dict[str, Allowed] = {
    "(token, expert) pairs": at_least(MAX_UNSORTED_PAIRS + 1),
    "pairs per expert": at_least(MIN_ROUNDED_PAIRS),
}
_ROUNDED = replace(
    _TRITON,
    name="rounded",
    description="many tokens: each expert's results are rounded to the dtype",
    function="mla_compile.ops.experts.kernels.moe:moe_rounded",
    constraints={**_TRITON.constraints, **_MANY, "dtype": (torch.bfloat16,)},
    batch_invariant=False,
)
_GROUPED = replace(
    _ROUNDED,
    name="grouped",
    description="the bits of rounded on Hopper: loading and multiplying warps",
    function="mla_compile.ops.experts.kernels.grouped:moe_grouped",
    min_capability=(9, 0),
    max_capability=(9, 0),
    constraints={
        **_ROUNDED.constraints,
        "hidden": range(2 * fp8.BLOCK, 2**31, 2 * fp8.BLOCK),
        "intermediate": range(fp8.BLOCK, 2**31, fp8.BLOCK),
        "weights begin at multiples of 16 bytes": (True,),  # as bulk copies require
    },
)
_GROUPED_FP8 = replace(
    _GROUPED,
    name="grouped_fp8",
    description="the bits of fp8_products: loading and multiplying warps",
    constraints={**_GROUPED.constraints, "weights": ("FP8",)},
)
_ONE_OR_TWO: dict[str, Allowed] = {"dtype": HALF, "tokens": range(1, 3)}
_GEMV = replace(
    _TRITON,
    name="gemv",
    description="one or two tokens: a program computes a few columns of an expert, on CUDA cores",
    function="mla_compile.ops.experts.kernels.moe_gemv:moe_gemv",
    constraints={**_TRITON.constraints, **_ONE_OR_TWO},
    batch_invariant=False,
)
_GEMV_FP8 = replace(
    _GEMV, name="gemv_fp8", min_capability=FLOAT8, constraints={**_TRITON_FP8.constraints, **_ONE_OR_TWO}
)


def shared_fits(shared_gate: Tensor, w_down: Tensor) -> bool:
    """Whether no block of FP8 weights spans two shared experts: kernels take them apart."""
    intermediate = w_down.shape[2]
    return bool(shared_gate.shape[0] == intermediate or intermediate % fp8.BLOCK == 0)


def _kind_of_weights(w_down: Tensor, shared_gate: Tensor | None) -> str:
    if w_down.dtype != fp8.DTYPE:
        return "of the dtype"
    fits = shared_gate is None or shared_fits(shared_gate, w_down)
    return "FP8" if fits else "FP8, shared experts that share a block"


MOE_EXPERTS = (
    _GEMV,
    _GEMV_FP8,
    replace(
        _GROUPED_FP8,
        name="grouped_activations",
        description="the bits of fp8_activations: loading and multiplying warps",
        function="mla_compile.ops.experts.kernels.grouped:moe_grouped_activations",
        constraints={**_GROUPED_FP8.constraints, "fp8_activations": (True,)},
    ),
    replace(
        _FP8_PRODUCTS,
        name="fp8_activations",
        description="many tokens, which are quantised too: FP8 by FP8",
        function="mla_compile.ops.experts.kernels.moe_fp8:moe_fp8_activations",
        constraints={**_FP8_PRODUCTS.constraints, **_MANY, "fp8_activations": (True,)},
    ),
    _GROUPED_FP8,
    _FP8_PRODUCTS,
    _GROUPED,
    _ROUNDED,
    _TRITON,
    _TRITON_FP8,
    replace(
        _FP8_PRODUCTS,
        name="fp8_products_in_order",
        description="as fp8_products, whose tiles all have one order, for any number of tokens",
        constraints={**_FP8_PRODUCTS.constraints, "pairs per expert": at_least(0)},
        batch_invariant=True,
    ),
    replace(
        _TRITON_FP8,
        name="triton_fp8_in_order",
        description="as triton_fp8, with one order along k for all tiles",
        function="mla_compile.ops.experts.kernels.moe:moe_in_order",
        batch_invariant=True,
    ),
    reference("mla_compile.ops.experts.moe:moe_torch"),
    by_token("mla_compile.ops.experts.moe:moe_by_token"),
)


def _facts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    shared_gate: Tensor | None = None,
    shared_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    fp8_activations: bool = False,
) -> dict[str, object]:
    """What the candidates' constraints are about."""
    weights = w_gate_up, w_down, shared_gate, shared_up, shared_down
    return {
        "dtype": x.dtype,
        "tokens": x.shape[0],
        "(token, expert) pairs": topk_ids.numel(),
        "pairs per expert": topk_ids.numel() // max(1, w_down.shape[0]),
        "topk_weights.dtype": topk_weights.dtype,
        "w_gate_up.is_contiguous()": w_gate_up.is_contiguous(),
        "w_down.is_contiguous()": w_down.is_contiguous(),
        "weights": _kind_of_weights(w_down, shared_gate),
        "hidden": x.shape[1],
        "intermediate": w_down.shape[2],
        "weights begin at multiples of 16 bytes": not any(
            w is not None and w.storage_offset() * w.element_size() % 16 for w in weights
        ),
        "fp8_activations": fp8_activations,
    }


@define_op(
    table=MOE_EXPERTS,
    facts=_facts,
    name="moe_experts",
)
def _experts(operands: ExpertOperands, batch_invariant: bool = False) -> Tensor:
    """row_lens: how many of each row's `q_len` tokens are valid, int32 `[rows]`; more than `q_len` means all. The rest
        of the first `rows * q_len` tokens is padding.
    shared_gate, shared_up: `[shared * intermediate, hidden]`, and shared_down: `[hidden, shared * intermediate]`, the
        shared experts as one MLP, which runs on every token and whose output is added; all or none.
    shared_gate_scale, shared_up_scale, shared_down_scale: one scale per block of these weights, if all weights are FP8.
        The pass that adds shared experts checks them.
    fp8_activations: whether many tokens may be quantised to FP8 if the weights are FP8, each with a scale for 128
        columns; else products have the precision of x.
    """
    x, _, topk_ids, w_gate_up, w_down, row_lens, q_len, *_ = operands
    gate_up_scale, down_scale = operands.gate_up_scale, operands.down_scale
    sizes = validate.Layouts()
    given = operands._asdict()
    weights = {"w_down": "experts, hidden, intermediate", "w_gate_up": "experts, 2 * intermediate, hidden"}
    if gate_up_scale is not None or down_scale is not None:
        sizes.tensors({"x": "tokens, hidden"}, given)
        for name, layout in weights.items():
            sizes.check(name, given[name], layout, like=x)
        fp8.check("w_gate_up", w_gate_up, "gate_up_scale", gate_up_scale, halves=2)
        fp8.check("w_down", w_down, "down_scale", down_scale)
    else:
        sizes.tensors({"x": "tokens, hidden"} | weights, given)
    sizes.check("topk_ids", topk_ids, "tokens, topk", dtype=torch.int64, like=x)
    sizes.tensors({"topk_weights": "tokens, topk"}, given, like=x)
    if row_lens is not None:
        sizes.check("row_lens", row_lens, "rows", dtype=torch.int32, like=x)
        validate.whole_number("q_len", q_len, 1)
    if row_lens is not None and statically_known_true(row_lens.shape[0] * q_len > x.shape[0]):
        most = f"at most {x.shape[0]} decode tokens, the tokens of x"
        raise MLAError("batch", most, f"{row_lens.shape[0]} rows of {q_len}")
    if validate.is_readable(topk_ids) and topk_ids.numel():
        low, high = (int(bound) for bound in topk_ids.aminmax())
        if low < 0 or high >= w_down.shape[0]:
            raise MLAError("topk_ids", f"expert ids in [0, {w_down.shape[0]})", f"{low}..{high}")
    return empty(x, x.shape)


moe_experts_op = torch.ops.mla_compile.moe_experts.default


def moe_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    batch: MLABatch | None = None,
    *,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> Tensor:
    """`sum_k topk_weights[t, k] * expert[topk_ids[t, k]](x[t])`, an expert being `down(silu(gate(x)) * up(x))`.

    Token-wise: token t of the result depends on token t of `x`, `topk_weights` and `topk_ids` only. On CUDA it reads no
    values on the host, so a CUDA graph can capture it.

    Args:
        x: `[tokens, hidden]`, float.
        topk_weights: `[tokens, topk]`, float; the sum over k is in the wider dtype of it and `x`.
        topk_ids: `[tokens, topk]`, int64 in `[0, experts)`.
        w_gate_up: `[experts, 2 * intermediate, hidden]`, the dtype of `x`; gate first, then up.
        w_down: `[experts, hidden, intermediate]`, the dtype of `x`.
        batch: the rows of the tokens. Padding of decode rows, past their `q_lens` or in inactive rows, gets no expert,
            so it causes no read of expert weights.
        gate_up_scale, down_scale: if the weights are FP8 (float8_e4m3fn), one scale per block of 128 x 128: float32
            `[experts, 2 * ceil(intermediate / 128), ceil(hidden / 128)]`, the blocks of gate before those of up, and
            `[experts, ceil(hidden / 128), ceil(intermediate / 128)]`. See `ops/linear/fp8.py`.

    Returns:
        `[tokens, hidden]` in the dtype of `x`; 0 for padding.

    Raises:
        MLAError: names the invalid argument. Expert ids are checked on the CPU only.
    """
    row_lens, q_len = None, 1
    if batch is not None and batch.decode is not None:
        rows = batch.decode
        # `seq_lens` also works: it is 0 for an inactive row and at least `q_len` for others.
        row_lens, q_len = rows.seq_lens if rows.q_lens is None else rows.q_lens, rows.q_len
    arguments: tuple[Any, ...] = ExpertOperands(
        *(x, topk_weights, topk_ids, w_gate_up, w_down, row_lens, q_len),
        gate_up_scale=gate_up_scale,
        down_scale=down_scale,
    )
    return _experts(*arguments)


def _dequantized_gate_up(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise `[..., 2 * intermediate, hidden]`. Gate and up have separate blocks."""
    halves, scales = weight.unflatten(-2, (2, -1)), scale.unflatten(-2, (2, -1))
    return fp8.dequantize(halves, scales).to(dtype).flatten(-3, -2)


# Tokens times `w_gate_up` elements below which running every expert on every token is faster than sorting: on an H200
# 23 us instead of 44 us (16 tokens, 8 experts of 256 x 48), on a CPU core equal (float32) to half the time (bfloat16).
_SMALL = 2**22


def moe_torch(operands: ExpertOperands) -> Tensor:
    """`moe_experts` in plain torch: every device, every dtype, every number of tokens."""
    x, topk_weights, topk_ids, w_gate_up, w_down, *_ = operands
    if x.shape[0] == 0:
        return x.new_empty(x.shape)
    if operands.gate_up_scale is not None and operands.down_scale is not None:
        w_gate_up = _dequantized_gate_up(w_gate_up, operands.gate_up_scale, x.dtype)
        w_down = fp8.dequantize(w_down, operands.down_scale).to(x.dtype)
    small = x.shape[0] * w_gate_up.numel() < _SMALL
    run = _grouped if not small and _has_grouped_mm(x, w_down.shape[2]) else _dense
    runs = _runs(operands)
    if runs is not None:
        topk_ids = torch.where(runs[:, None], topk_ids, w_down.shape[0])
    # Router weights are in float32 at least, so this sum is too.
    out = (run(x, topk_ids, w_gate_up, w_down) * topk_weights.unsqueeze(-1)).sum(dim=1)
    if shared := _shared(operands):
        gate, up, down = shared
        out = out + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    out = out.to(x.dtype)
    return out if runs is None else torch.where(runs[:, None], out, 0)


def moe_by_token(operands: ExpertOperands) -> Tensor:
    """`moe_experts` in plain torch with separate operations for each token, whose shapes do not depend on the others.

    This includes elementwise operations: on the CPU, `silu` rounds the last elements of a tensor differently.
    """
    x, topk_weights, topk_ids, w_gate_up, w_down, *_ = operands
    gate_up_scale, down_scale, shared = operands.gate_up_scale, operands.down_scale, _shared(operands)
    runs = _runs(operands)
    if runs is None:
        runs = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
    topk_ids = torch.where(runs[:, None], topk_ids, 0)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for token, chosen in enumerate(topk_ids):
        row = x[token].expand(1, len(chosen), -1)
        gate_up, down = w_gate_up[chosen], w_down[chosen]
        if gate_up_scale is not None and down_scale is not None:
            gate_up = _dequantized_gate_up(gate_up, gate_up_scale[chosen], x.dtype)
            down = fp8.dequantize(down, down_scale[chosen]).to(x.dtype)
        activated = _swiglu(product_by_row(row, gate_up.mT))
        terms = product_by_row(activated, down.mT)[0] * topk_weights[token, :, None]
        total = terms.new_zeros(x.shape[1])
        for term in terms:
            total = total + term
        if shared:
            one = x[token].expand(1, 1, -1)
            gate, up = (product_by_row(one, w.mT[None]) for w in shared[:2])
            total = total + product_by_row(F.silu(gate) * up, shared[2].mT[None])[0, 0]
        out[token] = torch.where(runs[token], total, 0)
    return out


def _runs(operands: ExpertOperands) -> Tensor | None:
    """Whether each token is valid and not padding, bool `[tokens]`; None if all are valid. See `_experts`."""
    x, row_lens, q_len = operands.x, operands.row_lens, operands.q_len
    if row_lens is None or row_lens.shape[0] == 0:
        return None
    rows, tokens = row_lens.shape[0], torch.arange(x.shape[0], device=x.device)
    lens = row_lens[(tokens // q_len).clamp(max=rows - 1)]
    return (tokens >= rows * q_len) | (tokens % q_len < lens)


def _shared(operands: ExpertOperands) -> tuple[Tensor, ...]:
    """Gate, up and down of the shared experts, dequantised to the dtype of `x`; empty if there are none."""
    weights = operands.shared_gate, operands.shared_up, operands.shared_down
    scales = operands.shared_gate_scale, operands.shared_up_scale, operands.shared_down_scale
    return tuple(
        weight if scale is None else fp8.dequantize(weight, scale).to(operands.x.dtype)
        for weight, scale in zip(weights, scales, strict=True)
        if weight is not None
    )


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _has_grouped_mm(x: Tensor, intermediate: int) -> bool:
    """Whether `F.grouped_mm` takes these operands without a device sync to read the group sizes.

    Its matrix rows must be multiples of 16 bytes. On CUDA it has kernels for bfloat16 on Hopper and data-centre
    Blackwell; otherwise it loops on the host, which CUDA graph capture does not allow. On the CPU it takes every dtype
    but float64.
    """
    if any(size * x.element_size() % 16 for size in (x.shape[1], intermediate)):
        return False
    if x.is_cuda:
        return x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in (9, 10)
    return x.device.type == "cpu" and x.dtype != torch.float64


def _grouped(x: Tensor, topk_ids: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """The output of each (token, expert) pair, `[tokens, topk, hidden]`, by a sort and grouped matmuls.

    Pairs whose expert id is `experts` are in no group, and their output is uninitialised.
    """
    topk = topk_ids.shape[1]
    expert_of_pair, order = topk_ids.flatten().sort()
    experts = torch.arange(w_down.shape[0], device=x.device)
    ends = torch.searchsorted(expert_of_pair, experts, right=True, out_int32=True)
    hidden = F.grouped_mm(x[order // topk], w_gate_up.transpose(1, 2), offs=ends)
    pairs = F.grouped_mm(_swiglu(hidden), w_down.transpose(1, 2), offs=ends)
    return torch.empty_like(pairs).index_copy_(0, order, pairs).view(*topk_ids.shape, -1)


def _dense(x: Tensor, topk_ids: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """`_grouped` by running every expert on every token: more work, but any dtype, and no work depends on the ids."""
    every = torch.bmm(_swiglu(torch.matmul(x, w_gate_up.transpose(1, 2))), w_down.transpose(1, 2))
    ids = topk_ids.clamp(max=w_down.shape[0] - 1)
    return every[ids, torch.arange(x.shape[0], device=x.device)[:, None]]
