"""`rotate_queries`: rotations that it sees, what it must leave, and results."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from mla_compile import MLABatch, mla_attention
from mla_compile.caches import allocate
from mla_compile.integrations.transformers.target import TransformersTarget
from mla_compile.ops import dispatch
from mla_compile.ops.attention.norm_rope import norm_rope_append_op, rotate_queries_op
from mla_compile.passes import PASSES, pipeline
from mla_compile.passes.effects import may_write, memory
from mla_compile.passes.fuse_norm_rope_append import fuse_norm_rope_append
from mla_compile.passes.nodes import calls, op_arguments
from mla_compile.passes.rotate_queries import rotate_queries
from mla_compile.speculate import DecodeState, PackedChunks, PromptChunk, SpeculativeDecoder
from tests.integrations.families import stock_model
from tests.integrations.mtp import random_mtp
from tests.integrations.test_logits import Reader
from tests.passes.capture import (
    DECODE,
    HEADS,
    KINDS,
    NOPE,
    ROPE,
    Layer,
    NormRopeLayer,
    compared,
    graph_of,
    halves,
    make_inputs,
    neighbours,
    nodes_of,
    ops,
    rotate_half,
    shape,
    upcast,
    without_kernel,
    without_kernels,
)
from tests.passes.steps import capture_steps, speculative_step

WIDTH = NOPE + ROPE
UNKNOWN = {"decode of unknown rows": DECODE | {"unbacked": True}}
FUSING = without_kernels(fuse_norm_rope_append, rotate_queries)


class Rotating(nn.Module):
    """An attention layer; `queries` rotates its queries."""

    def __init__(self, queries: Callable, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer, self.queries = Layer().to(dtype).requires_grad_(False), queries

    def forward(self, x: Tensor, batch: MLABatch) -> Tensor:
        layer = self.layer
        angles = torch.outer(torch.arange(len(x)) + 1.0, torch.tensor([1.0, 0.1]))
        kv_c, k_pe = layer.kv_proj(x).split([layer.w_uk.shape[2], ROPE], dim=-1)
        q_nope, q_pe, more = self.queries(layer.q_proj(x), angles)
        out = mla_attention(
            q_nope, q_pe, kv_c, halves(k_pe, angles), layer.kv_cache, layer.w_uk, layer.w_uv, batch, 0.3
        )
        return layer.o_proj(out.flatten(1)) + more


# --- ways to rotate


def in_two_parts(q: Tensor, angles: Tensor, rope: Callable = halves) -> tuple[Any, ...]:
    q_nope, q_pe = q.view(-1, HEADS, WIDTH).split([NOPE, ROPE], dim=-1)
    return q_nope, rope(q_pe, angles[:, None]), 0


def by_slices(q: Tensor, angles: Tensor) -> tuple[Any, ...]:
    q = q.unflatten(-1, (HEADS, WIDTH))
    return q[..., :NOPE], neighbours(q[..., NOPE:], angles.unsqueeze(1)), 0


def joined_again(q: Tensor, angles: Tensor) -> tuple[Any, ...]:
    """As in transformers: heads before tokens, and both parts in one tensor."""
    q = q[None].view(1, -1, HEADS, WIDTH).transpose(1, 2)
    q_pass, q_rot = q.split([NOPE, ROPE], dim=-1)
    q = torch.cat([q_pass, halves(q_rot, angles[None, None])], dim=-1)
    return *q.transpose(1, 2).flatten(0, 1).split([NOPE, ROPE], dim=-1), 0


WAYS = [in_two_parts, partial(in_two_parts, rope=neighbours), by_slices, joined_again]


def compare(model: nn.Module, batch: dict[str, Any], dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    return compared(model, batch, dtype, FUSING)


def rotations(gm: fx.GraphModule) -> list[fx.Node]:
    """The rotated parts of queries, with and without an append."""
    found = [op_arguments(node)["q_pe"] for node in calls(gm.graph, rotate_queries_op, norm_rope_append_op)]
    return [q_pe for q_pe in found if q_pe is not None]


def attention_inputs(gm: fx.GraphModule) -> list[fx.Node]:
    """The rotated parts of what decodes, and what prefills."""
    return [node.args[1] for node in nodes_of(gm, "mla_decode")] + [
        node.args[0] for node in nodes_of(gm, "mla_prefill")
    ]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_rotation_is_seen_however_it_is_written_and_nothing_is_joined(way: Callable, kind: str) -> None:
    gm = compare(Rotating(way), KINDS[kind])
    assert ops(gm).count("mla_rotate_queries") == 1
    (rotated,) = nodes_of(gm, "mla_rotate_queries")
    (projection,) = (node for node in nodes_of(gm, "linear") if shape(node)[-1] == HEADS * WIDTH)
    assert memory([projection]) == memory([rotated.args[0], *attention_inputs(gm)]), "no copy"
    assert may_write(rotated) == [rotated.args[0]]


@pytest.mark.parametrize("way", [in_two_parts, joined_again])
def test_in_half_precision(way: Callable) -> None:
    assert "mla_rotate_queries" in ops(compare(Rotating(way, torch.bfloat16), DECODE, torch.bfloat16))


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_where_the_number_of_rows_is_unknown(kind: str) -> None:
    gm = compare(Rotating(in_two_parts), KINDS[kind] | {"unbacked": True})
    assert "mla_rotate_queries" in ops(gm)
    assert all(node.target is not torch.cat or node.args[1:] == () for node in attention_inputs(gm))


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    ["mixed", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "mixed")],
)
def test_inductor_rotates_in_place_too(kind: str) -> None:
    model, inputs = Rotating(in_two_parts), make_inputs(**KINDS[kind])
    theirs = copy.deepcopy(model)
    compiled = torch.compile(model, backend="mla", fullgraph=True, options={"passes": FUSING})
    torch.testing.assert_close(compiled(*inputs), theirs(*inputs), rtol=1e-5, atol=1e-5)


# --- what is left as it is


def used_before(q: Tensor, angles: Tensor) -> tuple[Any, ...]:
    return *in_two_parts(q, angles)[:2], q.sum(-1, keepdim=True)


def kept_unrotated(q: Tensor, angles: Tensor) -> tuple[Any, ...]:
    q_nope, q_pe = q.view(-1, HEADS, WIDTH).split([NOPE, ROPE], dim=-1)
    return q_nope, halves(q_pe, angles[:, None]), q_pe.sum((1, 2))[:, None]


def scaled(q: Tensor, angles: Tensor) -> tuple[Any, ...]:
    q_nope, q_pe, more = in_two_parts(q, angles)
    return q_nope, q_pe * 1.1, more


def unlike(q: Tensor, angles: Tensor) -> tuple[Any, ...]:
    """Each head by other angles."""
    q_nope, q_pe = q.view(-1, HEADS, WIDTH).split([NOPE, ROPE], dim=-1)
    return q_nope, halves(q_pe, angles[:, None] * torch.arange(HEADS)[:, None]), 0


def heads_mixed(q: Tensor, angles: Tensor) -> tuple[Any, ...]:
    q_nope, q_pe, more = in_two_parts(q, angles)
    return q_nope, q_pe.flip(1), more


def kept_by_their_strides(q: Tensor, angles: Tensor) -> tuple[Any, ...]:
    q_nope, q_pe, _ = in_two_parts(q, angles)
    return q_nope, q_pe, q_pe.as_strided((len(q), 1), (HEADS * ROPE, 1))


def read_beyond_a_view(q: Tensor, angles: Tensor) -> tuple[Any, ...]:
    q_nope, q_pe, _ = in_two_parts(q, angles)
    return q_nope, q_pe, q_nope.as_strided((len(q), 1), (HEADS * WIDTH, 1), WIDTH - 1)


def transposed(q: Tensor, angles: Tensor) -> tuple[Any, ...]:
    """Queries whose memory is not in the order of tokens."""
    q = (q.view(-1, 2, HEADS * WIDTH).transpose(0, 1) * 1.0).reshape(-1, HEADS, WIDTH)
    q_nope, q_pe = q.split([NOPE, ROPE], dim=-1)
    q = torch.cat([q_nope, halves(q_pe, angles[:, None])], dim=-1)
    return *q.split([NOPE, ROPE], dim=-1), 0


def written(q: Tensor, angles: Tensor) -> tuple[Any, ...]:
    q_nope, q_pe = q.view(-1, HEADS, WIDTH).split([NOPE, ROPE], dim=-1)
    wide = q_pe + 0
    q.mul_(2)
    return q_nope, halves(wide, angles[:, None]), 0


REFUSED = {
    "the projection used elsewhere": (used_before, "`more`"),
    "unrotated queries used elsewhere": (kept_unrotated, "`sum_1`"),
    "a factor": (scaled, "float32"),
    "angles of each head": (unlike, "cos and sin.*token"),
    "heads in another order": (heads_mixed, "float32"),
    "a reader of the strides": (kept_by_their_strides, "`more`"),
    "a reader beyond a view": (read_beyond_a_view, "`split_1`|`q_nope`"),
    "tokens in another order in memory": (transposed, "no projection|computes something else|reads"),
    "a write in between": (written, "`mul_`"),
}


@pytest.mark.long
@pytest.mark.parametrize(("queries", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_it_is_left_as_it_is_and_the_log_says_why(queries: Callable, reason: str, logged: Callable) -> None:
    assert "mla_rotate_queries" not in ops(compare(Rotating(queries), DECODE))
    (message,) = logged("rotate_queries")
    assert message.startswith("not fused: ") and re.search(reason, message), message


def test_parts_of_two_projections_are_left() -> None:
    class Apart(Rotating):
        def __init__(self) -> None:
            super().__init__(lambda q, angles: (self.nope(q).view(-1, HEADS, NOPE), self.pe(q, angles), 0))
            self.nope = nn.Linear(HEADS * WIDTH, HEADS * NOPE).requires_grad_(False)
            self.other = nn.Linear(HEADS * WIDTH, HEADS * ROPE).requires_grad_(False)

        def pe(self, q: Tensor, angles: Tensor) -> Tensor:
            return halves(self.other(q).view(-1, HEADS, ROPE), angles[:, None])

    assert "mla_rotate_queries" not in ops(compare(Apart(), DECODE))


def test_on_the_cpu_inductor_does_better() -> None:
    gm = pipeline.run(*graph_of(Rotating(in_two_parts), *make_inputs(**DECODE)), PASSES[:2])
    before = str(gm.graph)
    assert str(rotate_queries(gm).graph) == before


# --- models


class Layers(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Rotating(in_two_parts), Rotating(in_two_parts)])

    def forward(self, x: Tensor, batch: MLABatch) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, batch)
        return x


class Normed(NormRopeLayer):
    """Latents that are normalised, and queries rotated by the angles of the keys."""

    between: Callable = staticmethod(lambda q_pe: 0)
    written = False

    def angles(self, emb: Tensor) -> tuple[Tensor, Tensor]:
        return emb.cos(), emb.sin()

    def forward(self, x: Tensor, batch: MLABatch) -> Tensor:
        layer, angles = self.layer, torch.outer(torch.arange(len(x)) + 1.0, torch.tensor([1.0, 0.1]))
        emb = torch.cat((angles, angles), dim=-1)
        cos, sin = self.angles(emb)
        q_nope, q_pe = layer.q_proj(x).view(-1, HEADS, WIDTH).split([NOPE, ROPE], dim=-1)
        q_pe = q_pe * cos[:, None] + rotate_half(q_pe) * sin[:, None]
        if self.written:
            cos.mul_(2)
        kv_c, k_pe = layer.kv_proj(x).split([layer.w_uk.shape[2], ROPE], dim=-1)
        k_pe = k_pe * cos + rotate_half(k_pe) * sin
        more = self.between(q_pe)
        kv_c = self.norm(kv_c, self.weight)
        out = mla_attention(q_nope, q_pe, kv_c, k_pe, layer.kv_cache, layer.w_uk, layer.w_uv, batch, 0.3)
        return layer.o_proj(out.flatten(1)) + more


class ReadBefore(Normed):
    between = staticmethod(lambda q_pe: q_pe.sum((1, 2))[:, None])


class Shifted(nn.Module):
    """Attention for some of the tokens of a projection."""

    def __init__(self, take: Callable) -> None:
        super().__init__()
        self.layer, self.take = Layer().requires_grad_(False), take

    def forward(self, x: Tensor, batch: MLABatch) -> Tensor:
        layer, more = self.layer, torch.cat([x[:2], x])
        angles = torch.outer(torch.arange(len(more)) + 1.0, torch.tensor([1.0, 0.1]))
        q_nope, q_pe = map(self.take, in_two_parts(layer.q_proj(more), angles)[:2])
        kv_c, k_pe = layer.kv_proj(x).split([layer.w_uk.shape[2], ROPE], dim=-1)
        out = mla_attention(q_nope, q_pe, kv_c, k_pe, layer.kv_cache, layer.w_uk, layer.w_uv, batch, 0.3)
        return x + layer.o_proj(out.flatten(1))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "take",
    [lambda t: t[2:], lambda t: torch.split(t, [2, len(t) - 2])[1], lambda t: t.split([2, len(t) - 2])[1]],
    ids=["slice", "split", "method"],
)
def test_queries_of_some_tokens_are_joined_by_themselves(take: Callable, kind: str) -> None:
    compare(Shifted(take), KINDS[kind])


class Table(Normed):
    """Cos and sin in one tensor, which is filled after views of it were taken."""

    def angles(self, emb: Tensor) -> tuple[Tensor, Tensor]:
        both = emb.new_empty(2, *emb.shape)
        cos, sin = both.select(0, 0), both.select(0, 1)
        both[0] = emb.cos()
        both[1] = emb.sin()
        return cos, sin


class Chunked(Normed):
    def angles(self, emb: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = torch.cat([emb.cos(), emb.sin()], dim=-1).chunk(2, dim=-1)
        return cos, sin


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", [Table, Chunked])
def test_angles_that_are_views_of_one_tensor(model: Any, kind: str) -> None:
    gm = compare(model(upcast, halves), KINDS[kind])
    assert len(rotations(gm)) == 1


class AngleWritten(Normed):
    """After queries are rotated and before keys are."""

    written = True


class Sized(Normed):
    between = staticmethod(lambda q_pe: torch.zeros(q_pe.size(0), 1))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS | UNKNOWN)
@pytest.mark.parametrize("model", [Normed, Sized, ReadBefore, AngleWritten])
def test_an_append_rotates_queries_in_its_launch_unless_they_are_read_before(model: Any, kind: str) -> None:
    gm = compare(model(upcast, halves), (KINDS | UNKNOWN)[kind])
    assert len(rotations(gm)) == 1
    alone = model in (ReadBefore, AngleWritten)
    assert len(nodes_of(gm, "mla_rotate_queries")) == alone
    (append,) = nodes_of(gm, "mla_norm_rope_append")
    written = [op_arguments(append)["kv_cache"], *([] if alone else rotations(gm))]
    assert may_write(append) == written


def test_passing_again_changes_nothing() -> None:
    gm = pipeline.run(*graph_of(Layers(), *make_inputs(**KINDS["mixed"])), FUSING)
    once = str(gm.graph)
    assert str(without_kernel(rotate_queries)(gm, []).graph) == once


@pytest.mark.long
def test_all_queries_of_a_speculative_step_are_rotated_in_place() -> None:
    gm = pipeline.run(*speculative_step(), FUSING)
    assert len(rotations(gm)) == len(nodes_of(gm, "mla_decode")) == 3
    assert not nodes_of(gm, "mla_rotate_queries"), "the appends rotate them"


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "batch_invariant"),
    [
        ("decode", False),
        ("mixed", False),
        ("mixed", True),
        pytest.param("decode", True, marks=pytest.mark.slow),
    ],
)
def test_every_append_of_a_step_with_transformers_rotates_the_queries_in_its_launch(
    kind: str, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: all passes run, and attention does not copy queries as it does on the CPU."""
    pytest.importorskip("triton")
    model = stock_model("glm4_moe_lite", num_hidden_layers=2)
    target = TransformersTarget(model, random_mtp(model).layers[0]).to("meta", torch.bfloat16)
    allocate(target.cache_specs(), 9, 4)
    state = DecodeState.allocate(2, 1, max_pages=4, device="meta")
    decoder = SpeculativeDecoder(target, 1, page_size=4)
    packed = PackedChunks.pack(
        [PromptChunk(0, [1, 2, 3, 4, 5, 6], 0, 5)],
        DecodeState.allocate(2, 1, max_pages=4, device="cpu"),
        page_size=4,
    )
    on_device = ("token_ids", "next_token_ids", "last_of_row", "rows", "lens", "bounds", "room")
    chunks = replace(packed, **{name: getattr(packed, name).to("meta") for name in on_device})
    with target.installed(16):
        found = graph_of(decoder, *(state, chunks)[: 1 + (kind == "mixed")])
    monkeypatch.setattr(dispatch, "describe_device", lambda device: ("cuda", (9, 0)))
    gm = pipeline.run(*found, pipeline.passes_for(found[0], batch_invariant=batch_invariant))
    assert len(nodes_of(gm, "fused_linear")) > 0
    assert len(nodes_of(gm, "mla_rotate_queries")) == 0
    assert len(rotations(gm)) == len(nodes_of(gm, "mla_decode")) == 3
    # The MTP layer of a mixed step fills its cache first, with queries that nothing reads.
    assert len(nodes_of(gm, "mla_norm_rope_append")) == 3 + (kind == "mixed")


LEFT = {"longcat_flash", "mistral4"}
"""Models that scale queries before they are split, or after they are joined."""


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v2",
        "glm4_moe_lite",
        *(
            pytest.param(f, marks=pytest.mark.slow)
            for f in ("deepseek_v3", "minicpm3", "youtu", *sorted(LEFT))
        ),
    ],
)
def test_models_of_transformers_give_the_stock_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(family, **({"num_layers": 1} if family == "longcat_flash" else {"num_hidden_layers": 2}))
    capture = capture_steps(reader, FUSING, monkeypatch)
    for _ in range(2):
        reader.assert_as_stock(reader.decode(1))
    reader.assert_as_stock(reader.prefill([2, 3, 1, 4]))
    found = [len(rotations(gm)) for gm in capture.after]
    assert found == ([0, 0] if family in LEFT else [2, 2])
    assert family in LEFT or all(node.target is not torch.cat for node in attention_inputs(capture.after[1]))
