"""`fuse_rms_norm`: which norms and additions become one op, which do not, and that values stay."""

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from mla_compile.ops import dispatch
from mla_compile.passes import pipeline
from mla_compile.passes.fuse_norm_rope_append import fuse_norm_rope_append
from mla_compile.passes.fuse_rms_norm import fuse_rms_norm
from tests.integrations.test_logits import Reader
from tests.passes.capture import Capture, checked, nodes_of, ops, without_kernels
from tests.passes.steps import capture_steps

K = 40
NORMS = {"fused_rms_norm", "fused_add_rms_norm"}
Call = Callable[..., Any]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


WEIGHT = draw(K)
WEIGHTS = {dtype: WEIGHT.to(dtype) for dtype in (torch.float32, torch.bfloat16)}


def written_out(x: Tensor, weight: Tensor) -> Tensor:
    """As in transformers."""
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + 1e-5)).to(x.dtype)


def residual(x: Tensor, y: Tensor) -> Tensor:
    total = x + y
    return torch.cat([total, written_out(total, WEIGHTS[x.dtype]), total * 2])


def tensors(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def strides(x: Tensor) -> list[int]:
    return [stride for stride, size in zip(x.stride(), x.shape) if size != 1]


def run(call: Call, *inputs: Tensor) -> list[str]:
    """The ops left by the pass, which keeps values, strides and in-place writes to inputs."""
    capture = Capture([partial(fuse_rms_norm, require_kernel=False)])
    compiled = torch.compile(call, backend=capture, fullgraph=True)
    mine, theirs = ([x.clone() for x in inputs] for _ in range(2))
    found, expected = tensors(compiled(*mine)), tensors(call(*theirs))
    tolerance = 2e-2 if torch.bfloat16 in [x.dtype for x in (*expected, *inputs)] else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert list(map(strides, found)) == list(map(strides, expected))
    assert all(map(torch.equal, mine, theirs))
    return ops(capture.after[0])


FUSED: dict[str, tuple[Call, str]] = {
    "with a weight of a narrower dtype": (
        lambda x, y: F.rms_norm(x, (K,), WEIGHTS[torch.bfloat16], 1e-5),
        "fused_rms_norm",
    ),
    "times whole numbers": (
        lambda x, y: (WEIGHT * 5).int() * F.rms_norm(x, (K,), eps=1e-5),
        "fused_rms_norm",
    ),
    "of one dimension": (lambda x, y: written_out(x[0], WEIGHTS[x.dtype]), "fused_rms_norm"),
    "torch's function": (lambda x, y: F.rms_norm(x, (K,), eps=1e-5), "fused_rms_norm"),
    "without an epsilon": (lambda x, y: F.rms_norm(x * 1e-3, (K,)), "fused_rms_norm"),
    "with a weight": (lambda x, y: F.rms_norm(x, (K,), WEIGHTS[x.dtype], 1e-5), "fused_rms_norm"),
    "times a weight": (lambda x, y: WEIGHTS[x.dtype] * F.rms_norm(x, (K,), eps=1e-5), "fused_rms_norm"),
    "aten's op": (
        lambda x, y: torch.ops.aten.rms_norm(x, [K], WEIGHTS[x.dtype], 1e-5),
        "fused_rms_norm",
    ),
    "written out": (lambda x, y: written_out(x, WEIGHTS[x.dtype]), "fused_rms_norm"),
    "of three dimensions": (
        lambda x, y: written_out(x.view(3, 3, K), WEIGHTS[x.dtype]),
        "fused_rms_norm",
    ),
    "of a part of the columns": (
        lambda x, y: F.rms_norm(torch.cat([x, y], 1)[:, :K], (K,)),
        "fused_rms_norm",
    ),
    "a sum": (residual, "fused_add_rms_norm"),
    "a sum of three dimensions": (
        lambda x, y: F.rms_norm(torch.add(x.view(3, 3, K), y.view(3, 3, K)), (K,), eps=1e-5),
        "fused_add_rms_norm",
    ),
    "a sum with itself": (lambda x, y: F.rms_norm(x + x, (K,), eps=1e-5), "fused_add_rms_norm"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_norms_become_one_op(name: str, dtype: torch.dtype) -> None:
    call, op = FUSED[name]
    found = run(call, draw(9, K).to(dtype), draw(3, 3 * K).view(9, K).to(dtype))
    assert NORMS & set(found) == {op}, found
    assert not {"pow", "rsqrt", "rms_norm", "mean"} & set(found), found
    assert (op == "fused_rms_norm") or "add" not in found


def other_tokens(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1) + 1e-5)  # [9, 1, K] by [9, 1]


def written_to(x: Tensor, y: Tensor) -> Tensor:
    wide = x.float()  # x itself
    variance = wide.pow(2).mean(-1, keepdim=True)
    x.mul_(-3)
    return wide * torch.rsqrt(variance + 1e-5)


def written_to_first(x: Tensor, y: Tensor) -> Tensor:
    wide = x.float()  # x itself
    x.mul_(3).add_(1)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def written_to_the_cast(x: Tensor, y: Tensor) -> Tensor:
    wide = x.bfloat16().float()
    wide.view(-1).add_(1)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(torch.bfloat16)


def written_to_the_square(x: Tensor, y: Tensor) -> Tensor:
    square = x.pow(2)
    square.mul_(3)
    return x * torch.rsqrt(square.mean(-1, keepdim=True) + 1e-5)


def on_another_device(x: Tensor, y: Tensor) -> Tensor:
    wide = x.bfloat16().to("meta", torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(torch.bfloat16)


LEFT: dict[str, tuple[Call, tuple[int, ...]]] = {
    "another formula": (lambda x, y: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt(), (9, K)),
    "an epsilon with a factor": (
        lambda x, y: x * torch.rsqrt(torch.add(x.pow(2).mean(-1, True), 0.5, alpha=2)),
        (9, K),
    ),
    "two dimensions": (lambda x, y: F.rms_norm(x, (9, K)), (9, K)),
    "the mean of other columns": (lambda x, y: x * torch.rsqrt(x.pow(2).mean(0, True) + 1e-5), (9, K)),
    "what broadcasts": (other_tokens, (9, 1, K)),
    "what is written to meanwhile": (written_to, (9, K)),
    "what is written to before the square": (written_to_first, (9, K)),
    "a cast that is written to": (written_to_the_cast, (9, K)),
    "a square that is written to": (written_to_the_square, (9, K)),
    "a square with a place": (
        lambda x, y: x * torch.rsqrt(torch.pow(x, 2, out=y).mean(-1, True) + 1e-5),
        (9, K),
    ),
    "a product with a place": (
        lambda x, y: torch.mul(x, torch.rsqrt(x.pow(2).mean(-1, True) + 1e-5), out=y) + 1,
        (9, K),
    ),
    "another device": (on_another_device, (9, K)),
    "a number": (lambda x, y: (z := x[0, 0]) * torch.rsqrt(z.pow(2).mean(-1, True) + 1e-5), (9, K)),
    "no columns": (lambda x, y: F.rms_norm(x.view(3, 3, K)[..., :0], (0,), eps=1e-5), (9, K)),
    "complex numbers": (
        lambda x, y: torch.view_as_real(F.rms_norm(torch.complex(x, y), (K,), eps=1e-5)),
        (9, K),
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_another_formula_stays(name: str) -> None:
    call, shape = LEFT[name]
    assert not NORMS & set(run(call, draw(*shape), draw(*shape)))


def test_a_norm_that_is_used_twice_keeps_its_product() -> None:
    found = run(lambda x: (y := F.rms_norm(x, (K,), eps=1e-5)) * WEIGHT + y, draw(9, K))
    assert "fused_rms_norm" in found and "mul" in found


def test_a_norm_reads_its_input_where_it_is_written() -> None:
    def called(x: Tensor) -> Tensor:
        normed = F.rms_norm(x, (K,), eps=1e-5)
        x.add_(1)
        return WEIGHT * normed

    def cast(x: Tensor) -> Tensor:
        wide = x.float()
        variance = wide.pow(2).mean(-1, keepdim=True)
        x.mul_(-3)
        return WEIGHT.bfloat16() * (wide * torch.rsqrt(variance + 1e-5)).to(x.dtype)

    assert "fused_rms_norm" in run(called, draw(3, K))
    assert "fused_rms_norm" in run(cast, draw(3, K).bfloat16())


ALONE: dict[str, Call] = {
    "one that broadcasts": lambda x, y: F.rms_norm(x + WEIGHT, (K,), eps=1e-5),
    "one with a factor": lambda x, y: F.rms_norm(torch.add(x, y, alpha=2), (K,), eps=1e-5),
    "one of two dtypes": lambda x, y: F.rms_norm(x + y.bfloat16(), (K,), eps=1e-5),
    "one that is written to": lambda x, y: F.rms_norm((x + y).mul_(2), (K,), eps=1e-5),
}


@pytest.mark.parametrize("name", ALONE)
def test_additions_that_stay(name: str) -> None:
    found = run(ALONE[name], draw(9, K), draw(3, 3 * K).view(9, K))
    assert NORMS & set(found) == {"fused_rms_norm"} and "add" in found


def test_a_sum_that_is_written_to_before_its_norm() -> None:
    def call(x: Tensor, y: Tensor) -> Tensor:
        total = x + y
        total.mul_(2)
        return F.rms_norm(total, (K,), eps=1e-5)

    assert NORMS & set(run(call, draw(9, K), draw(3, 3 * K).view(9, K))) == {"fused_rms_norm"}


def test_a_weight_that_is_made_after_the_sum() -> None:
    def call(x: Tensor, y: Tensor) -> Tensor:
        total = x + y
        return F.rms_norm(total, (K,), total[0] * 2, 1e-5)

    assert NORMS & set(run(call, draw(9, K), draw(3, 3 * K).view(9, K))) == {"fused_rms_norm"}


def transposed(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    total = x.view(3, 3, K).transpose(0, 1) + y.view(3, 3, K).transpose(0, 1)
    normed = written_out(total, WEIGHT)
    return normed.transpose(0, 1).view(9, K), total.transpose(0, 1).view(9, K), normed


def columns_apart(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    total = x.view(K, 9).t() * 2
    return written_out(total, WEIGHT).t().view(-1), F.rms_norm(total, (K,), WEIGHT, 1e-5).view(-1)


@pytest.mark.parametrize("call", [transposed, columns_apart])
def test_what_is_not_contiguous_keeps_its_strides_and_is_fused_in_the_exact_mode_only(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert NORMS & set(run(call, draw(9, K), draw(3, 3 * K).view(9, K))) == {"fused_rms_norm"}
    as_with_kernel(monkeypatch)
    capture = Capture([fuse_rms_norm])
    torch.compile(call, backend=capture, fullgraph=True)(draw(9, K), draw(9, K))
    assert "rsqrt" in ops(capture.after[0])  # what is written out; torch's function is contiguous


def as_with_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes see a GPU; the op runs on the CPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "describe_device", lambda device: ("cuda", (9, 0)))


def test_a_number_of_columns_that_varies_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    as_with_kernel(monkeypatch)
    capture = Capture([fuse_rms_norm])
    compiled = torch.compile(
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-5), backend=capture, dynamic=True
    )
    for columns in (40, 30, 7):
        compiled(draw(9, columns))
    assert len(capture.after) == 1 and "fused_rms_norm" in ops(capture.after[0])


def test_an_epsilon_that_varies_is_left_to_torch() -> None:
    capture = Capture([])
    torch.compile(lambda x: F.rms_norm(x, (K,), eps=1e-5), backend=capture, fullgraph=True)(draw(9, K))
    (gm,) = capture.after
    (norm,) = nodes_of(gm, "rms_norm")
    with gm.graph.inserting_before(norm):
        norm.update_kwarg("eps", gm.graph.placeholder("eps"))  # what Dynamo makes of a float that changes
    assert "rms_norm" in ops(fuse_rms_norm(gm, require_kernel=False))


def test_a_weight_of_a_subclass_is_left_to_torch() -> None:
    capture = Capture([partial(fuse_rms_norm, require_kernel=False)])
    call = torch.compile(lambda x, w: F.rms_norm(x, (K,), w, 1e-5), backend=capture, fullgraph=True)
    assert type(call(draw(9, K), TwoTensor(WEIGHT, WEIGHT.clone()))) is TwoTensor
    assert not NORMS & set(ops(capture.after[0]))


GRADIENT = torch.nn.Parameter(WEIGHT.clone())


def sum_alone(x: Tensor) -> tuple[Tensor, ...]:
    total = x + GRADIENT.expand(9, K)
    with torch.no_grad():
        return written_out(total, WEIGHT), total


def weight_alone(x: Tensor) -> Tensor:
    with torch.no_grad():
        normed = F.rms_norm(x, (K,), eps=1e-5)
    return GRADIENT * normed


def all_but_weight(x: Tensor) -> Tensor:
    normed = F.rms_norm(x, (K,), eps=1e-5)
    with torch.no_grad():
        return GRADIENT * normed


@torch.no_grad()
def nothing(x: Tensor) -> Tensor:
    return written_out(x + GRADIENT.expand(9, K), GRADIENT)


@pytest.mark.parametrize("call", [sum_alone, weight_alone, all_but_weight, nothing])
def test_gradients_that_are_wanted_stay(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    as_with_kernel(monkeypatch)
    capture = Capture([fuse_rms_norm])
    found, expected = torch.compile(call, backend=capture, fullgraph=True)(draw(9, K)), call(draw(9, K))
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(tensors(found), tensors(expected)):
        assert mine.requires_grad == theirs.requires_grad
        if mine.requires_grad:
            (gradient,) = torch.autograd.grad(mine.square().sum(), GRADIENT)
            torch.testing.assert_close(gradient, torch.autograd.grad(theirs.square().sum(), GRADIENT)[0])
    assert NORMS & set(ops(capture.after[0])) == {
        "fused_add_rms_norm" if call is nothing else "fused_rms_norm"
    }


@pytest.mark.parametrize(
    "call", [lambda x: F.rms_norm(x, (K,), GRADIENT, 1e-5), lambda x: written_out(x, GRADIENT)]
)
def test_no_gradient_is_dropped_in_the_exact_mode(call: Call) -> None:
    compiled = torch.compile(
        call, backend=Capture([partial(fuse_rms_norm, require_kernel=False)]), fullgraph=True
    )
    with pytest.raises(Exception, match=r"weight: .*requires_grad"):
        compiled(draw(9, K))


def drawn(choice: random.Random) -> Call:
    """A sum, norms of it and of its terms, with writes in place between; returns all of them."""
    dims = choice.choice([[K], [9, K], [3, 3, K], [3, 1, 3, K]])
    layout, writes = choice.randrange(4), [choice.randrange(8) for _ in range(9)]
    cast, sums, weights = choice.random() < 0.5, choice.randrange(5), [choice.randrange(6) for _ in range(2)]
    ways = [choice.randrange(4) for _ in range(2)]

    def view(x: Tensor) -> Tensor:
        x = x.view(-1)[: torch.Size(dims).numel()].view(dims)
        if layout == 1 and x.dim() > 2:
            return x.transpose(0, -2)
        if layout == 2 and x.dim() == 2:
            return x.view(K, 9).t()
        return torch.cat([x, x], -1)[..., 3 : 3 + K] if layout == 3 else x

    def call(x: Tensor, y: Tensor) -> list[Tensor]:
        a, b = view(x), view(y)
        a, b = (a.bfloat16(), b.bfloat16()) if cast else (a, b)
        weight = WEIGHTS[a.dtype].clone()
        made = [a, b, weight]
        places = iter(writes)

        def maybe_write() -> None:
            place = next(places)
            if place < len(made):
                made[place].mul_(1.5)

        def norm(v: Tensor, way: int, kind: int) -> Tensor:
            if way == 0:
                normed = F.rms_norm(v, (K,), weight if kind == 4 else None, eps=1e-5)
            else:
                wide = v.float() if way == 1 else v.to(torch.float32)
                square = wide.pow(2) if way == 2 else wide**2
                made.extend([wide, square] if way == 3 else [wide])
                maybe_write()
                scale = torch.rsqrt(square.mean(-1, keepdim=True) + 1e-5)
                maybe_write()
                normed = (scale * wide if way == 2 else wide * scale).to(v.dtype)
            maybe_write()
            late = {0: weight, 1: weight.view(1, K)[0], 2: weight * 2, 3: v.reshape(-1, K)[0]}
            return late[kind] * normed if kind in late else normed

        total = [lambda: a + b, lambda: torch.add(a, other=b), lambda: a.add(b), lambda: a + a, lambda: a][
            sums
        ]()
        made.append(total)
        maybe_write()
        first = norm(total, ways[0], weights[0])
        maybe_write()
        second = norm(total + first if ways[1] == 3 else total, ways[1], weights[1])
        return [first, second, *made[3:]]

    return call


def test_a_write_between_to_a_sum_that_an_earlier_norm_has_taken() -> None:
    def call(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        first = F.rms_norm(total, (K,), eps=1e-5)
        wide = total.float()  # the sum itself
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        total.mul_(2)
        return first, (wide * scale).to(x.dtype)

    assert "rsqrt" in run(call, draw(9, K), draw(3, 3 * K).view(9, K))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(24))
def test_drawn_norms(seed: int) -> None:
    run(drawn(random.Random(seed)), draw(9, K), draw(3, 3 * K).view(9, K))


@pytest.mark.long
@pytest.mark.parametrize(("family", "alone"), [("glm4_moe_lite", 3), ("minicpm3", 3)])
def test_every_norm_of_a_step_of_transformers_models_is_one_op_and_logits_are_those_of_stock(
    family: str, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(family, num_hidden_layers=2)
    capture = capture_steps(reader, without_kernels(fuse_norm_rope_append, fuse_rms_norm), monkeypatch)
    reader.assert_as_stock(reader.decode(1))
    found = Counter(ops(capture.after[0]))
    # Of the embeddings and the queries; after each attention and MLP.
    assert (found["fused_rms_norm"], found["fused_add_rms_norm"]) == (alone, 4)
    assert not found["rsqrt"]


def test_it_is_one_of_the_passes_and_leaves_cpus_alone() -> None:
    assert fuse_rms_norm in pipeline.PASSES
    assert not NORMS & set(ops(checked(residual, [fuse_rms_norm], draw(9, K), draw(9, K))))
