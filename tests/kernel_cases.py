"""Problems for the attention and expert kernels on any device; their answers in float64, from the definition."""

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from mla_compile.latents import FP8, pack, unpack
from mla_compile.ops.attention.decode_backends import DECODE_BACKENDS
from mla_compile.ops.attention.operands import DecodeOperands, NormRopeAppendOperands
from mla_compile.ops.dtypes import accumulate_dtype
from mla_compile.ops.experts.operands import ExpertOperands
from mla_compile.ops.paging import write_latents
from tests.cases import Case
from tests.fp8_cases import fp8_weight, in_fp8, values_of
from tests.reference import mla_attention_reference

HUGE = 2**31 - 1
BACKENDS = {backend.name: backend for backend in DECODE_BACKENDS}
"""Tests find a decode backend by its name: others may stand before and behind it."""


@dataclass
class DecodeCase:
    """Arguments of `mla_decode`, by name."""

    q_latent: Tensor
    q_pe: Tensor
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    q_lens: Tensor | None
    q_len: int
    softmax_scale: float

    def args(self) -> tuple:
        return tuple(getattr(self, field.name) for field in fields(self))

    def operands(self) -> DecodeOperands:
        return DecodeOperands(*self.args())


def decode_case(
    seq_lens: list[int],
    *,
    q_len: int = 1,
    q_lens: list[int] | None = None,
    heads: int = 4,
    rank: int = 32,
    rope: int = 16,
    page_size: int = 16,
    columns: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    fp8: bool = False,
) -> DecodeCase:
    """Pages are shuffled. Memory that no row owns (page 0, page tails) is NaN; unused table entries are huge.

    fp8: the cache has FP8 latents; values, scales and rotary keys that no row owns are NaN.
    """
    g = torch.Generator(device).manual_seed(seed)
    used = [-(-n // page_size) for n in seq_lens]
    columns = columns or max(1, *used)
    num_pages = sum(used) + 2
    order = 1 + torch.randperm(num_pages - 1, generator=g, device=device).int()
    table = torch.full((len(seq_lens), columns), HUGE, dtype=torch.int32, device=device)
    cache = torch.full((num_pages, page_size, rank + rope), torch.nan, dtype=dtype, device=device)
    for row, (n, pages) in enumerate(zip(seq_lens, used)):
        mine, order = order[:pages], order[pages:]
        table[row, :pages] = mine
        latents = torch.full((pages * page_size, rank + rope), torch.nan, dtype=dtype, device=device)
        latents[:n] = torch.randn(n, rank + rope, generator=g, device=device).to(dtype)
        cache[mine.long()] = latents.view(pages, page_size, rank + rope)

    def queries(width: int) -> Tensor:
        shape = (len(seq_lens) * q_len, heads, width)
        return torch.randn(shape, generator=g, device=device).to(dtype)

    def lengths(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    valid = None if q_lens is None else lengths(q_lens)
    scale = (rank + rope) ** -0.5
    cache = fp8_cache(cache, rank) if fp8 else cache
    return DecodeCase(queries(rank), queries(rope), cache, table, lengths(seq_lens), valid, q_len, scale)


def fp8_cache(kv_cache: Tensor, rank: int) -> Tensor:
    """A cache of floats with FP8 latents; of NaN, all bytes are 0xFF: values, scales and rotary keys that are NaN."""
    tokens = kv_cache.flatten(0, 1)
    packed = pack(tokens[:, :rank], tokens[:, rank:])
    packed[tokens.isnan().all(1)] = 0xFF
    return packed.unflatten(0, kv_cache.shape[:2])


def decode_reference(case: DecodeCase) -> tuple[Tensor, Tensor]:
    """out and lse in float64, one query token at a time."""
    rank = case.q_latent.shape[2]
    if case.kv_cache.dtype == FP8:
        case = replace(case, kv_cache=unpack(case.kv_cache, rank, torch.float64))
    page_size = case.kv_cache.shape[1]
    outs, lses = [], []
    for row, seq_len in enumerate(case.seq_lens.tolist()):
        valid = case.q_len if case.q_lens is None else int(case.q_lens[row])
        position = torch.arange(seq_len, device=case.kv_cache.device)
        latents = case.kv_cache[
            case.block_table[row, position // page_size].long(), position % page_size
        ].double()
        for j in range(case.q_len):
            seen = latents[: max(0, seq_len - (valid - 1 - j)) if j < valid else 0]
            query = torch.cat([case.q_latent, case.q_pe], -1)[row * case.q_len + j].double()
            scores = query @ seen.T * case.softmax_scale
            outs.append(scores.softmax(-1) @ seen[:, :rank])
            lses.append(scores.logsumexp(-1))
    return torch.stack(outs), torch.stack(lses)


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def check_decode(case: DecodeCase, got: tuple[Tensor, Tensor]) -> None:
    """`got` is finite and equals the definition, 0 and -inf where a token sees nothing."""
    out, lse = got
    expected_out, expected_lse = decode_reference(case)
    assert out.is_contiguous() and out.dtype == case.q_latent.dtype and out.shape == case.q_latent.shape
    assert lse.is_contiguous() and lse.dtype == accumulate_dtype(out.dtype) and lse.shape == out.shape[:2]
    empty = expected_lse == -torch.inf
    assert (out[empty] == 0).all() and (lse[empty] == -torch.inf).all()
    tolerance = TOLERANCE[out.dtype]
    # Each query row on its own scale: many keys average out to little.
    scale = expected_out.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    error = (out.double() - expected_out).abs() / scale
    assert error[~empty].numel() == 0 or error[~empty].max() < 2 * tolerance, error[~empty].max()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=2e-5)


@dataclass
class MaskedCase:
    """Arguments of `mla_masked_decode`, by name."""

    q_latent: Tensor
    q_pe: Tensor
    kv_c: Tensor
    k_pe: Tensor
    mask: Tensor | None
    softmax_scale: float

    def args(self) -> tuple:
        return tuple(getattr(self, field.name) for field in fields(self))


def masked_case(
    lengths: list[int],
    *,
    masked: str = "bool",
    q_len: int = 1,
    keys: int = 70,
    shared: bool = False,
    heads: int = 4,
    rank: int = 32,
    rope: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> MaskedCase:
    """Causal prefixes in a cache of `keys`: the last query of row i sees `lengths[i]` keys, as `mla_decode` has it.

    masked: "none" (all keys are seen), "bool", "float" (with some finite numbers) or "heads", a bool mask by head that
    hides keys at random as well. Latents and rotary keys are the two parts of one tensor, as in a static cache.
    """
    g = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device).to(dtype)

    rows = len(lengths)
    position = torch.arange(keys, device=device)
    last = torch.tensor(lengths, device=device)[:, None, None, None]
    mask = position < last - (q_len - 1) + torch.arange(q_len, device=device)[:, None]
    if masked == "heads":
        mask = mask & (torch.rand(rows, heads, q_len, keys, generator=g, device=device) < 0.6)
    elif masked == "float":
        mask = torch.where(mask, torch.randn(mask.shape, generator=g, device=device), -torch.inf).to(dtype)
    latents = randn(1 if shared else rows, keys, rank + rope)
    q = randn(rows, heads, q_len, rank), randn(rows, heads, q_len, rope)
    return MaskedCase(
        *q,
        latents[..., :rank],
        latents[..., rank:],
        None if masked == "none" else mask,
        (rank + rope) ** -0.5,
    )


def masked_reference(case: MaskedCase) -> Tensor:
    """The definition in float64, row by row; 0 for a query that sees no key."""
    q_latent, q_pe, kv_c, k_pe = (t.double() for t in case.args()[:4])
    mask = torch.ones((), dtype=torch.bool, device=kv_c.device) if case.mask is None else case.mask
    mask = mask.expand(*q_latent.shape[:3], kv_c.shape[1])
    added = torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask.double()
    out = torch.zeros_like(q_latent)
    for row in range(len(out)):
        latents, rotary = (t[row if len(t) > 1 else 0] for t in (kv_c, k_pe))
        scores = (q_latent[row] @ latents.T + q_pe[row] @ rotary.T) * case.softmax_scale + added[row]
        unseen = (added[row] == -torch.inf).all(-1, keepdim=True)
        out[row] = scores.softmax(-1).masked_fill(unseen, 0) @ latents
    return out


def check_masked(case: MaskedCase, got: Tensor) -> None:
    """`got` is finite and equals the definition, 0 where a query sees nothing."""
    assert got.is_contiguous() and got.dtype == case.q_latent.dtype and got.shape == case.q_latent.shape
    expected = masked_reference(case)
    assert got.isfinite().all()
    # Each query on its own scale; only 0 is right for a query that sees nothing.
    error = (got.double() - expected).abs() / expected.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    assert error.numel() == 0 or error.max() < 2 * TOLERANCE[case.q_latent.dtype], error.max()


@dataclass
class MoeCase:
    """Arguments of `moe_experts`, by name."""

    x: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    shared: tuple = (None, None, None)
    """Gate, up and down of the shared experts."""
    scales: tuple = (None,) * 5
    """Of weights in FP8: gate and up, down, then those of the shared experts."""

    def args(self) -> tuple:
        """Those before `row_lens`."""
        return tuple(getattr(self, field.name) for field in fields(self)[:-2])

    def all_args(self, row_lens: Tensor | None = None, q_len: int = 1) -> tuple:
        return *self.args(), row_lens, q_len, *self.shared, *self.scales, False

    def operands(self, row_lens: Tensor | None = None, q_len: int = 1) -> ExpertOperands:
        return ExpertOperands(*self.all_args(row_lens, q_len))


def padding(case: MoeCase, q_len: int, lens: list[int]) -> tuple[Tensor, int, Tensor]:
    """`row_lens` and `q_len` for the op, and which tokens run; the others get NaN in every input that may be NaN."""
    runs = torch.ones(case.x.shape[0], dtype=torch.bool, device=case.x.device)
    for row, n in enumerate(lens):
        runs[row * q_len + n : (row + 1) * q_len] = False
    case.x[~runs] = torch.nan
    case.topk_weights[~runs] = torch.nan
    return torch.tensor(lens, dtype=torch.int32, device=case.x.device), q_len, runs


def check_padded_moe(case: MoeCase, got: Tensor, runs: Tensor) -> None:
    """0 for padding; the other tokens have their results without padding."""
    assert not got[~runs].any()
    kept = replace(case, x=case.x[runs], topk_weights=case.topk_weights[runs], topk_ids=case.topk_ids[runs])
    check_moe(kept, got[runs].contiguous())


def moe_case(
    tokens: int,
    topk: int,
    *,
    experts: int = 8,
    hidden: int = 48,
    intermediate: int = 40,
    shared: int = 0,
    among: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    fp8: bool = False,
) -> MoeCase:
    """Tokens choose from the first `among` experts, perhaps the same one twice; the other experts get none.

    fp8: whether weights are in FP8.
    """
    g = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=g, device=device) * shape[-1] ** -0.5).to(dtype)

    def weight(*shape: int, halves: int = 1) -> tuple[Tensor, Tensor | None]:
        if not fp8:
            return randn(*shape), None
        *leading, rows, columns = shape
        drawn = torch.randint(1 << 30, (), generator=g, device=device)
        values, scale = fp8_weight(*leading, halves, rows // halves, columns, seed=int(drawn), device=device)
        return values.flatten(-3, -2), scale.flatten(-3, -2)

    x = randn(tokens, hidden) * hidden**0.5
    routing = (
        torch.rand(tokens, topk, generator=g, device=device),
        torch.randint(0, among or experts, (tokens, topk), generator=g, device=device),
    )
    weights = [weight(experts, 2 * intermediate, hidden, halves=2), weight(experts, hidden, intermediate)]
    if shared:
        weights += [weight(shared * intermediate, hidden) for _ in range(2)]
        weights += [weight(hidden, shared * intermediate)]
    (w_gate_up, w_down, *of_shared), scales = zip(*weights, *[(None, None)] * (5 - len(weights)), strict=True)
    return MoeCase(x, *routing, w_gate_up, w_down, tuple(of_shared), scales)


def dequantized(case: MoeCase) -> MoeCase:
    """The same case with weights of the dtype of x."""
    dtype = case.x.dtype

    def plain(weight: Tensor | None, scale: Tensor | None, halves: int = 1) -> Tensor | None:
        if weight is None:
            return None
        parts = weight.unflatten(-2, (halves, -1)), scale.unflatten(-2, (halves, -1))
        return values_of(*parts, dtype).to(dtype).flatten(-3, -2)

    gate_up, down, *of_shared = case.scales
    return replace(
        case,
        w_gate_up=plain(case.w_gate_up, gate_up, 2),
        w_down=plain(case.w_down, down),
        shared=tuple(plain(w, s) for w, s in zip(case.shared, of_shared, strict=True)),
        scales=(None,) * 5,
    )


def moe_reference(case: MoeCase, stored: Callable[[Tensor], Tensor] = Tensor.double) -> Tensor:
    """The experts in float64, one (token, expert) pair at a time. stored: makes the numbers that are multiplied."""
    if case.scales[0] is not None:
        case = dequantized(case)
    x, weights = stored(case.x), case.topk_weights.double()
    out = torch.zeros_like(x)
    for token, chosen in enumerate(case.topk_ids.tolist()):
        for k, expert in enumerate(chosen):
            gate, up = (case.w_gate_up[expert].double() @ x[token]).chunk(2)
            activated = stored(torch.nn.functional.silu(gate) * up)
            out[token] += weights[token, k] * (case.w_down[expert].double() @ activated)
    if case.shared[0] is not None:
        gate, up, down = (w.double().T for w in case.shared)
        out += stored(torch.nn.functional.silu(x @ gate) * (x @ up)) @ down
    return out


def check_quantised_moe(case: MoeCase, got: Tensor, runs: Tensor | slice = slice(None)) -> None:
    """runs: the tokens that are not padding; the others are 0. A number of FP8 may be rounded to a neighbour."""
    kept = {name: getattr(case, name)[runs] for name in ("x", "topk_weights", "topk_ids")}
    expected = moe_reference(replace(case, **kept), in_fp8)
    assert got.is_contiguous() and got.dtype == case.x.dtype and got.shape == case.x.shape
    error = (got[runs].double() - expected).abs().max() / expected.abs().max()
    assert error < 2 * TOLERANCE[got.dtype], error
    assert isinstance(runs, slice) or not got[~runs].any()


def check_moe(case: MoeCase, got: Tensor) -> None:
    expected = moe_reference(case)
    assert got.is_contiguous() and got.dtype == case.x.dtype and got.shape == case.x.shape
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[got.dtype], error


def fp8_case(case: Case) -> tuple[Case, Case]:
    """A case with FP8 latents, and one of floats with the values that they have."""
    rank, dtype = case.kv_c.shape[1], case.kv_c.dtype
    packed = replace(case, kv_cache=fp8_cache(case.kv_cache, rank))
    new = unpack(pack(case.kv_c, case.k_pe), rank, dtype)
    stored = unpack(packed.kv_cache, rank, dtype)
    return packed, replace(case, kv_c=new[:, :rank], k_pe=new[:, rank:], kv_cache=stored)


def prefill_args(case: Case) -> tuple:
    """Arguments that `mla_attention` passes to the op `mla_prefill` for a case of prompt chunks only.

    The new latents are in its cache already.
    """
    segment = case.batch.prefill
    assert segment is not None
    kv_cache = case.kv_cache.clone()
    write_latents(case.kv_c, case.k_pe, kv_cache, segment.slot_mapping)
    query = torch.cat([case.q_nope, case.q_pe], dim=-1)
    keys = segment.cu_seqlens_q, segment.cu_seqlens_k, segment.key_slots
    return query, kv_cache, case.w_uk, case.w_uv, *keys, case.softmax_scale


def check_prefill(case: Case, got: Tensor) -> None:
    """`got` is finite and equals the definition; each token and head on its own scale."""
    expected = mla_attention_reference(*case.clone().args())
    scale = expected.abs().amax(-1, keepdim=True)
    error = ((got.double().cpu() - expected).abs() / scale).max()
    assert got.isfinite().all() and error < 2 * TOLERANCE[got.dtype], error


def norm_rope_append_case(
    tokens: int,
    rank: int = 32,
    rope: int = 16,
    *,
    eps: float = 1e-6,
    interleaved_in: bool = False,
    interleaved_out: bool = False,
    per_column: bool = False,
    heads: int = 0,
    angles: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> NormRopeAppendOperands:
    """`kv_a` is strided; every fifth token has slot -1; the cache is NaN. Cos and sin are no unit vectors.

    per_column: cos and sin differ between the two elements of a pair; else they are by pair, and strided.
    heads: of queries, columns of a wider tensor; 0 for none.
    """
    g = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device)

    wide = randn(tokens, rank + rope + 24).to(dtype)
    cache = torch.full((1 + tokens // 8, 16, rank + rope), torch.nan, dtype=dtype, device=device)
    slots = torch.randperm(cache.shape[0] * 16, generator=g, device=device)[:tokens]
    slots[4::5] = -1
    if per_column:
        cos, sin = (randn(tokens, rope).to(angles) for _ in range(2))
    else:
        cos, sin = randn(tokens, rope // 2, 2).to(angles).unbind(-1)
    kv_a = wide[:, 8 : 8 + rank + rope]
    weight = (1 + 0.3 * randn(rank)).to(dtype)
    queries = randn(tokens, heads, rope + 8).to(dtype)[..., 8:] if heads else None
    layout = interleaved_in, interleaved_out
    return NormRopeAppendOperands(kv_a, weight, cos, sin, cache, slots, eps, *layout, queries)


def norm_rope_append_reference(case: NormRopeAppendOperands) -> Tensor:
    """`[tokens, rank + rope]` in float64: the definitions of RMSNorm and of a rotation, a pair at a time."""
    rank, width = case.weight.shape[0], case.kv_a.shape[1]
    x, cos, sin = case.kv_a.double(), case.cos.double(), case.sin.double()
    half = (width - rank) // 2

    def columns(interleaved: bool, pair: int) -> tuple[int, int]:
        return (rank + 2 * pair, rank + 2 * pair + 1) if interleaved else (rank + pair, rank + pair + half)

    out = torch.full_like(x, torch.nan)
    mean_square = x[:, :rank].square().mean(-1, keepdim=True)
    out[:, :rank] = x[:, :rank] / (mean_square + case.eps).sqrt() * case.weight.double()
    for pair in range(half):
        a, b = (x[:, column] for column in columns(case.interleaved_in, pair))
        first, second = columns(case.interleaved_out, pair)
        other = pair + cos.shape[1] - half
        out[:, first] = a * cos[:, pair] - b * sin[:, pair]
        out[:, second] = a * sin[:, other] + b * cos[:, other]
    return out


def check_norm_rope_append(case: NormRopeAppendOperands, before: Tensor, units: float = 1.5) -> None:
    """Valid slots of the cache hold the definition's values; the others hold those of `before`.

    units: the relative error allowed, in units of the dtype.
    """
    written = case.slot_mapping >= 0
    got, expected = case.kv_cache.flatten(0, 1).clone(), norm_rope_append_reference(case)
    values = got[case.slot_mapping[written]].double()
    unit = torch.finfo(case.kv_a.dtype).eps
    terms = (1 + case.kv_a.abs().amax().double()) * (1 + case.cos.abs().amax() + case.sin.abs().amax())
    # Two roundings of the norm; of the rotation one, and in float32 those of its terms.
    torch.testing.assert_close(
        values, expected[written], rtol=units * unit, atol=float(4e-7 * terms) if unit > 1e-15 else 1e-14
    )
    got[case.slot_mapping[written]] = before.flatten(0, 1)[case.slot_mapping[written]]
    torch.testing.assert_close(got, before.flatten(0, 1), rtol=0, atol=0, equal_nan=True)


def metadata_args(q_len: int, page_size: int, *, ragged: bool, device: str = "cpu") -> tuple:
    """Arguments of `mla_decode_metadata`: rows of many lengths up to tables that are full, and garbage where inactive.

    ragged: rows have `q_lens`, and strided tensors; an inactive row's numbers are then out of any range.
    """
    g = torch.Generator(device).manual_seed(0)
    rows, columns = 9, 5
    table = torch.randint(1, HUGE, (rows, 2 * columns), generator=g, device=device, dtype=torch.int32)
    cached = torch.randint(
        0, columns * page_size + 2, (rows, 2), generator=g, device=device, dtype=torch.int32
    )
    cached[0] = 0
    if not ragged:
        return cached[:, 0].contiguous(), table[:, :columns].contiguous(), None, q_len, page_size
    q_lens = torch.randint(0, q_len + 1, (rows, 2), generator=g, device=device, dtype=torch.int32)
    q_lens[1:4], q_lens[-1] = 0, q_len
    cached[1], cached[2], cached[3] = -1, 2**20, HUGE
    return cached[:, 0], table[:, ::2], q_lens[:, 0], q_len, page_size


def prefill_metadata_args(random: random.Random, device: str = "cpu") -> tuple:
    """Arguments of `mla_prefill_metadata`: chunks and padding, keys in one part or more, padding behind them."""
    page_size, rows, parts = random.choice([1, 3, 16]), random.randint(1, 20), random.randint(1, 3)
    lens, bounds = [], torch.zeros(rows, 2 * parts, dtype=torch.int64)
    for row in range(rows):
        n, is_padding = random.choice([0, 1, 2, 40]), random.random() < 0.3
        cached = 0 if is_padding else random.choice([0, 1, 30, 77])
        lens.append([n, n + cached])
        if not is_padding:
            cuts = sorted([0, *(random.randint(0, cached) for _ in range(parts - 1)), n + cached])
            bounds[row] = torch.tensor(cuts).unfold(0, 2, 1).flatten()
    columns = max(1, -(-max(end for _, end in lens) // page_size))
    table = torch.tensor(
        [[random.randint(0, HUGE - 1) for _ in range(columns)] for _ in range(rows)], dtype=torch.int32
    )
    keys = int((bounds[:, 1::2] - bounds[:, ::2]).sum(0).max()) + random.choice([0, 5])
    tensors = torch.tensor(lens), bounds, table
    return *(x.to(device) for x in tensors), sum(n for n, _ in lens), keys, page_size


def drawn_matmul(
    draw: random.Random,
    *,
    most_tokens: int,
    most: int,
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    device: str = "cpu",
    block: random.Random | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments of `batch_invariant_matmul` of any strides: weights transposed or not, whole or a slice; x too.

    Terms differ much in size, which shows another order. block: draws dtypes, widths and strides.
    """
    block = block or draw
    g = torch.Generator(device).manual_seed(draw.randint(0, 10**6))
    dtype = block.choice(dtypes)
    tokens, groups = draw.choice([1, 2, draw.randint(1, most_tokens)]), block.choice([1, 1, 2, 5])
    k, n = (block.choice([block.randint(1, most), 16 * block.randint(1, 1 + most // 16)]) for _ in range(2))

    def randn(*shape: int) -> Tensor:
        """Contiguous, or strided and at any offset."""
        before, after = block.choice([(0, 0), (block.randint(0, 9), block.randint(0, 9))])
        wide = torch.randn(*shape[:-1], before + shape[-1] + after, generator=g, device=device)
        return wide.to(dtype)[..., before : before + shape[-1]]

    w = randn(groups, n, k).mT if block.random() < 0.6 else randn(groups, k, n)
    x = randn(tokens, groups, k)
    x.mul_(torch.randn(k, generator=g, device=device).mul_(2).exp2_().to(dtype))
    if block.random() < 0.2:
        x = x.mT.contiguous().mT
    return x, w


def check_matmul(x: Tensor, w: Tensor, got: Tensor) -> None:
    exact = torch.einsum("tgk,gkn->tgn", x.double(), w.double())
    size = torch.einsum("tgk,gkn->tgn", x.double().abs(), w.double().abs())
    assert got.is_contiguous() and got.dtype == x.dtype and got.shape == exact.shape
    added = 1e-14 if got.dtype == torch.float64 else 1e-5
    unit = torch.finfo(got.dtype).eps
    assert (
        (got.double() - exact).abs() <= added * size + unit * exact.abs() + torch.finfo(got.dtype).tiny
    ).all()


SparseCase = tuple[Tensor, Tensor, Tensor, Tensor, float]
"""Arguments of `mla_sparse_attention`."""


def sparse_case(
    counts: list[int],
    *,
    topk: int,
    heads: int = 4,
    rank: int = 32,
    rope: int = 16,
    slots: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    fp8: bool = False,
) -> SparseCase:
    """Token i has `counts[i]` distinct slots of a cache with `slots` (by default twice topk), NaN where none reads.

    fp8: the cache has FP8 latents, NaN there as in `decode_case`.
    """
    g = torch.Generator().manual_seed(seed)
    tokens, slots = len(counts), max(slots, 2 * topk)
    selected = torch.full((tokens, topk), -1, dtype=torch.int32)
    for token, count in enumerate(counts):
        selected[token, :count] = torch.randperm(slots, generator=g)[:count].to(torch.int32)
    cache = torch.randn(slots, rank + rope, generator=g).to(dtype)
    cache[torch.bincount(selected[selected >= 0], minlength=slots) == 0] = torch.nan
    q_latent, q_pe = (torch.randn(tokens, heads, width, generator=g).to(dtype) for width in (rank, rope))
    cache = cache.view(-1, 2, rank + rope)
    tensors = (x.to(device) for x in (q_latent, q_pe, fp8_cache(cache, rank) if fp8 else cache, selected))
    return (*tensors, (rank + rope) ** -0.5)


def check_sparse(case: SparseCase, out: Tensor) -> None:
    """`out` equals the definition, 0 where a token has no slot."""
    q_latent, q_pe, cache, selected, scale = case
    rank = q_latent.shape[2]
    flat = unpack(cache, rank, torch.float64) if cache.dtype == FP8 else cache.double()
    flat = flat.flatten(0, 1)
    assert out.is_contiguous() and out.dtype == q_latent.dtype and out.shape == q_latent.shape
    for token, slots in enumerate(selected):
        latents = flat[slots[slots >= 0].long()]
        query = torch.cat([q_latent[token], q_pe[token]], dim=-1).double()
        expected = (query @ latents.T * scale).softmax(-1) @ latents[:, :rank]
        error = (out[token] - expected).abs().amax() / expected.abs().amax().clamp(min=1e-30)
        assert error < 2 * TOLERANCE[out.dtype], f"token {token}: {error}"
