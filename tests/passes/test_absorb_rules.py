"""`absorb_mla` in difficult cases: writes in place, broadcasts, unusual layouts."""

import inspect

import einops
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.capture import nodes_of, ops
from tests.passes.mla_modules import BATCH, HEADS, KEYS, NOPE, RANK, ROPE, CompactMLA
from tests.passes.test_absorb_mla import expanded_tensors, make_inputs, run


class Written(CompactMLA):
    """The tests below vary queries, joined keys and values."""

    def queries(self, x: Tensor) -> Tensor:
        return self.q_proj(x).unflatten(-1, (HEADS, NOPE + ROPE)).transpose(1, 2)

    def join(self, k_nope: Tensor, k_pe: Tensor) -> Tensor:
        return torch.cat([k_nope, k_pe[:, None].expand(len(k_nope), HEADS, -1, -1)], dim=-1)

    def forward(self, x: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        k_nope, v = self.keys_and_values(kv_c)
        return self.attend(self.queries(x), self.join(k_nope, k_pe), v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


# --- layouts


class Einops(Written):
    def forward(self, x: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        q = einops.rearrange(self.q_proj(x), "b t (h d) -> b h t d", h=HEADS)
        k_nope, v = einops.rearrange(self.kv_up(kv_c), "b t (two h d) -> two b h t d", two=2, h=HEADS)
        k = torch.cat([k_nope, einops.repeat(k_pe, "b t d -> b h t d", h=HEADS)], -1)
        return einops.rearrange(self.attend(q, k, v), "b h t d -> b t (h d)")


class ViewOfTheResult(Written):
    """A `view` that only holds for the layout of the product's result."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT).softmax(-1) @ v).view(len(q), -1)


class LatentsOfOneRow(Written):
    """All rows attend to the same latents, expanded once."""

    def forward(self, x: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        k_nope, v = (t.expand(len(x), -1, -1, -1) for t in self.keys_and_values(kv_c[:1]))
        return self.attend(self.queries(x), self.join(k_nope, k_pe[:1]), v)


class LatentsOfOneRowSpelledOut(LatentsOfOneRow):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v


@pytest.mark.long
@pytest.mark.parametrize(
    "module",
    [
        pytest.param(
            Einops,
            marks=pytest.mark.skipif(
                torch.__version__ < "2.13", reason="Dynamo of torch 2.11 keeps einops' functions whole"
            ),
        ),
        *(Written, LatentsOfOneRow, LatentsOfOneRowSpelledOut, ViewOfTheResult),
    ],
)
def test_an_unusual_layout_is_absorbed(module: type[nn.Module]) -> None:
    gm = run(module(), *make_inputs())
    fused = "scaled_dot_product_attention" in inspect.getsource(module.attend)
    assert "scaled_dot_product_attention" not in ops(gm) and not expanded_tensors(gm)
    assert len(nodes_of(gm, "mla_masked_decode")) == fused


class QueriesOfOneRow(Written):
    """Products that broadcast the queries over rows of the same keys."""

    def forward(self, x: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        k_nope, v = (t.expand(len(x), -1, -1, -1) for t in self.keys_and_values(kv_c[:1]))
        k = self.join(k_nope, k_pe[:1])
        return (self.queries(x)[:1] @ k.mT).softmax(-1) @ v


class NoRows(Written):
    """Fused attention of three dimensions."""

    def forward(self, x: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        k_nope, v = self.keys_and_values(kv_c[:1])
        q, k = self.queries(x[:1]), self.join(k_nope, k_pe[:1])
        return F.scaled_dot_product_attention(q[0], k[0], v[0])


class KeysFirst(Written):
    """Scores `[key, query]`, values from the left."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.mT @ (k @ q.transpose(-1, -2) * 0.3).softmax(-2)


class RotaryOfOneColumn(Written):
    """A part that is also repeated along its features."""

    def join(self, k_nope: Tensor, k_pe: Tensor) -> Tensor:
        return torch.cat([k_nope, k_pe[:, None, :, :1].repeat(1, HEADS, 1, ROPE)], dim=-1)


class FusedAndAProductAdded(Written):
    """Not a second product of scores."""

    def forward(self, x: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        k_nope, v = self.keys_and_values(kv_c)
        out = F.scaled_dot_product_attention(self.queries(x)[..., :NOPE], k_nope, v)
        return (
            out
            + self.queries(x)
            @ k_pe[:, None, :1].expand(-1, -1, NOPE + ROPE, -1).repeat(1, 1, 1, 2)[..., :NOPE]
        )


class HeadsInRows(Written):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)


@pytest.mark.parametrize(
    "module", [QueriesOfOneRow, HeadsInRows, NoRows, KeysFirst, RotaryOfOneColumn, FusedAndAProductAdded]
)
def test_what_the_absorbed_form_cannot_shape_stays_and_is_right(module: type[nn.Module]) -> None:
    assert expanded_tensors(run(module(), *make_inputs()))


# --- writes in place


class QueryHalfWrittenAfterTheJoin(Written):
    def queries(self, x: Tensor) -> Tensor:
        q_nope, q_pe = (half * 2 for half in super().queries(x).split([NOPE, ROPE], dim=-1))
        q = torch.cat([q_nope, q_pe], dim=-1)
        q_pe.add_(5)
        return q


class QueriesWrittenAfterTheJoin(Written):
    def queries(self, x: Tensor) -> Tensor:
        q = torch.cat(super().queries(x).split([NOPE, ROPE], dim=-1), dim=-1)
        q[..., 2:].mul_(5)
        return q


class CacheOfLatents(Written):
    """Keys up to a position per row, of a cache that `prepare` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.randn(BATCH, KEYS, RANK + ROPE, dtype=torch.float64))

    def prepare(self, kv_c: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        return self.cache[..., :RANK], self.cache[..., RANK:]

    def visible(self) -> Tensor:
        return torch.arange(KEYS) <= torch.tensor([4, 30])[:, None, None, None]

    def forward(self, x: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        mask = self.visible()
        latents, k_pe = self.prepare(kv_c, k_pe)
        k_nope, v = self.keys_and_values(latents)
        k = self.join(k_nope, k_pe)
        return F.scaled_dot_product_attention(self.queries(x), k, v, attn_mask=mask)


class ViewsTakenBeforeTheWrite(CacheOfLatents):
    def prepare(self, kv_c: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        latents, rotary = self.cache.split([RANK, ROPE], dim=-1)
        latents[:, 3:5] = kv_c[:, :2]
        rotary.index_copy_(1, torch.tensor([3, 4]), k_pe[:, :2])
        return latents, rotary


class CopyTakenBeforeTheWrite(CacheOfLatents):
    def prepare(self, kv_c: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        latents = self.cache[..., :RANK].clone()
        self.cache.mul_(2)
        return latents, self.cache[..., RANK:]


@pytest.mark.long
@pytest.mark.parametrize(
    "module",
    [
        QueryHalfWrittenAfterTheJoin,
        QueriesWrittenAfterTheJoin,
        CacheOfLatents,
        ViewsTakenBeforeTheWrite,
        CopyTakenBeforeTheWrite,
    ],
)
def test_what_is_written_in_between_is_read_as_it_was(module: type[nn.Module]) -> None:
    gm = run(module(), *(inputs if i else inputs[:, :1] for i, inputs in enumerate(make_inputs())))
    assert not expanded_tensors(gm)
