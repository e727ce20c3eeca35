"""`moe_experts`: the routed experts of a mixture-of-experts layer, as one row-wise op.

One op instead of a dispatch in the model's own code, for two reasons: how tokens meet experts differs by device and
data type, and a pass may move a gather of token rows above one op, never above a sort.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.batch import MLABatch
from mla_compile.errors import MLAError
from mla_compile.ops import validate
from mla_compile.ops.by_row import product_by_row
from mla_compile.ops.implementations import FLOATS, SOME, Implementation, reference, triton
from mla_compile.ops.library import define_op, empty
from mla_compile.torch_internals import statically_known_true

MOE_EXPERTS = (
    triton(
        "each program gathers its expert's tokens itself; many are sorted by expert first",
        "mla_compile.ops.kernels.moe:moe_triton",
        takes={
            "dtype": FLOATS,
            "(token, expert) pairs": SOME,
            "topk_weights.dtype": FLOATS,  # in float64 the sum would have to run in it
            "w_gate_up.is_contiguous()": (True,),
            "w_down.is_contiguous()": (True,),
        },
        batch_invariant=True,
    ),
    reference("mla_compile.ops.moe:moe_torch"),
    Implementation(
        "by_token",
        "plain torch, any device, each token by itself",
        "mla_compile.ops.moe:moe_by_token",
        batch_invariant=True,
    ),
)


@define_op(
    table=MOE_EXPERTS,
    facts=lambda x, topk_weights, topk_ids, w_gate_up, w_down: {
        "dtype": x.dtype,
        "(token, expert) pairs": topk_ids.numel(),
        "topk_weights.dtype": topk_weights.dtype,
        "w_gate_up.is_contiguous()": w_gate_up.is_contiguous(),
        "w_down.is_contiguous()": w_down.is_contiguous(),
    },
    name="moe_experts",
)
def _experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    row_lens: Tensor | None = None,
    q_len: int = 1,
    shared_gate: Tensor | None = None,
    shared_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """row_lens: how many of each `q_len` of the first `rows * q_len` tokens are no padding, int32 `[rows]`.

    shared_gate, shared_up: `[shared * intermediate, hidden]`, and shared_down: `[hidden, shared * intermediate]`, of
        experts that every token passes, as one MLP whose output is added; all or none.
    """
    sizes = validate.Layouts()
    sizes.floats(
        x=(x, "tokens, hidden"),
        w_down=(w_down, "experts, hidden, intermediate"),
        w_gate_up=(w_gate_up, "experts, 2 * intermediate, hidden"),
    )
    shared = {"shared_gate": shared_gate, "shared_up": shared_up, "shared_down": shared_down}
    if any(w is not None for w in shared.values()):
        for name, w in shared.items():
            layout = ["shared * intermediate", "hidden"][:: -1 if name == "shared_down" else 1]
            if w is None or w.dtype != x.dtype:
                got = "None" if w is None else w.dtype
                raise MLAError(name, f"{x.dtype} [{', '.join(layout)}], as all three", got)
            sizes.check(name, w, ", ".join(layout), like=x)
        assert shared_gate is not None
        if statically_known_true(shared_gate.shape[0] % w_down.shape[2] != 0):
            raise MLAError("shared_gate", f"a multiple of {w_down.shape[2]} rows", shared_gate.shape[0])
    sizes.check("topk_ids", topk_ids, "tokens, topk", dtype=torch.int64, like=x)
    sizes.floats(like=x, topk_weights=(topk_weights, "tokens, topk"))
    if row_lens is not None and statically_known_true(row_lens.shape[0] * q_len > x.shape[0]):
        most = f"at most as many decode tokens as x has, {x.shape[0]}"
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
) -> Tensor:
    """`sum_k topk_weights[t, k] * expert[topk_ids[t, k]](x[t])`, an expert being `down(silu(gate(x)) * up(x))`.

    Row-wise: row t of the result depends on row t of `x`, `topk_weights` and `topk_ids` only. Reads nothing on the
    host on CUDA, so that it can be captured.

    Args:
        x: `[tokens, hidden]`, float.
        topk_weights: `[tokens, topk]`, float; the sum over k runs in its dtype or that of `x`, the wider one.
        topk_ids: `[tokens, topk]`, int64 in `[0, experts)`.
        w_gate_up: `[experts, 2 * intermediate, hidden]`, the dtype of `x`; gate rows first, then up.
        w_down: `[experts, hidden, intermediate]`, the dtype of `x`.
        batch: which tokens are whose. Padding of its decode rows, beyond their `q_lens` or of inactive ones, gets no
            expert, so that the weights of experts that nobody else chose are not read.

    Returns:
        `[tokens, hidden]` in the dtype of `x`; 0 for padding.

    Raises:
        MLAError: an argument that is not so, named. Expert ids are checked where they are on the CPU.
    """
    if batch is None or batch.decode is None:
        return _experts(x, topk_weights, topk_ids, w_gate_up, w_down)
    rows = batch.decode
    # An inactive row sees no key, and any other one at least its own `q_len` tokens.
    row_lens = rows.seq_lens if rows.q_lens is None else rows.q_lens
    return _experts(x, topk_weights, topk_ids, w_gate_up, w_down, row_lens, rows.q_len)


def no_padding(tokens: Tensor, row_lens: Tensor, q_len: int) -> Tensor:
    """Whether tokens, by their places in a call, int64 `[n]`, are none of its padding; see `row_lens` of `_experts`."""
    rows = row_lens.shape[0]
    lens = row_lens[(tokens // q_len).clamp(max=rows - 1)]
    return (tokens >= rows * q_len) | (tokens % q_len < lens)


# Tokens times `w_gate_up` elements under which sorting costs more than running every expert on every token: on an H200
# 23 us instead of 44 us (16 tokens, 8 experts of 256 x 48), on a CPU core from equal (float32) to half (bfloat16).
_SMALL = 2**22


def moe_torch(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    row_lens: Tensor | None = None,
    q_len: int = 1,
    shared_gate: Tensor | None = None,
    shared_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> Tensor:
    """`moe_experts` in plain torch: every device, every dtype, every number of tokens."""
    if x.shape[0] == 0:
        return x.new_empty(x.shape)
    small = x.shape[0] * w_gate_up.numel() < _SMALL
    run = _grouped if not small and _has_grouped_mm(x, w_down.shape[2]) else _dense
    runs = None
    if row_lens is not None and row_lens.shape[0] > 0:
        runs = no_padding(torch.arange(x.shape[0], device=x.device), row_lens, q_len).unsqueeze(-1)
        topk_ids = torch.where(runs, topk_ids, w_down.shape[0])
    # Router weights come in float32 at least, which makes this sum one in float32 at least.
    out = (run(x, topk_ids, w_gate_up, w_down) * topk_weights.unsqueeze(-1)).sum(dim=1)
    if shared_gate is not None:
        assert shared_up is not None and shared_down is not None
        out = out + F.linear(F.silu(F.linear(x, shared_gate)) * F.linear(x, shared_up), shared_down)
    out = out.to(x.dtype)
    return out if runs is None else torch.where(runs, out, 0)


def moe_by_token(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    row_lens: Tensor | None = None,
    q_len: int = 1,
    shared_gate: Tensor | None = None,
    shared_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> Tensor:
    """`moe_experts` in plain torch, each token in operations of its own, whose shapes do not depend on the others.

    Not only products: on the CPU the last elements of a tensor get other bits from `silu` than those before.
    """
    runs = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
    if row_lens is not None and row_lens.shape[0] > 0:
        runs = no_padding(torch.arange(x.shape[0], device=x.device), row_lens, q_len)
    topk_ids = torch.where(runs[:, None], topk_ids, 0)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for token, chosen in enumerate(topk_ids):
        row = x[token].expand(1, len(chosen), -1)
        activated = _swiglu(product_by_row(row, w_gate_up[chosen].mT))
        terms = product_by_row(activated, w_down[chosen].mT)[0] * topk_weights[token, :, None]
        total = terms.new_zeros(x.shape[1])
        for term in terms:
            total = total + term
        if shared_gate is not None:
            assert shared_up is not None and shared_down is not None
            one = x[token].expand(1, 1, -1)
            gate, up = (product_by_row(one, w.mT[None]) for w in (shared_gate, shared_up))
            total = total + product_by_row(F.silu(gate) * up, shared_down.mT[None])[0, 0]
        out[token] = torch.where(runs[token], total, 0)
    return out


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _has_grouped_mm(x: Tensor, intermediate: int) -> bool:
    """Whether `F.grouped_mm` multiplies these operands without reading the group sizes on the host.

    It wants rows of whole 16-byte units. On CUDA its kernels are for bfloat16 on Hopper and data-centre Blackwell;
    elsewhere it loops on the host, which a captured graph refuses. On the CPU, where reading sizes costs nothing, it
    lacks float64 alone.
    """
    if any(size * x.element_size() % 16 for size in (x.shape[1], intermediate)):
        return False
    if x.is_cuda:
        return x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in (9, 10)
    return x.device.type == "cpu" and x.dtype != torch.float64


def _grouped(x: Tensor, topk_ids: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """Each (token, expert) pair's output, `[tokens, topk, hidden]`: sort the pairs by expert, multiply by groups.

    Pairs of an expert past the last are in no group, and their output is whatever the memory holds.
    """
    topk = topk_ids.shape[1]
    expert_of_pair, order = topk_ids.flatten().sort()
    experts = torch.arange(w_down.shape[0], device=x.device)
    ends = torch.searchsorted(expert_of_pair, experts, right=True, out_int32=True)
    hidden = F.grouped_mm(x[order // topk], w_gate_up.transpose(1, 2), offs=ends)
    pairs = F.grouped_mm(_swiglu(hidden), w_down.transpose(1, 2), offs=ends)
    return torch.empty_like(pairs).index_copy_(0, order, pairs).view(*topk_ids.shape, -1)


def _dense(x: Tensor, topk_ids: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """The same by running every expert on every token: more work, but any dtype, and nothing depends on the ids."""
    every = torch.bmm(_swiglu(torch.matmul(x, w_gate_up.transpose(1, 2))), w_down.transpose(1, 2))
    ids = topk_ids.clamp(max=w_down.shape[0] - 1)
    return every[ids, torch.arange(x.shape[0], device=x.device)[:, None]]
