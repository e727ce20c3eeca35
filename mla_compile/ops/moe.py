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
from mla_compile.ops.kernels.plan import supports_moe
from mla_compile.ops.library import define_op
from mla_compile.torch_internals import statically_known_true

# Tokens times `w_gate_up` elements under which sorting costs more than running every expert on every token: on an H200
# 23 us instead of 44 us (16 tokens, 8 experts of 256 x 48), on a CPU core from equal (float32) to half (bfloat16).
_SMALL = 2**22


def _validate(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    row_lens: Tensor | None,
    q_len: int,
) -> None:
    """Ranks, sizes and dtypes only, so that it holds for fake tensors too."""
    sizes: dict[str, int | torch.SymInt] = {}
    for name, tensor, layout in (
        ("x", x, "tokens, hidden"),
        ("w_down", w_down, "experts, hidden, intermediate"),
        ("w_gate_up", w_gate_up, "experts, 2*intermediate, hidden"),
        ("topk_ids", topk_ids, "tokens, topk"),
        ("topk_weights", topk_weights, "tokens, topk"),
    ):
        words = layout.split(", ")
        if tensor.dim() != len(words):
            raise MLAError(name, f"{len(words)} dimensions [{layout}]", list(tensor.shape))
        for dim, word in enumerate(words):
            default = 2 * sizes["intermediate"] if word == "2*intermediate" else tensor.shape[dim]
            expected = sizes.setdefault(word, default)
            if statically_known_true(tensor.shape[dim] != expected):
                raise MLAError(name, f"{word} = {expected} in [{layout}]", list(tensor.shape))
        if tensor.device != x.device:
            raise MLAError(name, f"a tensor on {x.device}", tensor.device)
        validate.inference_only(name, tensor)
    if topk_ids.dtype != torch.int64:
        raise MLAError("topk_ids", "int64", topk_ids.dtype)
    if not topk_weights.is_floating_point():
        raise MLAError("topk_weights", "a floating dtype", topk_weights.dtype)
    for name, weight in (("w_gate_up", w_gate_up), ("w_down", w_down)):
        if weight.dtype != x.dtype:
            raise MLAError(name, f"the dtype of x, {x.dtype}", weight.dtype)
    if row_lens is not None and statically_known_true(row_lens.shape[0] * q_len > x.shape[0]):
        most = f"at most as many decode tokens as x has, {x.shape[0]}"
        raise MLAError("batch", most, f"{row_lens.shape[0]} rows of {q_len}")


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


def _fake(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    row_lens: Tensor | None = None,
    q_len: int = 1,
) -> Tensor:
    _validate(x, topk_weights, topk_ids, w_gate_up, w_down, row_lens, q_len)
    return x.new_empty(x.shape)


@define_op(
    "moe_experts(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor w_gate_up, Tensor w_down, "
    "Tensor? row_lens=None, SymInt q_len=1) -> Tensor",
    fake=_fake,
)
def moe_experts_op(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    row_lens: Tensor | None = None,
    q_len: int = 1,
) -> Tensor:
    """row_lens: of the first `rows * q_len` tokens, how many of each `q_len` are no padding, int32 `[rows]`."""
    run = moe_torch
    if supports_moe(x, topk_weights, topk_ids, w_gate_up, w_down):
        from mla_compile.ops.kernels.moe import moe_triton as run
    return run(x, topk_weights, topk_ids, w_gate_up, w_down, row_lens, q_len)


def no_padding(tokens: Tensor, row_lens: Tensor, q_len: int) -> Tensor:
    """Whether tokens, by their places in a call, int64 `[n]`, are none of its padding; see `moe_experts_op`."""
    rows = row_lens.shape[0]
    lens = row_lens[(tokens // q_len).clamp(max=rows - 1)]
    return (tokens >= rows * q_len) | (tokens % q_len < lens)


def moe_torch(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    row_lens: Tensor | None = None,
    q_len: int = 1,
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
    out = (run(x, topk_ids, w_gate_up, w_down) * topk_weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
    return out if runs is None else torch.where(runs, out, 0)


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
    row_lens, q_len = None, 1
    if batch is not None and batch.decode is not None:
        rows, q_len = batch.decode, batch.decode.q_len
        # An inactive row sees no key, and any other one at least its own `q_len` tokens.
        row_lens = rows.seq_lens if rows.q_lens is None else rows.q_lens
    if not torch.compiler.is_compiling():
        _validate(x, topk_weights, topk_ids, w_gate_up, w_down, row_lens, q_len)
        if topk_ids.device.type == "cpu" and topk_ids.numel():
            low, high = (int(bound) for bound in topk_ids.aminmax())
            if low < 0 or high >= w_down.shape[0]:
                raise MLAError("topk_ids", f"expert ids in [0, {w_down.shape[0]})", f"{low}..{high}")
    out: Tensor = moe_experts_op(x, topk_weights, topk_ids, w_gate_up, w_down, row_lens, q_len)
    return out
