"""FP8 latents on the CPU: the format, the ops' contracts, and an engine with them.

Kernels: the conformance suites of `tests/ops/`, which have the format as one more case.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from mla_compile import Engine, mla_append
from mla_compile.caches import CacheSpec
from mla_compile.engine import EngineConfig
from mla_compile.engine.memory import plan_memory
from mla_compile.errors import MLAError
from mla_compile.latents import FP8, fp8_width, pack, rope_width, unpack
from mla_compile.ops.attention.append import append_op
from mla_compile.ops.attention.decode import decode_op
from mla_compile.ops.attention.norm_rope import norm_rope_append_op
from mla_compile.ops.attention.prefill import prefill_op
from mla_compile.testing import shadow_check
from tests.cases import make_case
from tests.engine.engines import engine, finish, texts
from tests.kernel_cases import decode_case, fp8_cache, fp8_case, norm_rope_append_case, prefill_args
from tests.models_for_tests import one_layer_model

RANK, ROPE = 256, 8


def stored(kv_c: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return unpack(pack(kv_c, kv_c[:, :ROPE]), kv_c.shape[1], dtype)


def drawn(tokens: int = 64) -> Tensor:
    """Latents of many magnitudes."""
    g = torch.Generator().manual_seed(0)
    return torch.randn(tokens, RANK, generator=g) * 10.0 ** torch.randint(-9, 9, (tokens, 1), generator=g)


def test_a_token_has_656_bytes_at_512_and_64() -> None:
    assert fp8_width(512, 64) == pack(torch.zeros(1, 512), torch.zeros(1, 64)).shape[1] == 656
    assert rope_width(torch.empty(1, 1, 656, dtype=FP8), 512) == rope_width(torch.empty(1, 1, 576), 512) == 64


def test_values_are_scales_times_e4m3_and_the_rotary_key_is_bfloat16() -> None:
    kv_c, k_pe = drawn(), torch.randn(64, ROPE)
    packed = pack(kv_c, k_pe)
    values = packed[:, :RANK].view(torch.float8_e4m3fn).float().unflatten(1, (-1, 128))
    scales = packed[:, RANK : RANK + 8].contiguous().view(torch.float32)
    assert torch.equal(unpack(packed, RANK, torch.float32)[:, :RANK], (values * scales[..., None]).flatten(1))
    assert torch.equal(unpack(packed, RANK, torch.float32)[:, RANK:], k_pe.bfloat16().float())
    assert (scales.frexp().mantissa == 0.5).all(), "powers of two"
    largest = kv_c.unflatten(1, (-1, 128)).abs().amax(2)
    assert (largest <= 448 * scales).all() and (largest > 224 * scales).all(), "the least that fits"


def test_the_error_is_at_most_a_sixteenth_of_a_value_or_what_underflows() -> None:
    kv_c = drawn()
    error = (stored(kv_c)[:, :RANK] - kv_c).abs()
    underflow = (
        kv_c.unflatten(1, (-1, 128)).abs().amax(2, keepdim=True).expand(-1, -1, 128).flatten(1) * 2.0**-18
    )
    assert (error <= kv_c.abs() / 16 + underflow).all()
    assert 0.02 < float(error[:4].norm() / kv_c[:4].norm()) < 0.03


def test_bfloat16_holds_stored_latents_exactly_and_storing_them_again_changes_nothing() -> None:
    once = stored(drawn())
    assert torch.equal(stored(drawn(), torch.bfloat16).float(), once)
    assert torch.equal(stored(once[:, :RANK])[:, :RANK], once[:, :RANK])


def test_zeros_stay_zeros_and_what_is_not_finite_makes_its_block_nan() -> None:
    kv_c = torch.randn(3, RANK)
    kv_c[0], kv_c[1, 3], kv_c[2, 200] = 0, torch.nan, -torch.inf
    found = stored(kv_c)[:, :RANK].isnan().unflatten(1, (-1, 128))
    assert not stored(kv_c)[0, :RANK].any()
    assert found[1, 0].all() and found[2, 1].all() and not found[0].any()
    assert not found[1, 1].any() and not found[2, 0].any()


def test_the_bytes_of_a_token_do_not_depend_on_other_tokens() -> None:
    kv_c, k_pe = drawn(), torch.randn(64, ROPE)
    alone = [pack(kv_c[i : i + 1], k_pe[i : i + 1]) for i in range(64)]
    assert torch.equal(pack(kv_c, k_pe), torch.cat(alone))


@pytest.mark.parametrize(("rank", "rope"), [(64, 16), (192, 16), (0, 16), (128, 3)])
def test_sizes_that_do_not_fit_are_refused_by_name(rank: int, rope: int) -> None:
    with pytest.raises(MLAError, match=rf"^kv_lora_rank: .* multiple of 128 .*, got {rank} and {rope}"):
        fp8_width(rank, rope)


def test_an_append_names_a_cache_that_does_not_fit() -> None:
    slots = torch.tensor([0])
    wide = torch.zeros(1, 4, fp8_width(128, 16) + 1, dtype=FP8)
    with pytest.raises(MLAError, match=r"^kv_cache: expected 164 bytes a token, of FP8 latents of 128 \+ 16"):
        mla_append(torch.zeros(1, 128), torch.zeros(1, 16), wide, slots)
    with pytest.raises(MLAError, match=r"^kv_cache: expected kv_lora_rank to be a multiple of 128"):
        mla_append(torch.zeros(1, 64), torch.zeros(1, 16), torch.zeros(1, 4, 80, dtype=FP8), slots)


def test_opcheck() -> None:
    packed, _ = fp8_case(make_case(prefill=[(3, 2), (4, 0)], rank=128, poison=False))
    segment = packed.batch.prefill
    assert segment is not None
    opcheck(append_op, (packed.kv_c, packed.k_pe, packed.kv_cache, segment.slot_mapping))
    opcheck(prefill_op, prefill_args(packed))
    opcheck(decode_op, (*decode_case([3, 0, 17], rank=128, fp8=True).args(), "reference"))
    fused = norm_rope_append_case(5, 128, 16)
    opcheck(norm_rope_append_op, fused._replace(kv_cache=fp8_cache(fused.kv_cache, 128)))


def test_a_spec_is_stored_as_the_setting_says() -> None:
    spec = CacheSpec("layers.0", "target", 576, torch.bfloat16, torch.device("cpu"), None, kv_lora_rank=512)
    fp8 = spec.stored_as("fp8")
    assert spec.stored_as("auto") is spec and (fp8.dtype, fp8.width, fp8.bytes_per_token) == (FP8, 656, 656)
    other = replace(spec, kv_lora_rank=0)
    assert other.stored_as("fp8") is other, "keys of a grouped-query head stay in the weights' dtype"
    narrow = replace(spec, kv_lora_rank=64)
    with pytest.raises(MLAError, match=r"^kv_cache_dtype: expected kv_lora_rank to be a multiple of 128"):
        narrow.stored_as("fp8")
    of_drafter = replace(narrow, owner="drafter")
    assert of_drafter.stored_as("fp8") is of_drafter


def test_an_engine_refuses_what_does_not_fit_before_it_allocates() -> None:
    model = one_layer_model()
    with pytest.raises(MLAError, match=r"^kv_cache_dtype: .*got 16 and 8"):
        Engine(model, kv_cache_dtype="fp8")
    assert model.layers[0].self_attn.kv_cache is None
    target, drafter = model.cache_specs()
    model.cache_specs = lambda: [replace(target, kv_lora_rank=0), drafter]
    with pytest.raises(MLAError, match=r"^kv_cache_dtype: expected 'auto' .*, got 'fp8'; .*`kv_lora_rank`"):
        Engine(model, kv_cache_dtype="fp8")
    assert model.layers[0].self_attn.kv_cache is None
    with pytest.raises(MLAError, match=r"^kv_cache_dtype: expected 'auto' or 'fp8', got 'int8'"):
        EngineConfig(kv_cache_dtype="int8")  # type: ignore[arg-type]


def test_the_plan_counts_bytes_of_fp8_latents() -> None:
    model = one_layer_model(torch.bfloat16, rank=128)
    cache = {dtype: plan_memory(model, EngineConfig(kv_cache_dtype=dtype)).cache for dtype in ("auto", "fp8")}
    assert cache["fp8"] * 2 * (128 + 8) == cache["auto"] * fp8_width(128, 8)


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [3, 1, 4, 1, 5, 9, 7], [2, 7, 1] * 6, [8]]


def completions(k: int, **settings: object) -> list[list[int]]:
    with_fp8 = engine(k, one_layer_model(rank=128), kv_cache_dtype="fp8", **settings)
    assert {spec.dtype for spec in with_fp8._caches.specs} == {FP8}
    requests = [with_fp8.add(prompt, max_new_tokens=12) for prompt in PROMPTS]
    finish(with_fp8)
    return texts(requests)


def test_drafts_prefixes_and_preemption_change_no_token_of_an_engine() -> None:
    expected = completions(0, prefix_caching=False, max_rows=1)
    assert all(len(tokens) == 12 for tokens in expected)
    assert completions(0) == completions(3) == expected
    assert completions(3, num_pages=1 + 16) == expected, "requests are preempted"
    assert completions(3, max_tokens_per_step=17) == expected, "prompts in chunks"


@pytest.mark.slow
def test_compiled_steps_agree_with_eager_ones_and_in_exact_mode_no_neighbour_changes_a_bit() -> None:
    model = one_layer_model(torch.float32, rank=128)
    compiled = engine(3, model, kv_cache_dtype="fp8", compile=True)
    with shadow_check(compiled):
        requests = [compiled.add(prompt, max_new_tokens=6) for prompt in PROMPTS[:2]]
        finish(compiled)
    assert all(len(tokens) == 6 for tokens in texts(requests))
    exact = engine(1, model, kv_cache_dtype="fp8", compile=True, batch_invariant=True, prefix_caching=False)
    together = exact.generate(PROMPTS[:3], max_new_tokens=6)
    alone = [exact.generate([prompt], max_new_tokens=6)[0] for prompt in PROMPTS[:3]]
    assert [x.token_ids for x in together] == [x.token_ids for x in alone]
