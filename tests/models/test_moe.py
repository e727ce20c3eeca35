"""`moe_experts`: the routed experts."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile import MLAError
from mla_compile.batch import DecodeSegment, MLABatch
from mla_compile.ops.experts import moe
from mla_compile.ops.experts.moe import moe_experts, moe_experts_op
from tests.kernel_cases import MoeCase, check_padded_moe, padding

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 32, 24, 8, 3


def problem(
    tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0, hidden: int = HIDDEN
) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=g, dtype=torch.float64)
    weights = torch.rand(tokens, TOPK, generator=g, dtype=torch.float64)
    # No token chooses expert 5: an empty group.
    ids = torch.rand(tokens, EXPERTS, generator=g).index_fill_(1, torch.tensor([5]), -1.0).topk(TOPK).indices
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, hidden, generator=g, dtype=torch.float64) * hidden**-0.5
    down = torch.randn(EXPERTS, hidden, INTERMEDIATE, generator=g, dtype=torch.float64) * INTERMEDIATE**-0.5
    wide = torch.promote_types(dtype, torch.float32)
    return x.to(dtype), weights.to(wide), ids, gate_up.to(dtype), down.to(dtype)


def by_definition(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Token by token and expert by expert, in float64."""
    x, weights, gate_up, down = x.double(), weights.double(), gate_up.double(), down.double()
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            out[token] += weight * (down[expert] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 200])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_equals_its_definition(tokens, dtype, tolerance):
    args = problem(tokens, dtype)
    out = moe_experts(*args)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), by_definition(*args), atol=tolerance, rtol=tolerance)


def test_widths_need_not_be_multiples_of_anything():
    args = problem(6, hidden=5)
    torch.testing.assert_close(moe_experts(*args).double(), by_definition(*args), atol=1e-5, rtol=1e-5)


@pytest.fixture(params=["few tokens", "many tokens"], autouse=True)
def size(request, monkeypatch) -> None:
    """Both ways of running experts, on problems of one size."""
    monkeypatch.setattr(moe, "_SMALL", 2**62 if request.param == "few tokens" else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_depends_on_no_other_row(dtype):
    x, weights, ids, gate_up, down = problem(9, dtype)
    together = moe_experts(x, weights, ids, gate_up, down)
    alone = [moe_experts(x[i : i + 1], weights[i : i + 1], ids[i : i + 1], gate_up, down) for i in range(9)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-6, rtol=1e-6)
    x[4] = torch.nan
    poisoned = moe_experts(x, weights, ids, gate_up, down)
    assert poisoned[4].isnan().all()
    others = torch.arange(9) != 4
    torch.testing.assert_close(poisoned[others], together[others], atol=0, rtol=0)


def test_a_gather_of_rows_may_move_above_it():
    x, weights, ids, gate_up, down = problem(9)
    rows = torch.tensor([7, 0, 0, 3])
    after = moe_experts(x, weights, ids, gate_up, down)[rows]
    before = moe_experts(x[rows], weights[rows], ids[rows], gate_up, down)
    torch.testing.assert_close(before, after, atol=1e-6, rtol=1e-6)


def test_an_expert_may_be_chosen_twice_by_one_token():
    x, weights, ids, gate_up, down = problem(4)
    ids[:] = 2
    expected = by_definition(x, weights, ids, gate_up, down)
    torch.testing.assert_close(
        moe_experts(x, weights, ids, gate_up, down).double(), expected, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_opcheck(dtype):
    torch.library.opcheck(moe_experts_op, problem(5, dtype))
    torch.library.opcheck(moe_experts_op, (*problem(5, dtype), torch.tensor([1, 0], dtype=torch.int32), 2))


@pytest.mark.parametrize(
    ("q_lens", "seq_lens"), [([4, 1, 0], [9, 6, 0]), (None, [9, 6, 0])], ids=["q_lens", "inactive rows"]
)
def test_padding_of_decode_rows_gets_no_expert(q_lens, seq_lens):
    """12 decode tokens, some of them padding, and 3 of a prompt."""
    case = MoeCase(*problem(15))
    lens = q_lens or [4 * (n > 0) for n in seq_lens]
    row_lens, _, runs = padding(case, 4, lens)
    rows = DecodeSegment(
        torch.tensor(seq_lens, dtype=torch.int32),
        torch.zeros(3, 1, dtype=torch.int32),
        torch.zeros(12, dtype=torch.int64),
        page_size=4,
        q_len=4,
        q_lens=None if q_lens is None else row_lens,
    )
    check_padded_moe(case, moe_experts(*case.args(), MLABatch(rows)), runs)


def test_a_decode_segment_may_have_no_rows():
    case, none = problem(5), torch.zeros(0, dtype=torch.int32)
    rows = DecodeSegment(none, torch.zeros(0, 1, dtype=torch.int32), none.long(), page_size=4, q_len=2)
    assert torch.equal(moe_experts(*case, MLABatch(rows)), moe_experts(*case))


def test_more_decode_tokens_than_there_are_tokens_are_refused():
    lens, slots = torch.ones(3, dtype=torch.int32), torch.zeros(6, dtype=torch.int64)
    batch = MLABatch(DecodeSegment(lens, torch.zeros(3, 1, dtype=torch.int32), slots, page_size=4, q_len=2))
    with pytest.raises(MLAError, match=r"^batch: .*at most 5 decode tokens"):
        moe_experts(*problem(5), batch)


BAD = {
    "a vector": ("x", torch.zeros(HIDDEN)),
    "another hidden size": ("w_gate_up", torch.zeros(EXPERTS, 2 * INTERMEDIATE, HIDDEN + 1)),
    "gate without up": ("w_gate_up", torch.zeros(EXPERTS, INTERMEDIATE, HIDDEN)),
    "another number of experts": ("w_gate_up", torch.zeros(3, 2 * INTERMEDIATE, HIDDEN)),
    "another number of tokens": ("topk_ids", torch.zeros(4, TOPK, dtype=torch.int64)),
    "fewer weights than ids": ("topk_weights", torch.zeros(5, 2)),
    "int32 ids": ("topk_ids", torch.zeros(5, TOPK, dtype=torch.int32)),
    "integer weights": ("topk_weights", torch.zeros(5, TOPK, dtype=torch.int64)),
    "an id past the last expert": ("topk_ids", torch.full((5, TOPK), EXPERTS)),
    "a negative id": ("topk_ids", torch.full((5, TOPK), -1)),
    "experts of another dtype": ("w_down", torch.zeros(EXPERTS, HIDDEN, INTERMEDIATE).double()),
    "another device": ("topk_ids", torch.zeros(5, TOPK, dtype=torch.int64, device="meta")),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_named(case):
    name, value = BAD[case]
    arguments = dict(zip(("x", "topk_weights", "topk_ids", "w_gate_up", "w_down"), problem(5), strict=True))
    with pytest.raises(MLAError, match=rf"^{name}: expected "):
        moe_experts(**arguments | {name: value})


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 3e-2)]
)
def test_on_cuda_it_is_captured_and_replayed_with_new_contents(dtype, tolerance):
    static = [tensor.cuda() for tensor in problem(40, dtype)]
    moe_experts(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # refuses any read on the host
        out = moe_experts(*static)
    args = problem(40, dtype, seed=1)
    for buffer, tensor in zip(static, args, strict=True):
        buffer.copy_(tensor)
    graph.replay()
    torch.testing.assert_close(out.cpu().double(), by_definition(*args), atol=tolerance, rtol=tolerance)
