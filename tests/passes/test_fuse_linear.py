"""`fuse_linear`: which products it joins, what it must leave, results, and weights that move afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mla_compile.models.layout import pack_adjacent
from mla_compile.ops.adjacent import lies_before
from mla_compile.ops.norm.rms_norm import fused_rms_norm
from mla_compile.passes import pipeline
from mla_compile.passes.effects import memory
from mla_compile.passes.fuse_linear import fuse_linear
from mla_compile.passes.fuse_norm_linear import fuse_norm_linear
from mla_compile.passes.fuse_norm_rope_append import fuse_norm_rope_append
from mla_compile.passes.fuse_norm_router import fuse_norm_router
from mla_compile.passes.fuse_rms_norm import fuse_rms_norm
from mla_compile.passes.remove_noops import remove_noops
from tests.integrations.test_logits import Reader
from tests.models_for_tests import tiny_model
from tests.passes.capture import Called, Capture, checked, nodes_of, ops, without_kernel, without_kernels
from tests.passes.steps import capture_steps, check_greedy_tokens

K, FIRST, SECOND = 16, 24, 8
JOIN = without_kernel(fuse_linear)


class Two(Called):
    """Two layers `a` and `b` with adjacent weights; `call` uses them."""

    def __init__(self, call: Callable[["Two", Tensor], Any]) -> None:
        super().__init__(call)
        self.a, self.b = nn.Linear(K, FIRST, bias=False), nn.Linear(K, SECOND, bias=False)
        self.requires_grad_(False)
        make_adjacent(self)


def make_adjacent(model: Two) -> None:
    """Puts `a` before `b` in memory."""
    both = torch.cat([model.a.weight.data, model.b.weight.data])
    model.a.weight.data, model.b.weight.data = both.split([len(model.a.weight), len(model.b.weight)])


def run(model: nn.Module, x: Tensor | None = None) -> fx.GraphModule:
    x = torch.randn(5, K, dtype=next(model.parameters()).dtype) if x is None else x
    return checked(model, [JOIN], x, dynamic=True)


def is_joined(gm: fx.GraphModule) -> bool:
    found = ops(gm)
    assert (found.count("fused_linear"), found.count("linear")) in ((1, 0), (0, 2))
    return "fused_linear" in found


@pytest.fixture
def serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass sees a kernel for the op."""
    monkeypatch.setattr("mla_compile.passes.fuse_linear.first_serves", lambda table, x: True)


@pytest.mark.long
def test_a_product_of_its_own_chooses_its_kernel_when_it_runs(serves: None) -> None:
    layers = (
        nn.Linear(K, 8, bias=False),
        nn.Linear(8, 6, bias=False),
        nn.Linear(6, 5),
        nn.Linear(5, 3, bias=False),
    )
    model = nn.Sequential(*layers).requires_grad_(False)
    for x in (torch.randn(5, K), torch.randn(2, 5, K), torch.randn(5, 2, K).transpose(0, 1)):
        gm = run(model, x)
        assert ops(gm).count("fused_linear") == 3 and ops(gm).count("linear") == 1, "not the one with a bias"


def test_products_of_a_product_are_joined_too(serves: None) -> None:
    def call(m: Two, x: Tensor) -> Any:
        a, b = m.a(x), m.b(x)
        return F.linear(a, m.c) + 1, F.linear(a, m.d) + 1, F.linear(b, m.e) + 1

    model = Two(call)
    model.c, model.d = (nn.Parameter(part, False) for part in torch.randn(7, FIRST).split([4, 3]))
    model.e = nn.Parameter(torch.randn(2, SECOND), False)
    gm = run(model)
    assert ops(gm).count("fused_linear") == 3 and "linear" not in ops(gm), "of x, of a, of b"


@pytest.mark.parametrize(("tokens", "is_left"), [(1, False), (2, False), (16, False), (17, True)])
def test_a_product_of_a_known_number_of_tokens_is_torchs_unless_they_are_few(
    tokens: int, is_left: bool, serves: None
) -> None:
    model, capture = nn.Linear(K, 8, bias=False).requires_grad_(False), Capture([fuse_linear])
    torch.compile(model, backend=capture, fullgraph=True, dynamic=False)(torch.randn(tokens, K))
    assert ("linear" in ops(capture.after[0])) == is_left


def test_on_the_cpu_a_product_of_its_own_is_left() -> None:
    assert "fused_linear" not in ops(run(nn.Linear(K, 8, bias=False).requires_grad_(False)))


# --- what is joined


def gate_and_up(m: Two, x: Tensor) -> Tensor:
    return F.silu(m.a(x)[..., :SECOND]) * m.b(x)


def the_second_first(m: Two, x: Tensor) -> Tensor:
    right = m.b(x) + 1
    return right * m.a(x)[..., :SECOND]


def in_three_dimensions(m: Two, x: Tensor) -> Tensor:
    x = x[None]
    return m.a(x)[..., :SECOND].float() + m.b(x)


