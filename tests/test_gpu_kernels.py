"""The Triton kernels on a CUDA device, at the sizes of real models, against float64."""

from dataclasses import replace

import pytest
import torch

from mla_compile import mla_append, mla_decode
from mla_compile.ops.append import append_torch
from mla_compile.ops.kernels.plan import (
    device_of,
    supports_append,
    supports_decode,
    supports_moe,
    supports_norm_rope_append,
)
from mla_compile.ops.moe import moe_experts
from mla_compile.ops.norm_rope_append import mla_norm_rope_append
from tests.kernel_cases import (
    DecodeCase,
    check_decode,
    check_moe,
    check_norm_rope_append,
    decode_case,
    decode_reference,
    moe_case,
    norm_rope_append_case,
)

pytestmark = pytest.mark.gpu

# heads, kv_lora_rank, qk_rope_head_dim
MODELS = {
    "GLM": (20, 512, 64),
    "V2-Lite": (16, 512, 64),
    "V3": (128, 512, 64),
    "Mistral4": (32, 256, 64),
    "MiniCPM3": (40, 256, 32),
}
HALF = [torch.bfloat16, torch.float16]


def decode(case: DecodeCase) -> tuple[torch.Tensor, torch.Tensor]:
    assert supports_decode(case.q_latent, case.q_pe)
    *tensors, q_lens, q_len, scale = case.args()
    return mla_decode(*tensors, q_len=q_len, softmax_scale=scale, q_lens=q_lens)


def make(model: str, lengths: list[int], **settings) -> DecodeCase:
    heads, rank, rope = MODELS[model]
    defaults = {"page_size": 64, "dtype": torch.bfloat16, "device": "cuda"}
    return decode_case(lengths, heads=heads, rank=rank, rope=rope, **defaults | settings)


@pytest.mark.parametrize(
    "lengths", [[1], [1000], [5000, 1, 63], [1000] * 32, [0, 1, 64, 65, 9000, *range(100, 127)]], ids=str
)
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("model", MODELS)
def test_decode_equals_the_definition(model: str, q_len: int, lengths: list[int]) -> None:
    check_decode(case := make(model, lengths, q_len=q_len), decode(case))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_decode_in_other_dtypes(model: str, dtype: torch.dtype) -> None:
    check_decode(
        case := make(model, [0, 1, 70, 1500], q_len=2, q_lens=[0, 1, 2, 2], dtype=dtype), decode(case)
    )


