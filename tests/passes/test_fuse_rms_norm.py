"""`fuse_rms_norm`: which norms and additions become one op, which do not, and that values stay."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.integrations.transformers.target import TransformersTarget
from mla_compile.passes import pipeline
from mla_compile.passes.fuse_norm_rope_append import fuse_norm_rope_append
from mla_compile.passes.fuse_rms_norm import fuse_rms_norm
from tests.integrations.test_logits import Reader
from tests.passes.capture import Capture, ops

K = 40
NORMS = {"fused_rms_norm", "fused_add_rms_norm"}
Call = Callable[..., Tensor]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


WEIGHT = draw(K)
WEIGHTS = {dtype: WEIGHT.to(dtype) for dtype in (torch.float32, torch.bfloat16)}


def written_out(x: Tensor, weight: Tensor) -> Tensor:
    """As transformers does."""
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + 1e-5)).to(x.dtype)


def residual(x: Tensor, y: Tensor) -> Tensor:
    total = x + y
    return torch.cat([total, written_out(total, WEIGHTS[x.dtype]), total * 2])


def run(call: Call, *inputs: Tensor) -> list[str]:
    """The ops left by the pass, which keeps values, in-place writes to inputs too."""
    capture = Capture([partial(fuse_rms_norm, everywhere=True)])
    compiled = torch.compile(call, backend=capture, fullgraph=True)
    mine, theirs = ([x.clone() for x in inputs] for _ in range(2))
    torch.testing.assert_close(compiled(*mine), call(*theirs))
    assert all(map(torch.equal, mine, theirs))
    return ops(capture.after[0])


FUSED: dict[str, tuple[Call, str]] = {
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


@pytest.mark.parametrize(("family", "alone"), [("glm4_moe_lite", 3), ("minicpm3", 3)])
def test_every_norm_of_a_step_of_transformers_models_is_one_op_and_logits_are_those_of_stock(
    family: str, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(family, num_hidden_layers=2)
    reader.prefill([5, 1, 9, 2])
    passes = [p for p in pipeline.PASSES if p not in (fuse_rms_norm, fuse_norm_rope_append)]
    passes += [partial(p, everywhere=True) for p in (fuse_norm_rope_append, fuse_rms_norm)]
    capture, run_stock = Capture(passes), TransformersTarget.forward
    compiled = torch.compile(
        lambda *inputs: run_stock(reader.target, *inputs), backend=capture, fullgraph=True
    )
    monkeypatch.setattr(TransformersTarget, "forward", lambda self, *inputs: compiled(*inputs))
    reader.assert_as_stock(reader.decode(1))
    found = Counter(ops(capture.after[0]))
    # Of the embeddings and the queries; after each attention and MLP.
    assert (found["fused_rms_norm"], found["fused_add_rms_norm"]) == (alone, 4)
    assert not found["rsqrt"]


def test_it_is_one_of_the_passes_and_leaves_cpus_alone() -> None:
    assert fuse_rms_norm in pipeline.PASSES
    capture = Capture([fuse_rms_norm])
    torch.compile(residual, backend=capture, fullgraph=True)(draw(9, K), draw(9, K))
    assert not NORMS & set(ops(capture.after[0]))
