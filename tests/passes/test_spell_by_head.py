"""`spell_by_head`: products by head are one `bmm`, with the bits and strides of the einsum."""

import pytest
import torch

from mla_compile.passes.spell_by_head import spell_by_head
from mla_compile.torch_internals import capture_graph
from tests.passes.capture import ops

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
