"""Our side of FlashInfer without FlashInfer: the conformance suite with plain torch in place of its kernels."""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mla_compile.ops.attention.kernels import flashinfer_mla
from tests.kernel_cases import BACKENDS
from tests.ops.conformance import DecodeConformance, Subject


class PlainTorch:
    """Stands in for `BatchMLAPagedAttentionWrapper` of 0.6.18: NaN for a token that sees no key, lse in base 2."""

    def plan(
        self,
        *,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        for lengths in (qo_indptr, kv_indptr, kv_indices, kv_len_arr):
            assert lengths.dtype == torch.int32 and lengths.dim() == 1
        assert (head_dim_ckv, head_dim_kpe) == (512, 64) and q_data_type == kv_data_type
        assert not causal or num_heads in (16, 32, 64, 128), "its causal mask is wrong for these heads"
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1
        assert kv_indptr.diff().tolist() == [-(-n // page_size) for n in kv_len_arr.tolist()]
        self.rows = list(
            zip(qo_indptr.tolist(), qo_indptr[1:].tolist(), kv_indptr.tolist(), kv_len_arr.tolist())
        )
        self.indices, self.page_size, self.causal, self.scale = kv_indices.long(), page_size, causal, sm_scale

    def run(
        self,
        *,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor,
        lse: Tensor,
        return_lse: bool,
    ) -> None:
        assert return_lse and q_nope.is_contiguous() and q_pe.is_contiguous()
        for first, end, page, length in self.rows:
            pages = self.indices[page : page - (-length // self.page_size)]
            kv_c, k_pe = (x[pages].flatten(0, 1)[:length].float() for x in (ckv_cache, kpe_cache))
            for token in range(first, end):
                seen = max(0, length - (end - 1 - token) * self.causal)
                scores = q_nope[token].float() @ kv_c[:seen].T + q_pe[token].float() @ k_pe[:seen].T
                scores *= self.scale
                out[token] = scores.softmax(-1) @ kv_c[:seen] if seen else torch.nan
                lse[token] = scores.logsumexp(-1) / math.log(2) if seen else torch.nan


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer_mla, "_wrapper", functools.cache(lambda *_: PlainTorch()))
        yield Subject(
            replace(BACKENDS["flashinfer"], packages=()), heads=16, rank=512, rope=64, dtype=torch.bfloat16
        )


class TestFlashInfer(DecodeConformance):
    pass
