"""What every decode backend must do on every device: `DecodeConformance`, run for each backend.

`DecodeInvariance` is for the batch-invariant backends. `test_decode_conformance.py` runs both on the CPU,
`interpreted/decode.py` in Triton's interpreter and `../test_gpu_kernels.py` on a GPU. Each defines a fixture `subject`
and a subclass. Every case has NaN in memory that no row owns, also page 0 and the tails of last pages, and huge
numbers in unused table entries (`decode_case`); `check_decode` compares out and lse with float64, row by row.
"""

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_compile.latents import pack
from mla_compile.ops.attention.decode_backends import (
    DECODE_BACKENDS,
    DecodeBackend,
    decode_call,
    of_any_size,
)
from mla_compile.ops.dispatch import ANY, Call
from tests.kernel_cases import HUGE, DecodeCase, check_decode, decode_case

INVARIANT = [backend for backend in DECODE_BACKENDS if backend.batch_invariant]


@dataclass(frozen=True)
class Subject:
    """A backend on a device, with the default sizes of its cases."""

    backend: DecodeBackend
    device: str = "cpu"
    heads: int = 4
    rank: int = 32
    rope: int = 16
    page_size: int = 16
    dtype: torch.dtype = torch.float32

    def case(self, lengths: list[int], **sizes: Any) -> DecodeCase:
        """A case that the backend accepts; other cases skip the test."""
        names = ("device", "heads", "rank", "rope", "page_size", "dtype")
        case = decode_case(lengths, **{name: getattr(self, name) for name in names} | sizes)
        unmet = replace(self.backend, device_types=None).why_not(
            self._call(case)
        )  # the interpreter has no GPU
        if unmet is not None:
            pytest.skip(f"{self.backend.name} {unmet}")
        return case

    def run(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        return self.backend.run(case.operands())

    def check(self, lengths: list[int], **sizes: Any) -> None:
        case = self.case(lengths, **sizes)
        check_decode(case, self.run(case))

    def _call(self, case: DecodeCase) -> Call:
        return of_any_size(decode_call(case.operands(), captured=False))


class DecodeConformance:
    @pytest.mark.parametrize(("heads", "q_len"), [(4, 1), (4, 4), (16, 2), (20, 1), (20, 3)])
    def test_rows_of_all_lengths(self, subject: Subject, heads: int, q_len: int) -> None:
        page = subject.page_size
        subject.check([0, 1, 2, page - 1, page, page + 1, 70], q_len=q_len, heads=heads)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
    def test_every_dtype_that_it_declares(self, subject: Subject, dtype: torch.dtype) -> None:
        subject.check([0, 1, 17, 70], q_len=2, heads=20, dtype=dtype)

    @pytest.mark.parametrize("page_size", [1, 5, 16, 64])
    def test_every_page_size_that_it_declares(self, subject: Subject, page_size: int) -> None:
        subject.check([65, 1, 64, 0, 63], q_len=2, page_size=page_size)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize(("heads", "q_len"), [(20, 1), (4, 3)])
    def test_fp8_latents(self, subject: Subject, heads: int, q_len: int, dtype: torch.dtype) -> None:
        page, rank = subject.page_size, max(subject.rank, 256)
        lengths = [0, 1, 2, page - 1, page, page + 1, 70]
        subject.check(lengths, q_len=q_len, heads=heads, rank=rank, dtype=dtype, fp8=True)

    def test_fp8_latents_that_are_not_finite_show_in_the_rows_that_see_them(self, subject: Subject) -> None:
        case = subject.case([20, 33, 5], q_len=2, rank=max(subject.rank, 128), fp8=True)
        healthy, (_, page_size, _) = subject.run(case), case.kv_cache.shape
        rank, token = case.q_latent.shape[2], 17  # of the second row
        spoilt = case.kv_cache.clone()
        slot = int(case.block_table[1, token // page_size]) * page_size + token % page_size
        latent = torch.full((1, rank), torch.inf, device=spoilt.device)
        spoilt.flatten(0, 1)[slot] = pack(latent, latent[:, : subject.rope])[0]
        for found, before in zip(subject.run(replace(case, kv_cache=spoilt)), healthy, strict=True):
            assert torch.equal(found[:2], before[:2]) and torch.equal(found[4:], before[4:])
            assert found[2:4].isnan().all()

    def test_lengths_about_the_borders_of_splits(self, subject: Subject) -> None:
        subject.check([n + d for n in (64, 128, 256) for d in (-1, 0, 1)], q_len=2, columns=20)

    def test_wildly_unequal_rows(self, subject: Subject) -> None:
        subject.check([600, 1, 2, 300], q_len=2)

    def test_ragged_query_lengths_and_inactive_rows(self, subject: Subject) -> None:
        subject.check([9, 40, 2, 0, 33, 1], q_len=4, q_lens=[4, 1, 3, 0, 2, 4])
        subject.check([7, 0], q_len=1, q_lens=[1, 0])

    def test_only_inactive_rows(self, subject: Subject) -> None:
        subject.check([0, 0], q_len=2, q_lens=[0, 0], columns=3)
        subject.check([0, 0], q_len=2, columns=3)

    def test_queries_may_have_any_strides(self, subject: Subject) -> None:
        case = subject.case([20, 5], q_len=2)
        # The output of a batched product over heads, a slice of wider heads, and the width outermost.
        by_head = case.q_latent.transpose(0, 1).contiguous().transpose(0, 1)
        of_wider = torch.cat([case.q_pe, case.q_pe], -1)[..., : subject.rope]
        for strided in (
            replace(case, q_latent=by_head, q_pe=of_wider),
            replace(case, q_latent=case.q_latent.movedim(2, 0).contiguous().movedim(0, 2)),
        ):
            check_decode(strided, subject.run(strided))

    def test_the_same_bits_again_whatever_padding_and_unowned_memory_hold(self, subject: Subject) -> None:
        case = subject.case([70, 0, 17, 33], q_len=2, q_lens=[2, 0, 1, 2])
        first = subject.run(case)
        assert all(map(torch.equal, first, subject.run(case)))
        other = replace(case, q_latent=case.q_latent.clone(), q_pe=case.q_pe.clone())
        padding = [2, 3, 5]  # the tokens of the inactive row, and the invalid one of the third
        other.q_latent[padding], other.q_pe[padding] = torch.nan, torch.inf
        other.kv_cache = case.kv_cache.nan_to_num(nan=1e4)
        other.block_table = torch.where(case.block_table == HUGE, -HUGE, case.block_table)
        assert all(map(torch.equal, first, subject.run(other)))

    def test_rows_longer_than_their_tables_lose_only_the_keys_that_are_not_there(
        self, subject: Subject
    ) -> None:
        if subject.backend.name not in ("triton", "gluon", "triton_invariant"):
            pytest.skip("it refuses these, where it reads lengths on the host")
        case = subject.case([16, 16], q_len=4, page_size=16)
        too_long = replace(case, seq_lens=case.seq_lens + torch.tensor([3, 1], device=subject.device).int())
        seen = torch.tensor([16, 16, 16, 16, 14, 15, 16, 16], dtype=torch.int32, device=subject.device)
        table = case.block_table.repeat_interleave(4, 0)
        check_decode(replace(case, block_table=table, seq_lens=seen, q_len=1), subject.run(too_long))

    @settings(max_examples=10, suppress_health_check=[HealthCheck.differing_executors])
    @given(st.data())
    def test_drawn_batches(self, subject: Subject, data: st.DataObject) -> None:
        rows, q_len = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
        lengths = data.draw(st.lists(st.integers(0, 90), min_size=rows, max_size=rows))
        q_lens = data.draw(st.none() | st.lists(st.integers(0, q_len), min_size=rows, max_size=rows))
        subject.check(
            lengths,
            q_len=q_len,
            q_lens=q_lens,
            heads=data.draw(st.sampled_from(subject.backend.constraints.get("heads", ANY)[1:33])),
            rank=data.draw(
                st.sampled_from(
                    [
                        r
                        for r in (16, 48, 64, 512)
                        if r in subject.backend.constraints.get("kv_lora_rank", ANY)
                    ]
                )
            ),
            rope=data.draw(
                st.sampled_from(
                    [r for r in (16, 32, 64) if r in subject.backend.constraints.get("qk_rope_head_dim", ANY)]
                )
            ),
            page_size=data.draw(
                st.sampled_from(
                    [p for p in (1, 3, 16, 64) if p in subject.backend.constraints.get("page_size", ANY)]
                )
            ),
            seed=data.draw(st.integers(0, 99)),
        )


@dataclass(frozen=True)
class Shown:
    """A row of a call: a text up to the token `stop`, whose last `valid` tokens are queries."""

    text: int
    stop: int
    valid: int


class Texts:
    """Fully cached texts with queries for all their tokens, and calls with parts of them."""

    def __init__(self, subject: Subject, lengths: list[int], **sizes: Any) -> None:
        self.subject, self.lengths = subject, lengths
        self.case = subject.case(lengths, **sizes)
        tokens = subject.case([0] * sum(lengths), **sizes)  # for its queries
        self.q_latent, self.q_pe = (x.split(lengths) for x in (tokens.q_latent, tokens.q_pe))

    def call(
        self, rows: list[Shown], q_len: int, more_columns: int = 0
    ) -> dict[tuple[int, int], list[Tensor]]:
        """out and lse of every query, by its text and position. Memory that no query sees is NaN."""
        page_size = self.case.kv_cache.shape[1]
        used = [-(-row.stop // page_size) for row in rows]
        table = self.case.block_table.new_full((len(rows), max(1, *used) + more_columns), HUGE)
        cache = torch.full_like(self.case.kv_cache, torch.nan)
        queries = [
            torch.full((len(rows) * q_len, *x[0].shape[1:]), torch.nan, dtype=x[0].dtype, device=x[0].device)
            for x in (self.q_latent, self.q_pe)
        ]
        tokens: dict[tuple[int, int], int] = {}
        for i, (row, pages) in enumerate(zip(rows, used)):
            table[i, :pages] = self.case.block_table[row.text, :pages]
            for page in range(pages if row.valid else 0):
                filled = min(page_size, row.stop - page * page_size)
                cache[table[i, page], :filled] = self.case.kv_cache[table[i, page], :filled]
            for j in range(row.valid):
                position = row.stop - row.valid + j
                tokens[row.text, position] = i * q_len + j
                queries[0][i * q_len + j] = self.q_latent[row.text][position]
                queries[1][i * q_len + j] = self.q_pe[row.text][position]
        lens = self.case.seq_lens.new_tensor([[row.stop, row.valid] for row in rows])
        q_lens = None if all(row.valid == q_len for row in rows) else lens[:, 1]
        case = DecodeCase(*queries, cache, table, lens[:, 0], q_lens, q_len, self.case.softmax_scale)
        results = self.subject.run(case)
        return {token: [x[at] for x in results] for token, at in tokens.items()}

    @cache  # noqa: B019
    def alone(self, text: int, position: int) -> list[Tensor]:
        return self.call([Shown(text, position + 1, 1)], 1)[text, position]

    def check(self, rows: list[Shown], q_len: int, more_columns: int = 0) -> None:
        for token, found in self.call(rows, q_len, more_columns).items():
            assert found[0].isfinite().all()
            assert all(map(torch.equal, found, self.alone(*token))), f"{token} in {rows}, q_len {q_len}"


class DecodeInvariance:
    """In every call a token has its bits as the only row of one token in the narrowest table."""

    borders: tuple[int, ...] = (1, 16, 64, 256, 512)
    """Of pages, tiles, splits and what a backend sums at a time: the texts end, and tokens are, about these."""
    drawn = 3
    """How many sets of texts are drawn for each dtype; each is shown in 4 calls."""

    def sizes(self, draw: random.Random) -> dict[str, Any]:
        return {
            "heads": draw.choice([1, 4, 20]),
            "page_size": draw.choice([1, 16, 64]),
            "seed": draw.randint(0, 99),
        }

    @pytest.mark.parametrize("q_len", range(2, 7))
    def test_one_of_many_tokens(self, subject: Subject, q_len: int) -> None:
        texts = Texts(subject, [max(self.borders) + 6])
        for border in self.borders:
            texts.check([Shown(0, border + q_len - 1, q_len)], q_len)

    def test_in_wide_tables(self, subject: Subject) -> None:
        texts = Texts(subject, [max(self.borders) + 1])
        for more in (1, 15, 100):
            for border in self.borders:
                texts.check([Shown(0, border + 1, 1)], 1, more)

    def test_beside_rows_of_other_lengths_and_inactive_ones(self, subject: Subject) -> None:
        texts = Texts(subject, [border + 4 for border in self.borders])
        rows = [Shown(i, border + 2, 2) for i, border in enumerate(self.borders)]
        texts.check(rows, 2)
        for i in range(len(rows)):
            texts.check([*rows[:i], replace(rows[i], valid=0), *rows[i + 1 :]], 3)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_drawn_calls(self, subject: Subject, dtype: torch.dtype) -> None:
        draw = random.Random(0)
        for _ in range(self.drawn):
            lengths = [draw.choice(self.borders) + draw.randint(0, 8) for _ in range(draw.randint(1, 4))]
            texts = Texts(subject, lengths, dtype=dtype, **self.sizes(draw))
            for _ in range(4):
                q_len = draw.randint(1, 6)
                rows = []
                for text in draw.sample(range(len(lengths)), draw.randint(1, len(lengths))):
                    stop = min(lengths[text], max(1, draw.choice(self.borders) + draw.randint(-1, 6)))
                    rows.append(
                        Shown(text, stop, draw.choice([min(stop, q_len), draw.randint(0, min(stop, q_len))]))
                    )
                texts.check(rows, q_len, draw.choice([0, 0, 1, 40]))
