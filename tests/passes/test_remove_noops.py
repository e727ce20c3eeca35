"""`remove_noops`: unread results and views that change nothing are removed; the rest computes and writes the same."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile.passes.fuse_linear import fuse_linear
from mla_compile.passes.fuse_rms_norm import fuse_rms_norm
from mla_compile.passes.remove_noops import remove_noops
from mla_compile.torch_internals import mark_varying
from tests.passes.capture import checked, graph_of, ops, without_kernel

X = torch.arange(24.0).view(4, 6)


def rows_and_back(x: Tensor) -> Tensor:
    rows = x.sin().unsqueeze(0).flatten(0, 1).reshape(x.shape).contiguous()
    return rows.view(x.shape[0], 1, -1).squeeze(1).cos()


def a_view_that_is_written_to(x: Tensor) -> Tensor:
    own = x.sin()
    own.view(x.shape).mul_(2)
    return own.reshape(x.shape) + 1


def read_by_nothing(x: Tensor) -> Tensor:
    x.exp().flatten()
    x.split(2, dim=-1)
    return x.sin()


def for_its_effect(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.sin()


def write_to_the_input(x: Tensor) -> Tensor:
    x.view(-1).view(x.shape).add_(1)
    return x.sin()


def a_copy(x: Tensor) -> Tensor:
    turned = x.t()
    turned.contiguous().mul_(2)
    turned.flatten().mul_(2)
    return turned.reshape(6, -1) + turned.contiguous().reshape(6, -1)


def other_elements(x: Tensor) -> Tensor:
    return x.sin().view(-1, 6).view(torch.int32).view(-1, 6).view(torch.float32).flatten(0, 0)


def one_dimension_more(x: Tensor) -> Tensor:
    return x.sin().unsqueeze(-1)


def in_another_order(x: Tensor) -> Tensor:
    own = x.sin().view(1, -1, 2, 3)
    other = own.contiguous(memory_format=torch.channels_last)
    other.mul_(2)
    return own + other


def sizes(x: Tensor) -> Tensor:
    rows = x.sin()
    return rows.flatten().view(1, rows.shape[0], 6).view(x.shape[0], 6) + x.flatten().shape[0]


@pytest.mark.parametrize("varying", [False, True], ids=["", "unknown rows"])
@pytest.mark.parametrize(
    ("function", "left"),
    [
        (rows_and_back, ["sin", "cos"]),
        (a_view_that_is_written_to, ["sin", "mul_", "add"]),
        (read_by_nothing, ["sin"]),
        (for_its_effect, ["_set_grad_enabled", "sin", "_set_grad_enabled"]),
        (write_to_the_input, ["add_", "sin"]),
        (a_copy, None),
        (other_elements, None),
        (one_dimension_more, ["sin", "unsqueeze"]),
        (in_another_order, None),
        (sizes, None),
    ],
)
def test_what_is_left_does_the_same(
    function: Callable[[Tensor], Tensor], left: list[str] | None, varying: bool
) -> None:
    x = X.clone()
    if varying:
        mark_varying(x)
    gm, inputs = graph_of(function, x)
    gm = remove_noops(gm, inputs)
    gm.graph.lint()
    gm.recompile()
    if left is not None:
        kept = [
            op for op in ops(gm) if "sym" not in op and "assert" not in op and op not in ("ge", "eq", "not_")
        ]
        assert kept == left
    for rows in (4, 2) if varying else (4,):
        mine, other = X[:rows].clone(), X[:rows].clone()
        values = [mine] if len(inputs) == 1 else [rows, mine]
        torch.testing.assert_close(gm(*values)[0], function(other), rtol=0, atol=0)
        assert torch.equal(mine, other), "the input"


def test_noops_of_other_passes_are_removed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers on `[1, tokens, width]`, by an op that takes `[tokens, width]`."""
    monkeypatch.setattr("mla_compile.passes.fuse_linear.first_serves", lambda table, x: True)
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False)).requires_grad_(False)
    x = torch.randn(1, 7, 6)
    torch._dynamo.mark_dynamic(x, 1)
    assert ops(checked(model, [fuse_linear, remove_noops], x)) == [
        "flatten",
        "fused_linear",
        "fused_linear",
        "view",
    ]


def test_a_write_to_a_view_of_what_another_pass_has_replaced_stays() -> None:
    """The op's view has the memory of the replaced norm and so of that norm's view; the op's own result has not."""

    def norm_written_to(x: Tensor) -> Tensor:
        normed = F.rms_norm(x, (6,), eps=1e-6)
        normed.view(-1, 2, 3)[:, 1].mul_(0.5)
        return normed + x

    passes = [without_kernel(fuse_rms_norm), remove_noops]
    assert "mul_" in ops(checked(norm_written_to, passes, X.clone()))
