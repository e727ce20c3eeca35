"""`absorb_mla` on random modules: known forms are absorbed, others stay, and all results are right."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mla_compile.passes.absorb_mla import absorb_mla
from mla_compile.passes.effects import erase_dead
from tests.passes.capture import Capture
from tests.passes.mla_modules import linear

HIDDEN, HEADS, NOPE, ROPE, RANK, V, KEYS = 20, 3, 6, 4, 16, 5, 40

CHANGES = [
    *("norm", "cut", "write to keys", "three parts", "same"),
    *("bias", "norm of keys", "roll of heads", "flipped values", "transposed values", "other values"),
    *("write to latents", "use of values", "weights of each row", "cast of values", "flat"),
]


@dataclass(frozen=True)
class Form:
    attention: str
    projection: str
    join: str
    rope_first: bool
    batch: int
    q_len: int
    mask: str
    change: str | None

    def is_one(self) -> bool:
        """Whether the change has an effect on this form."""
        rows = self.batch > 1 or self.change not in ("transposed values", "weights of each row")
        return rows and (self.change != "bias" or self.projection != "two weights")


class RandomMLA(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.q_proj = linear(HIDDEN, HEADS * (NOPE + ROPE))
        self.kv_up = linear(RANK, HEADS * (NOPE + V), bias=form.change == "bias")
        self.register_buffer("w_uk", torch.randn(HEADS, NOPE, RANK, dtype=torch.float64))
        self.register_buffer("w_uv", torch.randn(RANK, HEADS * V, dtype=torch.float64))
        self.register_buffer("by_row", torch.randn(form.batch, RANK, HEADS * V, dtype=torch.float64))

    def project(self, kv_c: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[batch, heads, keys, features]`."""
        rows = len(kv_c)
        if self.form.change == "flat":
            kv = self.kv_up(kv_c.reshape(-1, RANK)).unflatten(0, kv_c.shape[:2]).unflatten(-1, (HEADS, -1))
            return kv[..., :NOPE].transpose(1, 2), kv[..., NOPE:].transpose(1, 2)
        if self.form.projection == "by head":
            kv = self.kv_up(kv_c).view(rows, -1, HEADS, NOPE + V).transpose(1, 2)
            return kv.split([NOPE, V], -1)
        if self.form.projection == "halves":
            halves = self.kv_up(kv_c).split([HEADS * NOPE, HEADS * V], -1)
            return tuple(x.view(rows, -1, HEADS, x.shape[-1] // HEADS).permute(0, 2, 1, 3) for x in halves)
        k_nope = F.linear(kv_c, self.w_uk.flatten(0, 1)).unflatten(-1, (HEADS, NOPE)).transpose(1, 2)
        return k_nope, (kv_c @ self.w_uv).unflatten(-1, (HEADS, V)).transpose(1, 2)

    def join(self, k_nope: Tensor, k_pe: Tensor) -> Tensor:
        parts = [k_nope, k_pe[:, None].expand(-1, HEADS, -1, -1)]
        if self.form.join == "repeat":
            parts[1] = k_pe[:, None].repeat(1, HEADS, 1, 1)
        if self.form.change == "same":
            parts[1] = k_nope[..., :ROPE]
        if self.form.change == "three parts":
            parts[1:] = parts[1].chunk(2, -1)
        parts = parts[::-1] if self.form.rope_first else parts
        if self.form.join in ("cat", "repeat"):
            return torch.cat(parts, -1)
        k, low = k_nope.new_empty(*k_nope.shape[:-1], NOPE + ROPE), 0
        for part in parts:
            high = low + part.shape[-1]
            k[..., low:high].copy_(part)
            low = high
        return k

    def queries(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).view(len(x), -1, HEADS, NOPE + ROPE).transpose(1, 2)
        first, second = q.split([ROPE, NOPE] if self.form.rope_first else [NOPE, ROPE], -1)
        return torch.cat([first * 1.5, second], -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        causal = self.form.mask == "causal"
        if self.form.attention == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=0.4).transpose(1, 2)
        if causal:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -1e9)
        return self.weigh(torch.matmul(q, k.transpose(2, 3)) * 0.4, v, mask)

    def weigh(self, scores: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        weights = F.softmax(scores if mask is None else scores + mask, -1, dtype=torch.float64)
        return torch.matmul(F.dropout(weights, 0.0), v).transpose(1, 2).contiguous()

    def forward(self, x: Tensor, kv_c: Tensor, k_pe: Tensor, mask: Tensor | None) -> Tensor:
        change = self.form.change
        k_nope, v = self.project(kv_c)
        if change == "flipped values":
            v = self.project(kv_c.flip(1))[1]
        elif change == "transposed values":
            v = self.project(kv_c.reshape(KEYS, len(kv_c), RANK).transpose(0, 1))[1]
        elif change == "other values":
            v = torch.tanh(k_nope[..., :V])
        elif change == "weights of each row":
            v = (kv_c @ self.by_row).unflatten(-1, (HEADS, V)).transpose(1, 2)
        elif change == "cast of values":
            v = v.float().double()
        elif change == "norm of keys":
            k_nope = F.rms_norm(k_nope, (NOPE,))
        elif change == "roll of heads":
            k_nope = k_nope.roll(1, 1)
        q, k = self.queries(x), self.join(k_nope, k_pe)
        if change == "norm":
            k = F.rms_norm(k, (NOPE + ROPE,))
        elif change == "write to latents":
            kv_c.mul_(2)
        elif change == "write to keys":
            k[:, 1:, 3:5] *= 2
        elif change == "cut":
            q, k = q[..., 1:-1], k[..., 1:-1]
        out = self.attend(q, k, v, mask).reshape(*x.shape[:2], HEADS * v.shape[-1])
        return out + v.mean() if change == "use of values" else out


forms = st.builds(
    Form,
    attention=st.sampled_from(["sdpa", "matmul"]),
    projection=st.sampled_from(["by head", "halves", "two weights"]),
    join=st.sampled_from(["cat", "repeat", "copy"]),
    rope_first=st.booleans(),
    batch=st.integers(1, 2),
    q_len=st.integers(1, 3),
    mask=st.sampled_from(["none", "bool", "float", "causal"]),
    change=st.none(),
)


@pytest.mark.long
@settings(max_examples=15, deadline=None, phases=[Phase.generate])
@given(forms)
def test_a_known_form_is_absorbed_and_right(form: Form) -> None:
    check(form)


@pytest.mark.long
@pytest.mark.parametrize("attention", ["sdpa", "others"])
@pytest.mark.parametrize("change", CHANGES)
@settings(max_examples=2, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_another_form_stays_and_is_right(change: str, attention: str, data: st.DataObject) -> None:
    changed = forms.map(lambda form: replace(form, change=change)).filter(Form.is_one)
    check(data.draw(changed.filter(lambda form: (form.attention == "sdpa") == (attention == "sdpa"))))


def check(form: Form, lower: str = "aot_eager") -> None:
    torch.manual_seed(0)
    module, capture = RandomMLA(form), Capture([absorb_mla], lower)
    sizes = (form.q_len, HIDDEN), (KEYS, RANK), (KEYS, ROPE)
    inputs = [torch.randn(form.batch, *size, dtype=torch.float64) for size in sizes]
    mask = torch.rand(form.batch, 1, form.q_len, KEYS) < 0.6 if form.mask in ("bool", "float") else None
    if mask is not None and form.mask == "float":
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e9)
    compiled = torch.compile(copy.deepcopy(module), backend=capture, fullgraph=True)
    with torch.no_grad():
        expected = module(*copy.deepcopy(inputs), mask)
        torch.testing.assert_close(compiled(*inputs, mask), expected, atol=1e-10, rtol=1e-10)
    torch._dynamo.reset()
    erase_dead(capture.before[0].graph)
    untouched = str(capture.after[0].graph) == str(capture.before[0].graph)
    assert untouched == (form.change is not None)
