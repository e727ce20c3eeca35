"""What every implementation of `mla_prefill` must do on every device: `PrefillConformance`, run for each.

`test_prefill.py` runs it on the CPU, `interpreted/prefill.py` in Triton's interpreter and `../test_gpu_kernels.py` on
a GPU. Each defines a fixture `subject` and a subclass. Every case has NaN in memory that no row owns, also page 0.
`PrefillInvariance` is for the batch-invariant ones.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_compile import prefill_segment
from mla_compile.ops.attention import segments
from mla_compile.ops.attention.operands import PrefillOperands
from mla_compile.ops.attention.prefill import PREFILL
from mla_compile.ops.dispatch import Candidate
from tests.cases import Case, make_case
from tests.kernel_cases import check_prefill, fp8_case, prefill_args

Chunks = list[tuple[int, int]]


@dataclass(frozen=True)
class Subject:
    """An implementation on a device, with the default sizes of its cases."""

    row: Candidate
    device: str = "cpu"
    run: Callable[..., Tensor] | None = None  # with tiles of its own, say
    dtype: torch.dtype = torch.float32
    heads: int = 3
    nope: int = 24
    rope: int = 8
    v: int = 16
    rank: int = 32
    drawn_weights: bool = False  # of `Texts`

    def case(self, chunks: Chunks, **sizes: Any) -> Case:
        """chunks: (length, tokens cached before) of each. Skips the test if the implementation rejects them."""
        names = ("dtype", "heads", "nope", "rope", "v", "rank")
        given = {name: getattr(self, name) for name in names} | sizes
        facts = {
            "dtype": given["dtype"],
            "qk_head_dim": given["nope"] + given["rope"],
            "v_head_dim": given["v"],
            "kv_lora_rank": given["rank"],
            "qk_rope_head_dim": given["rope"],
        }
        if (reason := self.row.why_not_given(facts)) is not None:
            pytest.skip(f"{self.row.name} {reason}")
        return make_case(prefill=chunks, **given)

    def out(self, args: tuple[Any, ...]) -> Tensor:
        args = tuple(x.to(self.device) if isinstance(x, Tensor) else x for x in args)
        return (self.run or self.row.load())(PrefillOperands(*args))

    def check(self, chunks: Chunks, **sizes: Any) -> None:
        case = self.case(chunks, **sizes)
        check_prefill(case, self.out(prefill_args(case)))


INVARIANT = [row for row in PREFILL if row.batch_invariant]


def subject_of(name: str, **settings: Any) -> Subject:
    return Subject(next(row for row in PREFILL if row.name == name), **settings)


slow = pytest.mark.slow


class PrefillConformance:
    @pytest.mark.parametrize(
        "dtype", [torch.float32, pytest.param(torch.float16, marks=slow), torch.bfloat16], ids=str
    )
    @pytest.mark.parametrize(
        "chunks",
        [[(1, 0)], [(16, 0), (17, 0), (15, 0), (33, 0)], [(5, 3), (2, 0), (1, 40)], [(20, 100), (3, 1)]],
        ids=str,
    )
    def test_ragged_chunks_with_context(self, subject: Subject, chunks: Chunks, dtype: torch.dtype) -> None:
        subject.check(chunks, dtype=dtype)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("chunks", [[(16, 0), (17, 0), (33, 0)], [(5, 3), (2, 0), (1, 40)]], ids=str)
    def test_fp8_latents(self, subject: Subject, chunks: Chunks, dtype: torch.dtype) -> None:
        packed, values = fp8_case(subject.case(chunks, dtype=dtype, rank=128))
        check_prefill(values, subject.out(prefill_args(packed)))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize(
        "sizes",
        [
            {"nope": 128, "rope": 64, "v": 128, "rank": 64},
            {"nope": 192, "rope": 64, "v": 256, "rank": 32},
            {"nope": 64, "rope": 32, "v": 64, "rank": 32},
            {"nope": 64, "rope": 64, "v": 128, "rank": 32},
            {"nope": 6, "rope": 4, "v": 5, "rank": 16},
        ],
        ids=["V3", "GLM", "MiniCPM3", "Mistral4", "odd"],
    )
    def test_the_widths_of_models(self, subject: Subject, sizes: dict[str, int], dtype: torch.dtype) -> None:
        subject.check([(18, 7), (4, 0)], heads=2, dtype=dtype, **sizes)

    @pytest.mark.parametrize("max_keys", [8, 100])
    def test_results_of_other_tokens_come_first(
        self, subject: Subject, max_keys: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With keys in one part and in several."""
        monkeypatch.setattr("mla_compile.ops.attention.segments.MAX_KEYS", max_keys)
        args = prefill_args(subject.case([(4, 19), (2, 5)], dtype=torch.bfloat16))
        alone, before = subject.out(args), torch.randn(3, *args[0].shape[1:]).bfloat16()
        before = before[..., : alone.shape[2]]
        joined = subject.out((*args, before))
        assert joined.is_contiguous() and joined.dtype == alone.dtype
        assert torch.equal(joined, torch.cat([before.to(alone.device), alone]))

    @pytest.mark.parametrize("max_keys", [1, 8, 20])
    @pytest.mark.parametrize("page_size", [3, *(pytest.param(size, marks=slow) for size in (1, 16))])
    def test_context_in_parts_of_every_size(
        self, subject: Subject, max_keys: int, page_size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("mla_compile.ops.attention.segments.MAX_KEYS", max_keys)
        subject.check([(4, 19), (2, 5), (1, 0)], page_size=page_size)

    @pytest.mark.parametrize("chunk", [5, 16, *(pytest.param(chunk, marks=slow) for chunk in (2, 19, 20))])
    def test_chunks_of_a_prompt_equal_one_pass(self, subject: Subject, chunk: int) -> None:
        for start in range(0, 20, chunk):
            subject.check([(min(chunk, 20 - start), start)])

    def test_a_neighbours_nan_latents_change_no_other_row(self, subject: Subject) -> None:
        for chunks in ([(5, 3), (7, 0), (4, 2)], [(70, 0), (3, 200), (130, 0)]):
            q, kv_cache, *others = prefill_args(subject.case(chunks))
            cu_seqlens_q, cu_seqlens_k, key_slots = others[2:5]
            healthy = subject.out((q, kv_cache, *others))
            first, last = cu_seqlens_k[0, 1:3].tolist()
            for bad in (torch.nan, torch.inf):
                spoilt = kv_cache.clone()
                spoilt.view(-1, spoilt.shape[2])[key_slots[0, first:last]] = bad
                out = subject.out((q, spoilt, *others))
                start, stop = cu_seqlens_q[1:3].tolist()
                assert torch.equal(out[:start], healthy[:start]) and torch.equal(out[stop:], healthy[stop:])
                assert not out[start:stop].isfinite().any()

    def test_keys_of_padding_and_rows_without_keys_change_nothing(self, subject: Subject) -> None:
        q, kv_cache, w_uk, w_uv, cu_seqlens_q, cu_seqlens_k, key_slots, scale = prefill_args(
            subject.case([(5, 3), (7, 0)])
        )
        want = subject.out((q, kv_cache, w_uk, w_uv, cu_seqlens_q, cu_seqlens_k, key_slots, scale))
        tokens = len(q)
        padded = subject.out(
            (
                torch.cat([q, q[:4]]),
                *(kv_cache, w_uk, w_uv),
                torch.cat(
                    [cu_seqlens_q, cu_seqlens_q[-1:] + 4, cu_seqlens_q[-1:] + 4]
                ),  # one with tokens, one empty
                torch.cat([cu_seqlens_k, *[cu_seqlens_k[:, -1:]] * 2], dim=1),
                torch.nn.functional.pad(key_slots, (0, 300), value=-1),
                scale,
            )
        )
        assert torch.equal(padded[:tokens], want) and not padded[tokens:].any()

    def test_rows_of_queries_may_be_apart(self, subject: Subject) -> None:
        case = subject.case([(5, 3), (7, 0)])
        q, *others = prefill_args(case)
        apart = torch.cat([q, q], dim=1)[:, : q.shape[1]]
        assert torch.equal(subject.out((apart, *others)), subject.out((q, *others)))


class Texts:
    """Fully cached texts with queries for all their tokens, and calls with chunks of them.

    Unless weights are drawn, the elements of a key and of a value are single elements of a latent, so every
    implementation of the product that makes them gives the same bits.
    """

    def __init__(self, subject: Subject, lengths: list[int], **sizes: Any) -> None:
        self.subject, self.lengths = subject, lengths
        case = subject.case([(n, 0) for n in lengths], **sizes)
        q, self.cache, w_uk, w_uv, *_, self.scale = prefill_args(case)
        self.queries = q.split(lengths)
        if not subject.drawn_weights:
            w_uk, w_uv = one_each(w_uk), one_each(w_uv.mT).mT.contiguous()
        self.weights = w_uk, w_uv
        assert case.batch.prefill is not None
        self.table, self.page_size = case.batch.prefill.block_table, case.batch.page_size
        self.whole = [self.call([(text, 0, n)])[0] for text, n in enumerate(lengths)]

    def call(self, chunks: list[tuple[int, int, int]], **padding: int) -> tuple[Tensor, ...]:
        """Attention of chunks (text, first token, end). Memory that no query sees is NaN."""
        texts, starts, _ = map(list, zip(*chunks))
        segment, _ = prefill_segment(
            [stop - start for _, start, stop in chunks],
            starts,
            self.table[texts],
            page_size=self.page_size,
            **padding,
        )
        seen = torch.zeros(self.cache.shape[:2].numel(), dtype=torch.bool)
        seen[segment.key_slots[segment.key_slots >= 0]] = True
        cache = self.cache.masked_fill(~seen.view(*self.cache.shape[:2], 1), torch.nan)
        lens = [stop - start for _, start, stop in chunks]
        q = torch.cat([self.queries[text][start:stop] for text, start, stop in chunks])
        rest = segment.cu_seqlens_q[-1] - sum(lens)
        q = torch.cat([q, q.new_full((rest, *q.shape[1:]), torch.nan)])
        keys = segment.cu_seqlens_q, segment.cu_seqlens_k, segment.key_slots
        return self.subject.out((q, cache, *self.weights, *keys, self.scale))[: sum(lens)].cpu().split(lens)

    def check(self, chunks: list[tuple[int, int, int]], **padding: int) -> None:
        for (text, start, stop), found in zip(chunks, self.call(chunks, **padding), strict=True):
            assert found.isfinite().all()
            assert torch.equal(found, self.whole[text][start:stop]), (
                f"text {text}, {start} to {stop} of {chunks}"
            )


def one_each(weight: Tensor) -> Tensor:
    """Like a weight `[heads, n, rank]`, but with one 1 and zeros along the last dimension."""
    chosen = torch.randint(
        weight.shape[2], (*weight.shape[:2], 1), generator=torch.Generator().manual_seed(0)
    )
    return torch.zeros_like(weight).scatter_(2, chosen, 1)


class PrefillInvariance:
    """In every call a token has the bits of a call with its text alone, in one chunk."""

    borders: tuple[int, ...] = (1, 16, 64, 256)
    """Of tiles and of what an implementation sums at a time: the texts end, and chunks are cut, about these."""

    @pytest.mark.parametrize("size", [1, 5, 16, 17, 63])
    def test_chunks_of_every_size(self, subject: Subject, size: int) -> None:
        length = min(max(self.borders) + 3, 20 * size)
        texts = Texts(subject, [length])
        for start in range(0, length, size):
            texts.check([(0, start, min(length, start + size))])

    def test_beside_others_and_padding(self, subject: Subject) -> None:
        texts = Texts(subject, [border + 2 for border in self.borders])
        chunks = [(i, border // 2, border + 1) for i, border in enumerate(self.borders)]
        texts.check(chunks)
        texts.check(
            chunks[::-1], num_tokens=2 * sum(self.borders), num_chunks=9, num_keys=4 * sum(self.borders)
        )

    def test_parts_and_rows_that_have_no_key_in_some(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Chunks end at multiples of MAX_KEYS: a chunk beyond one would be split into other parts."""
        size = 48
        monkeypatch.setattr(segments, "MAX_KEYS", size)
        texts = Texts(subject, [3 * size, size, 9])
        texts.whole[0] = torch.cat([texts.call([(0, at, at + size)])[0] for at in range(0, 3 * size, size)])
        for start, stop in (
            (0, 7),
            (size - 1, size),
            (size, size + 1),
            (2 * size - 5, 2 * size),
            (2 * size, 3 * size),
        ):
            texts.check([(0, start, stop)])
            texts.check([(1, size // 2, size), (0, start, stop), (2, 0, 9)])

    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=slow)], ids=str
    )
    def test_drawn_calls(self, subject: Subject, dtype: torch.dtype) -> None:
        draw = random.Random(0)
        for _ in range(2):
            lengths = [draw.choice(self.borders) + draw.randint(0, 8) for _ in range(draw.randint(1, 4))]
            texts = Texts(
                subject, lengths, dtype=dtype, page_size=draw.choice([1, 4, 16]), seed=draw.randint(0, 99)
            )
            for _ in range(4):
                chunks = []
                for text in draw.sample(range(len(lengths)), draw.randint(1, len(lengths))):
                    start = draw.choice([0, draw.randrange(lengths[text]), draw.choice(self.borders) - 1])
                    start = min(start, lengths[text] - 1)
                    chunks.append((text, start, draw.randint(start + 1, lengths[text])))
                texts.check(chunks, num_tokens=draw.choice([0, 200]), num_chunks=draw.choice([0, 6]))