def by_heads(m: Two, x: Tensor) -> tuple[Tensor, ...]:
    parts = m.b(x).split([2, SECOND - 2], dim=-1)
    return m.a(x).view(-1, 3, SECOND).transpose(0, 1) * 2, parts[0] * 2, parts[1].unsqueeze(1) + 1


def flattened(m: Two, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x[None]
    return m.a(x).flatten(0, -2) * 2, m.b(x).reshape(-1, SECOND) * 2


def into_an_op_of_ours(m: Two, x: Tensor) -> tuple[Tensor, Tensor]:
    return fused_rms_norm(m.a(x), None, 1e-5), m.b(x) * 2


def into_products(m: Two, x: Tensor) -> Tensor:
    return m.a(x)[:, :K] @ m.a.weight.T + (m.b(x) @ m.b.weight).sum()


@pytest.mark.parametrize(
    "call",
    [
        gate_and_up,
        the_second_first,
        in_three_dimensions,
        by_heads,
        flattened,
        into_an_op_of_ours,
        into_products,
    ],
)
def test_products_of_one_input_are_joined(call: Callable) -> None:
    gm = run(Two(call))
    assert is_joined(gm)
    (node,) = nodes_of(gm, "fused_linear")
    x, first, second = (argument.meta["example_value"] for argument in node.args)
    assert x.dim() == 2 and (len(first), len(second)) == (FIRST, SECOND)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    assert is_joined(
        run(Two(gate_and_up).to(dtype).apply(lambda m: make_adjacent(m) if isinstance(m, Two) else None))
    )


def test_views_have_the_strides_of_columns_after_the_pass() -> None:
    gm = run(Two(by_heads))
    (view,) = nodes_of(gm, "view")
    assert view.meta["example_value"].stride() == (FIRST + SECOND, SECOND, 1)
    assert len(memory([view, *nodes_of(gm, "fused_linear"), *nodes_of(gm, "unsqueeze")])) == 1


def test_two_of_three_adjacent_weights_are_joined() -> None:
    class Three(Two):
        def __init__(self) -> None:
            super().__init__(lambda m, x: (m.a(x) * 2, m.b(x) * 2, m.c(x) * 2))
            self.c = nn.Linear(K, 3, bias=False).requires_grad_(False)
            layers = self.a, self.b, self.c
            parts = torch.cat([layer.weight for layer in layers]).split([FIRST, SECOND, 3])
            for layer, part in zip(layers, parts):
                layer.weight.data = part

    found = ops(run(Three()))
    assert (found.count("fused_linear"), found.count("linear")) == (1, 1)


@pytest.mark.parametrize("mark", [torch._dynamo.mark_dynamic, torch._dynamo.decorators.mark_unbacked])
@pytest.mark.parametrize("call", [gate_and_up, by_heads, flattened])
def test_no_guard_is_added(call: Callable, mark: Callable) -> None:
    seen = []

    def look(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
        size = next(value for value in example_inputs if isinstance(value, torch.SymInt))
        seen.append(len(size.node.shape_env.guards))
        return gm

    x, capture = torch.randn(5, K), Capture([look, JOIN, look])
    mark(x, 0)
    torch.compile(Two(call), backend=capture, fullgraph=True)(x)
    assert is_joined(capture.after[0]) and seen[0] == seen[1]


# --- what must be left


@torch.library.custom_op("fuse_linear_test::first_element", mutates_args=())
def first_element(x: Tensor) -> Tensor:
    return x.as_strided((x.shape[0],), (FIRST,)).clone()  # it needs contiguous memory


@first_element.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0])


