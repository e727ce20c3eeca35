"""`make_batch_invariant`: what it rewrites, bits that do not depend on the batch, and what it refuses."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile import MLAError
from mla_compile.backend import resolve_settings
from mla_compile.ops.linear.matmul import matmul_by_head
from mla_compile.passes import PASSES
from mla_compile.passes.fuse_rms_norm import fuse_rms_norm
from mla_compile.passes.make_batch_invariant import SHORT, make_batch_invariant
from tests.passes.capture import Capture, Layer, make_inputs, ops

K, N = 40, 24
EXACT = [partial(fuse_rms_norm, require_kernel=False), make_batch_invariant]
"""What `options={"batch_invariant": True}` adds to the passes."""
ADDS = {
    "linear",
    "matmul",
    "mm",
    "bmm",
    "matmul_by_head",
    "softmax",
    "log_softmax",
    "logsumexp",
    "mean",
    "sum",
    "rms_norm",
}


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


W, HEADS = (torch.nn.Parameter(draw(*shape), requires_grad=False) for shape in ((N, K), (4, 10, 6)))
WEIGHT, BIAS, FILTER = draw(K), draw(N), draw(2, 9, 1)


def transformers_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + 1e-5)).to(x.dtype)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, W, BIAS),
    "a linear of three dimensions": lambda x: F.linear(x.view(-1, 1, K), W),
    "matmul": lambda x: x @ W.t(),
    "mm": lambda x: torch.mm(x, W.t()),
    "a product by head": lambda x: matmul_by_head(x.view(-1, 4, 10), HEADS),
    "a short sum": lambda x: x[:, : SHORT - 1].sum(-1),
    "a long sum": lambda x: x.sum(dim=-1, keepdim=True),
    "a sum in another dtype": lambda x: torch.sum(x, 1, dtype=torch.float64),
    "mean": lambda x: x.mean(-1),
    "softmax": lambda x: x.softmax(-1) + F.softmax(x[:, :8], dim=1).sum(1, keepdim=True),
    "softmax in float64": lambda x: F.softmax(x, -1, dtype=torch.float64),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "an op of aten": lambda x: torch.ops.aten.sum(x, [-1], True),
    "special": lambda x: torch.special.softmax(x, -1) + torch.special.logsumexp(x, -1, keepdim=True),
    "linalg.matmul": lambda x: torch.linalg.matmul(x, W.t()),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "rms_norm": lambda x: F.rms_norm(x, (K,), eps=1e-5),
    "rms_norm and its weight": lambda x: WEIGHT * F.rms_norm(x, (K,), eps=1e-5),
    "rms_norm with a weight": lambda x: F.rms_norm(x, (K,), WEIGHT, 1e-5),
    "a norm that is used twice": lambda x: (y := F.rms_norm(x, (K,), eps=1e-5)) * WEIGHT + y,
    "a norm of transformers": lambda x: transformers_norm(x, WEIGHT),
    "its norm in half precision": lambda x: transformers_norm(x.bfloat16(), WEIGHT.bfloat16()),
    "a norm whose epsilon has a factor": lambda x: (
        x * torch.rsqrt(torch.add(x.pow(2).mean(-1, True), 0.5, alpha=2))
    ),
    "a norm with names": lambda x: x * torch.rsqrt(torch.mean(input=x.pow(exponent=2), dim=-1, keepdim=True)),
    "rms_norm of half precision, without an epsilon": lambda x: F.rms_norm((x * 1e-3).bfloat16(), (K,)),
    "logsumexp of no numbers and of infinite ones": lambda x: torch.stack(
        (
            torch.logsumexp(torch.where(x > 9, x, -torch.inf), -1),
            torch.logsumexp(torch.where(x > 1, torch.inf, x), -1),
        ),
        1,
    ),
    "integers": lambda x: (
        torch.softmax((x * 3).int(), -1, dtype=torch.float32)
        + (x.abs() * 1e7).long().sum(-1, True, dtype=torch.float32)
        + (x > 0).mean(-1, True, dtype=torch.float32)
    ),
    "a norm written in another way": lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_rows_bits_do_not_depend_on_its_neighbours(name: str) -> None:
    capture, call = Capture(EXACT), CALLS[name]
    compiled = torch.compile(call, backend=capture, dynamic=True, fullgraph=True)
    x = draw(9, K)
    whole = compiled(x)
    assert not ADDS & set(ops(capture.after[0])), ops(capture.after[0])
    torch.testing.assert_close(whole, call(x))
    for rows in range(2, 9):
        for start in range(9 - rows + 1):
            part = compiled(x[start : start + rows].clone())
            assert torch.equal(part, whole[start : start + rows]), f"rows {start} to {start + rows}"


def test_products_with_tokens_on_the_right_are_refused() -> None:
    for call in (lambda x: W @ x.t(), lambda x: F.linear(W, x)):
        torch._dynamo.reset()
        compiled = torch.compile(call, backend=Capture(EXACT), dynamic=True, fullgraph=True)
        with pytest.raises(Exception, match=r"batch_invariant: .*product.*var"):
            compiled(draw(9, K))


def test_attention_and_its_projections_become_batch_invariant() -> None:
    capture = Capture([*PASSES, *EXACT])
    torch.compile(Layer().requires_grad_(False), backend=capture, fullgraph=True)(
        *make_inputs(rows=2, q_len=2, chunks=[3, 4])
    )
    graph = capture.after[0].graph
    asked = {str(node.target): node.args[-1] for node in graph.nodes if "mla_" in str(node.target)}
    assert (
        asked["mla_compile.mla_decode.default"] is True and asked["mla_compile.mla_prefill.default"] is True
    )
    assert not ADDS & set(ops(capture.after[0]))


def under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, W)


CELL = torch.nn.GRUCell(K, K).requires_grad_(False)
LIB = torch.library.Library("batch_invariance_test", "DEF")
for name, extra in (("mine", ""), ("two", ""), ("two.out_of_place", ", int n")):
    LIB.define(f"{name}(Tensor x{extra}) -> Tensor")
    LIB.impl(name, torch.clone, "CompositeExplicitAutograd")
    torch.library.register_fake(f"batch_invariance_test::{name}", torch.empty_like, lib=LIB)


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "layer_norm": lambda x: F.layer_norm(x, (K,)),
    "conv1d": lambda x: F.conv1d(x[None], FILTER),
    r"sum.* 0 .*\[9, 40\]": lambda x: x.sum(0),
    r"sum.* None .*\[9, 40\]": lambda x: x.mean(),
    r"product.*\[9, 40\].*\[40\]": lambda x: x @ WEIGHT,
    r"sum.* -1 .*\[9, 0\]": lambda x: x[:, :0].sum(-1),
    r"sum.* -1 .*\[\]": lambda x: x[0, 0].sum(-1),
    "sum.*complex64": lambda x: torch.complex(x, x).sum(-1),
    "product.*vector": lambda x: F.linear(x, WEIGHT),
    "`linear`.*float32.*bfloat16": under_autocast,
    "einsum": lambda x: torch.einsum("thk,hkn->thn", x.view(-1, 4, 10), HEADS),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "fft_rfft": lambda x: torch.fft.rfft(x, dim=-1),
    "nansum": lambda x: x.nansum(-1),
    "softmin": lambda x: F.softmin(x, -1),
    "index_add": lambda x: torch.zeros_like(x).index_add_(0, torch.zeros(9, dtype=torch.long), x),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 4),
    "_softmax": lambda x: torch.ops.aten._softmax(x, -1, False),
    "cumsum": lambda x: x.cumsum(-1),
    "sum_to_size": lambda x: x.sum_to_size(9, 1),
    "gru_cell": CELL,
    "lstm_cell": lambda x: torch.lstm_cell(x, (x, x), *[CELL.weight_ih[:40].repeat(4, 1)] * 2),
    "rnn_tanh_cell": lambda x: torch.rnn_tanh_cell(x, x, *[CELL.weight_ih[:40]] * 2),
    "rnn_relu_cell": lambda x: torch.ops.aten.rnn_relu_cell(x, x, *[CELL.weight_ih[:40]] * 2),
    "triangular_solve": lambda x: torch.triangular_solve(x, x[:, :9])[0],
    "cholesky_solve": lambda x: torch.cholesky_solve(x, x[:, :9]),
    "cholesky_inverse": lambda x: torch.cholesky_inverse(x[:, :9]),
    "lu_solve": lambda x: torch.lu_solve(x, x[:, :9], torch.arange(1, 10, dtype=torch.int32)),
    "sparse_mm": lambda x: torch.sparse.mm(x, CELL.weight_ih[:40]),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, x, torch.ones(9)),
    "_scaled_dot_product_flash_attention_for_cpu.*mla_attention": lambda x: (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*[x[None, None]] * 3)
    ),
    "batch_invariance_test.two": lambda x: torch.ops.batch_invariance_test.two(x),
    "batch_invariance_test.mine": lambda x: torch.ops.batch_invariance_test.mine(x),
}


@pytest.mark.parametrize("what", REFUSED)
def test_ops_that_are_not_batch_invariant_are_refused_by_name(what: str) -> None:
    compiled = torch.compile(REFUSED[what], backend=Capture(EXACT), fullgraph=True)
    with pytest.raises(Exception, match=f"batch_invariant: .*{what}"):
        compiled(draw(9, K))


def test_integers_may_be_added_in_any_order() -> None:
    def count(x: Tensor) -> Tensor:
        return (x > 0).sum(0) + (x > 0).int().cumsum(0).sum() + (x < 0).to(torch.int32).cumprod(1).sum(1)[:1]

    compiled = torch.compile(count, backend=Capture(EXACT), fullgraph=True)
    assert torch.equal(compiled(draw(9, K)), count(draw(9, K)))


def test_the_option_is_a_boolean_and_brings_inductors_settings() -> None:
    assert resolve_settings(None, {"batch_invariant": True})["emulate_precision_casts"] is True
    assert "emulate_precision_casts" not in resolve_settings(None, {"batch_invariant": False})
    with pytest.raises(MLAError, match=r"^options\['batch_invariant'\]: .*True.*'yes'"):
        resolve_settings(None, {"batch_invariant": "yes"})
