"""What every decode backend must do, whatever the device: `DecodeConformance` is the one list, run for each of them.

`test_decode_conformance.py` runs it on the CPU, `interpreted/decode.py` in Triton's interpreter and
`../test_gpu_kernels.py` on a GPU. Each defines a fixture `subject` and a subclass. Every case has NaN in all that no
row owns, page 0 and the tails of last pages included, and huge numbers in unused table entries (`decode_case`);
`check_decode` compares out and lse with float64, row by row.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_compile.ops.backends import DecodeBackend, DecodeCall, decode_call
from mla_compile.ops.implementations import ANY
from tests.kernel_cases import HUGE, DecodeCase, check_decode, decode_case


@dataclass(frozen=True)
class Subject:
    """A backend on a device, with the sizes that its cases have unless a test wants others."""

    backend: DecodeBackend
    device: str = "cpu"
    heads: int = 4
    rank: int = 32
    rope: int = 16
    page_size: int = 16
    dtype: torch.dtype = torch.float32

    def case(self, lengths: list[int], **sizes: Any) -> DecodeCase:
        """A case that the backend takes; the test is skipped where it declares not to."""
        names = ("device", "heads", "rank", "rope", "page_size", "dtype")
        case = decode_case(lengths, **{name: getattr(self, name) for name in names} | sizes)
        unmet = replace(self.backend, device_types=None).why_not(
            self._call(case)
        )  # the interpreter has no GPU
        if unmet is not None:
            pytest.skip(f"{self.backend.name} {unmet}")
        return case

    def run(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        return self.backend.run(self._call(case), *case.args())

    def check(self, lengths: list[int], **sizes: Any) -> None:
        case = self.case(lengths, **sizes)
        check_decode(case, self.run(case))

    def _call(self, case: DecodeCase) -> DecodeCall:
        return decode_call(case.q_latent, case.q_pe, case.kv_cache, case.q_lens, case.q_len, captured=False)


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
        # As a batched product over heads leaves them, as a slice of wider heads, and with the width outermost.
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
        padding = [2, 3, 5]  # the tokens of the inactive row, and the one of the third that does not count
        other.q_latent[padding], other.q_pe[padding] = torch.nan, torch.inf
        other.kv_cache = case.kv_cache.nan_to_num(nan=1e4)
        other.block_table = torch.where(case.block_table == HUGE, -HUGE, case.block_table)
        assert all(map(torch.equal, first, subject.run(other)))

    def test_rows_longer_than_their_tables_lose_only_the_keys_that_are_not_there(
        self, subject: Subject
    ) -> None:
        if subject.backend.name not in ("triton", "gluon"):
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
            heads=data.draw(st.sampled_from(subject.backend.takes.get("heads", ANY)[1:33])),
            rank=data.draw(
                st.sampled_from(
                    [r for r in (16, 48, 64, 512) if r in subject.backend.takes.get("kv_lora_rank", ANY)]
                )
            ),
            rope=data.draw(
                st.sampled_from(
                    [r for r in (16, 32, 64) if r in subject.backend.takes.get("qk_rope_head_dim", ANY)]
                )
            ),
            page_size=data.draw(
                st.sampled_from(
                    [p for p in (1, 3, 16, 64) if p in subject.backend.takes.get("page_size", ANY)]
                )
            ),
            seed=data.draw(st.integers(0, 99)),
        )
