"""`spell_by_head`: products by head are one `bmm`, with the bits and strides of the einsum, or written by token."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from mla_compile import mla_decode
from mla_compile.passes import PASSES, pipeline
from mla_compile.passes.spell_by_head import spell_by_head
from mla_compile.torch_internals import capture_graph
from tests.kernel_cases import decode_case
from tests.passes.capture import HEADS, RANK, Stack, V, compared, make_inputs, nodes_of, ops, shape

EVERYWHERE = partial(spell_by_head, everywhere=True)
KINDS = {
    "decode": {"rows": 3, "q_len": 2},
    "mixed": {"rows": 3, "q_len": 2, "chunks": (5, 2)},
    "unknown rows": {"rows": 3, "unbacked": True},
}
X, W = torch.randn(5, 3, 4), torch.randn(3, 4, 7)


def test_a_product_by_head_has_the_bits_and_strides_of_the_einsum() -> None:
    found = capture_graph(lambda x, w: torch.einsum("thk,hkn->thn", x, w), (X, W), {})
    assert found is not None
    gm = spell_by_head(*found)
    assert ops(gm) == ["transpose", "bmm", "transpose"]
    (out,), expected = gm(X, W), torch.einsum("thk,hkn->thn", X, W)
    assert torch.equal(out, expected) and out.stride() == expected.stride()
    value = next(node for node in gm.graph.nodes if node.op == "output").args[0][0].meta["example_value"]
    assert value.shape == out.shape and value.stride() == out.stride()


@pytest.mark.parametrize(
    ("equation", "x", "w"),
    [
        ("thk,hkn->htn", X, W),
        ("thk,knh->thn", X, W.permute(1, 2, 0)),
        ("thk,hkn->thn", X[:, :1], W),  # one head for all matrices
        ("hk,hkn->hn", X[0], W),
    ],
)
def test_other_einsums_stay(equation: str, x: torch.Tensor, w: torch.Tensor) -> None:
    found = capture_graph(lambda x, w: torch.einsum(equation, x, w), (x, w), {})
    assert found is not None and ops(spell_by_head(*found)) == ["einsum"]


# --- products by head on a GPU


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_products_by_head_are_written_by_token(kind: str) -> None:
    gm = compared(Stack(2), KINDS[kind], torch.float32, [*PASSES, EVERYWHERE])
    products = nodes_of(gm, "matmul_by_head")
    assert [shape(node)[1:] for node in products] == [(HEADS, RANK), (HEADS, V)] * 2
    assert not nodes_of(gm, "bmm")


@pytest.mark.long
def test_inductor_copies_nothing_before_the_next_product() -> None:
    model, inputs = Stack(1), make_inputs(**KINDS["decode"])
    expected, passes = model(*inputs), [*PASSES, EVERYWHERE]
    compiled = torch.compile(model, backend="mla", fullgraph=True, options={"passes": passes})
    out, (code,) = run_and_get_code(compiled, *inputs)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    _, _, behind = code.partition("= torch.ops.mla_compile.matmul_by_head.default(")
    assert behind, "the op is called"
    assert "_fused" not in behind.partition("mm(")[0]


def after(read: Callable[[Tensor], Tensor], w: Tensor = W, **options: bool) -> list[str]:
    """The ops of a graph in which `read` takes what comes after attention."""
    *tensors, q_lens, q_len, scale = decode_case([5, 3], heads=3, rank=4).args()

    def attend(w: Tensor) -> Tensor:
        latent, _ = mla_decode(*tensors, q_len=q_len, softmax_scale=scale, q_lens=q_lens)
        return read(torch.einsum("thk,hkn->thn", latent, w))

    found = capture_graph(attend, (w,), {})
    assert found is not None
    return ops(pipeline.run(*found, [partial(spell_by_head, **options)]))


def test_it_stays_a_bmm_on_the_cpu_and_where_it_is_counted_on_that_heads_come_first() -> None:
    assert "matmul_by_head" in after(lambda out: out.flatten(1) + 1, everywhere=True)
    assert "bmm" in after(lambda out: out.flatten(1) + 1)
    for read in (
        lambda out: out,  # its strides are the caller's
        lambda out: out.transpose(0, 1).view(-1) + 1,
        lambda out: out.as_strided((2, 2), (1, 2)) + 1,
    ):
        assert "bmm" in after(read, everywhere=True)
    assert "bmm" in after(lambda out: out.flatten(1) + 1, nn.Parameter(W), everywhere=True), "a gradient"