def returned(m: Two, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.a(x), m.b(x) * 2


def into_an_op_of_a_user(m: Two, x: Tensor) -> tuple[Tensor, Tensor]:
    return first_element(m.a(x)), m.b(x) * 2


def restrided(m: Two, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.a(x).as_strided((2, 2), (FIRST, 1)) * 2, m.b(x) * 2


def one_row(m: Two, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.a(x).view(-1) * 2, m.b(x) * 2


def one_row_as_a_copy(m: Two, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.a(x).reshape(-1) * 2, m.b(x) * 2


def written_to_afterwards(m: Two, x: Tensor) -> tuple[Tensor, Tensor]:
    a = m.a(x)
    a[:, 0].mul_(2)
    return a * 2, m.b(x) * 2


def input_written_between(m: Two, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone()
    a = m.a(x) * 2
    x.mul_(3)
    return a, m.b(x) * 2


def weight_written_between(m: Two, x: Tensor) -> tuple[Tensor, Tensor]:
    a = m.a(x) * 2
    m.b.weight.mul_(0.5)
    return a, m.b(x) * 2


def of_other_inputs(m: Two, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.a(x) * 2, m.b(x + 1) * 2


def of_one_row(m: Two, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.a(x[0]) * 2, m.b(x[0]) * 2


def with_a_bias(m: Two, x: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, m.a.weight, x[0, :1].expand(FIRST)) * 2, m.b(x) * 2


def by_computed_weights(m: Two, x: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat([m.a.weight, m.b.weight])
    return F.linear(x, both[:FIRST]) * 2, F.linear(x, both[FIRST:]) * 2


def under_autocast(m: Two, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return m.a(x) * 2, m.b(x) * 2


@pytest.mark.parametrize(
    "call",
    [
        returned,
        into_an_op_of_a_user,
        restrided,
        one_row,
        one_row_as_a_copy,
        written_to_afterwards,
        input_written_between,
        weight_written_between,
        of_other_inputs,
        of_one_row,
        with_a_bias,
        by_computed_weights,
        under_autocast,
    ],
)
def test_what_a_joined_product_could_change_is_left(call: Callable) -> None:
    assert not is_joined(run(Two(call)))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (returned, "`output`"),
        (one_row, "`view`"),
        (input_written_between, "writ"),
    ],
)
def test_the_log_says_what_was_joined_and_what_was_not(call: Callable, reason: str, logged: Callable) -> None:
    run(Two(gate_and_up))
    run(Two(call))
    joined, left = logged("fuse_linear")
    assert joined.startswith("fused: b (test_fuse_linear.py:") and "with a (" in joined
    assert left.startswith("not fused: b (") and reason in left


def test_weights_that_are_not_adjacent_are_left() -> None:
    model = Two(gate_and_up)
    model.b.weight.data = model.b.weight.data.clone()
    assert not is_joined(run(model))


@pytest.mark.long
def test_a_gradient_that_is_wanted_is_computed() -> None:
    model, x = Two(gate_and_up).requires_grad_(), torch.randn(5, K)
    capture = Capture([JOIN])
    compiled = torch.compile(model, backend=capture, fullgraph=True)
    compiled(x).sum().backward()
    assert not is_joined(capture.after[0]) and model.b.weight.grad is not None
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert is_joined(capture.after[1])


def test_few_passes_come_after_it_and_it_leaves_cpus_alone() -> None:
    assert pipeline.PASSES[-4:] == [fuse_linear, remove_noops, fuse_norm_router, fuse_norm_linear]
    assert not is_joined(checked(Two(gate_and_up), [fuse_linear], torch.randn(5, K)))


# --- weights that move


def test_a_compiled_graph_stays_right_when_weights_move() -> None:
    model, x, capture = Two(gate_and_up), torch.randn(5, K), Capture([JOIN])
    compiled = torch.compile(model, backend=capture, fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    for change in (
        lambda: setattr(model.b.weight, "data", torch.randn(SECOND, K)),
        lambda: setattr(model.a.weight, "data", torch.randn(FIRST, K)),
        lambda: make_adjacent(model),
        lambda: model.a.weight.data.mul_(2),
    ):
        change()
        torch.testing.assert_close(compiled(x), model(x))
    assert is_joined(capture.after[0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fake_weights_share_a_storage_where_the_weights_do(mode: Callable) -> None:
    """The pass reads from Dynamo's fake tensors how weights share memory."""
    model = Two(gate_and_up)
    with mode():
        gm = run(model)
        weights = [n.meta["example_value"] for n in gm.graph.nodes if "weight" in n.name]
        first, second = sorted(weights, key=len, reverse=True)
        assert lies_before(first, second) and type(second.storage_offset()) is int
        model.b.weight.data = model.b.weight.data.clone()
        torch.compiler.reset()
        assert len(memory(n for n in run(model).graph.nodes if "weight" in n.name)) == 2


@pytest.mark.long
def test_inductor_passes_columns_to_ops_of_ours_without_a_copy() -> None:
    from torch._inductor.utils import run_and_get_code

    x, model = torch.randn(5, K), Two(into_an_op_of_ours)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    compiled = torch.compile(model, backend="mla", fullgraph=True, options={"passes": [JOIN]})
    with torch.compiler.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(compiled, x)
    (code,) = codes
    assert "fused_rms_norm.default(reinterpret_tensor(buf" in code
    assert code.count("empty_strided_cpu(") == 1, "for what is added"


# --- models


FUSING = without_kernels(fuse_norm_rope_append, fuse_rms_norm, fuse_linear)


@pytest.mark.long
def test_steps_of_glm_are_joined_and_give_the_stock_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader("glm4_moe_lite", num_hidden_layers=2)
    pack_adjacent(reader.model)
    capture = capture_steps(reader, FUSING, monkeypatch)
    for _ in range(2):
        reader.assert_as_stock(reader.decode(1))
    # Queries and latents of two layers; gate and up of one MLP, and of the other layer's shared experts.
    assert len(nodes_of(capture.after[0], "fused_linear")) == 4


@pytest.mark.long
@pytest.mark.usefixtures("unlowered")
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_an_engines_greedy_tokens_are_those_of_plain_decoding(
    batch_invariant: bool, monkeypatch: pytest.MonkeyPatch, logged: Callable
) -> None:
    monkeypatch.setattr(pipeline, "PASSES", FUSING)
    model = tiny_model(torch.float32)
    pack_adjacent(model)
    check_greedy_tokens(model, batch_invariant=batch_invariant)
    messages = logged("fuse_linear")
    assert len(messages) >= 7 and all(message.startswith("fused: ") for message in messages), messages