@pytest.mark.parametrize("page_size", [1, 7, 16, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decode_with_every_page_size_and_ragged_queries(page_size: int, dtype: torch.dtype) -> None:
    lengths, q_lens = [2, 700, 0, 129, 5, 127], [4, 1, 0, 3, 2, 4]
    case = make("GLM", lengths, q_len=4, q_lens=q_lens, page_size=page_size, dtype=dtype)
    check_decode(case, decode(case))


@pytest.mark.parametrize("columns", [4, 16, 64, 512])
def test_decode_about_the_borders_of_splits(columns: int) -> None:
    lengths = [n + d for n in (64, 128, 192, 256) for d in (-1, 0, 1) if n + d <= columns * 64]
    check_decode(case := make("GLM", lengths, q_len=2, columns=columns), decode(case))


@pytest.mark.parametrize("widths", [(32, 16), (48, 16), (128, 32), (512, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decode_with_other_widths(widths: tuple[int, int], dtype: torch.dtype) -> None:
    rank, rope = widths
    case = decode_case([300, 0, 17], q_len=3, heads=6, rank=rank, rope=rope, dtype=dtype, device="cuda")
    check_decode(case, decode(case))


def test_decode_follows_pages_beyond_two_to_the_thirty_one_elements() -> None:
    case = make("GLM", [100, 3])
    pages = 2**31 // (64 * 576) + 10
    far = torch.full((pages, 64, 576), torch.nan, dtype=torch.bfloat16, device="cuda")
    far[-case.kv_cache.shape[0] :] = case.kv_cache
    used = case.block_table != 2**31 - 1
    table = torch.where(used, case.block_table + pages - case.kv_cache.shape[0], case.block_table)
    expected = decode(case)
    got = decode(replace(case, kv_cache=far, block_table=table.int()))
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_decode_gives_the_same_bits_again_whatever_the_other_rows_hold() -> None:
    case = make("GLM", [3000, 500, 0, 7], q_len=4)
    first = decode(case)
    assert all(torch.equal(a, b) for a, b in zip(first, decode(case)))
    others = replace(case, seq_lens=case.seq_lens.clone(), q_latent=case.q_latent.clone())
    others.seq_lens[0], others.seq_lens[3] = 0, 1
    others.q_latent[:4] = torch.nan
    assert all(torch.equal(a[4:8], b[4:8]) for a, b in zip(first, decode(others)))


def test_a_captured_decode_serves_other_lengths_at_replay() -> None:
    case = make("GLM", [2000, 64, 5, 700], q_len=4)
    lengths = case.seq_lens.clone()
    decode(case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    case.seq_lens.fill_(1)
    with torch.cuda.graph(graph):
        out, lse = decode(case)
    for shorter in (0, 1, 63, 64, 2000):
        case.seq_lens.copy_((lengths - shorter).clamp(min=0))
        graph.replay()
        check_decode(case, (out, lse))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 8, 32, 100, 128])
def test_experts_at_the_size_of_glm(tokens: int, dtype: torch.dtype) -> None:
    case = moe_case(tokens, 4, experts=64, hidden=2048, intermediate=1536, dtype=dtype, device="cuda")
    assert supports_moe(*case.args())
    check_moe(case, moe_experts(*case.args()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("among", [1, 3])
@pytest.mark.parametrize("size", [(64, 32), (50, 33), (2048, 100)], ids=str)
def test_experts_when_few_are_chosen_and_sizes_fill_no_tile(
    size: tuple[int, int], among: int, dtype: torch.dtype
) -> None:
    hidden, intermediate = size
    for tokens, topk, experts in ((1, 2, 4), (60, 4, 8), (40, 1, 60)):
        case = moe_case(
            tokens,
            topk,
            experts=experts,
            among=among,
            hidden=hidden,
            intermediate=intermediate,
            dtype=dtype,
            device="cuda",
        )
        check_moe(case, moe_experts(*case.args()))


def test_captured_experts_serve_other_choices_at_replay() -> None:
    case = moe_case(8, 4, experts=64, hidden=512, intermediate=256, dtype=torch.bfloat16, device="cuda")
    moe_experts(*case.args())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_experts(*case.args())
    for seed in range(3):
        case.topk_ids.copy_(moe_case(8, 4, experts=64, among=(64, 5, 1)[seed], seed=seed).topk_ids)
        graph.replay()
        check_moe(case, out)


def test_the_plans_know_the_device() -> None:
    device = device_of(torch.empty(1, device="cuda"))
    assert device.multiprocessors > 0 and device.capability >= (8, 0)
    case = make("GLM", [4])
    assert decode_reference(case)[0].is_cuda


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 32, 3000])
def test_latents_go_to_their_slots_and_masked_ones_nowhere(tokens: int, dtype: torch.dtype) -> None:
    latents = torch.randn(tokens, 576, device="cuda", dtype=dtype)
    cache = torch.full((1 + tokens // 32, 64, 576), float("nan"), device="cuda", dtype=dtype)
    slots = torch.randperm(cache.shape[0] * 64, device="cuda")[:tokens]
    slots[::5] = -1
    expected = cache.clone()
    assert supports_append(latents[:, :512], latents[:, 512:])
    mla_append(latents[:, :512], latents[:, 512:], cache, slots)
    append_torch(latents[:, :512], latents[:, 512:], expected, slots)
    torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("widths", [(512, 64), (256, 32), (256, 64), (48, 20)], ids=str)
@pytest.mark.parametrize("tokens", [1, 33, 3000])
def test_norm_rotation_and_append_in_one_launch(
    tokens: int, widths: tuple[int, int], dtype: torch.dtype
) -> None:
    for interleaved_in, interleaved_out, per_column in (
        (True, False, False),
        (True, True, False),
        (False, False, True),
    ):
        case = norm_rope_append_case(
            tokens,
            *widths,
            interleaved_in=interleaved_in,
            interleaved_out=interleaved_out,
            per_column=per_column,
            angles=dtype if per_column else torch.float32,
            dtype=dtype,
            device="cuda",
        )
        assert supports_norm_rope_append(case.kv_a)
        before = case.kv_cache.clone()
        mla_norm_rope_append(**vars(case))
        check_norm_rope_append(case, before)


def test_a_captured_norm_rotation_and_append_serves_other_slots_at_replay() -> None:
    case = norm_rope_append_case(8, 512, 64, dtype=torch.bfloat16, device="cuda")
    mla_norm_rope_append(**vars(case))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_norm_rope_append(**vars(case))
    for seed in range(3):
        case.kv_a.copy_(norm_rope_append_case(8, 512, 64, seed=seed, device="cuda").kv_a)
        case.slot_mapping.copy_(case.slot_mapping.roll(1))
        case.kv_cache.fill_(torch.nan)
        before = case.kv_cache.clone()
        graph.replay()
        check_norm_rope_append(case, before)
