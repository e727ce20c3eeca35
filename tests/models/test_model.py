"""The model by itself: precision, caches, tracing."""

import subprocess
import sys

import pytest
import torch
from torch._dynamo.decorators import mark_unbacked
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm, DeepseekV3RotaryEmbedding

from mla_compile import MLAError
from mla_compile.caches import allocate
from mla_compile.models import MLAForCausalLM
from mla_compile.models.layers import RMSNorm
from mla_compile.models.rotary import Rope, RotaryEmbedding
from mla_compile.ops.attention.norm_rope import rotate
from tests.models.small import YARN, Session, randomize, relative_error, v2_config, v3_config


def random_model(**changes) -> MLAForCausalLM:
    model = MLAForCausalLM(v3_config(**changes), mtp=True)
    randomize(model)
    return model


def both_hidden(model: MLAForCausalLM, length: int = 12) -> torch.Tensor:
    """Hidden states of the trunk and the MTP layer after one prompt."""
    batch, positions = Session(model, rows=1).prefill([length], [0])
    tokens = torch.arange(length, device=positions.device) * 7 % 97
    hidden = model(tokens, positions, batch).hidden
    return torch.cat([hidden, model.forward_mtp(tokens.roll(-1), hidden, positions, batch)])


def test_float64_and_float32_agree():
    model = random_model()
    single = both_hidden(model)
    double = both_hidden(model.double())
    assert double.dtype == torch.float64
    assert relative_error(single.double(), double) < 1e-5


def test_bfloat16_is_close_to_float32():
    model = random_model(first_k_dense_replace=3)  # dense trunk: a rounded score may choose another expert
    single = both_hidden(model)[:12]
    half = both_hidden(model.bfloat16())[:12]
    assert half.dtype == torch.bfloat16
    assert relative_error(half.float(), single) < 0.05


@pytest.mark.gpu
def test_cuda_and_cpu_agree():
    model = random_model()
    on_cpu = both_hidden(model)
    assert relative_error(both_hidden(model.cuda()).cpu(), on_cpu) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_norm_rounds_as_transformers_does(dtype):
    ours, theirs = RMSNorm(64, 1e-5), DeepseekV3RMSNorm(64, 1e-5)
    for norm in (ours, theirs):
        randomize(norm)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.testing.assert_close(ours.to(dtype)(x), theirs.to(dtype)(x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("interleave", [True, False])
def test_rotation_is_complex_multiplication(interleave):
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    pairs = x.unflatten(-1, (4, 2)) if interleave else torch.stack(x.chunk(2, dim=-1), dim=-1)
    angles = torch.randn(5, 1, 4, dtype=torch.float64)
    expected = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    rotated = rotate(x, angles.cos(), angles.sin(), interleave)
    torch.testing.assert_close(rotated, torch.cat([expected.real, expected.imag], dim=-1))


def test_angles_of_far_positions_are_those_of_transformers():
    config = v3_config(rope_parameters=dict(YARN))
    positions = torch.tensor([0, 1, 255, 257, 163_839])
    cos, sin = DeepseekV3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours = RotaryEmbedding(Rope.from_config(config))(positions)
    torch.testing.assert_close(torch.cat(ours, dim=-1), torch.cat([cos[0, :, :4], sin[0, :, :4]], dim=-1))


def test_frequencies_survive_a_change_of_dtype_and_an_empty_device():
    rope = Rope.from_config(v3_config(rope_parameters=dict(YARN)))
    plain = RotaryEmbedding(rope).inv_freq
    with torch.device("meta"):
        emptied = RotaryEmbedding(rope)
    for module in (RotaryEmbedding(rope).bfloat16(), emptied.to_empty(device="cpu")):
        assert module.inv_freq.dtype == torch.float32
        torch.testing.assert_close(module.inv_freq, plain, atol=0, rtol=0)


def test_every_layer_has_its_own_cache_that_checkpoints_do_not_hold():
    model = random_model()
    allocate(model.cache_specs(), num_pages=5, page_size=4)
    caches = {name: buffer for name, buffer in model.named_buffers() if name.endswith("kv_cache")}
    assert len(caches) == 3 + 1
    assert {tuple(cache.shape) for cache in caches.values()} == {(5, 4, 32 + 8)}
    assert len({cache.data_ptr() for cache in caches.values()}) == 4
    assert not any(cache.any() for cache in caches.values())
    assert not caches.keys() & model.state_dict().keys()


def test_up_projections_are_views_of_kv_b_proj():
    attention = random_model().layers[0].self_attn
    w_uk, w_uv = attention.up_projections()
    assert (w_uk.shape, w_uv.shape) == ((4, 16, 32), (4, 32, 24))
    storage = attention.kv_b_proj.weight.untyped_storage().data_ptr()
    assert w_uk.untyped_storage().data_ptr() == w_uv.untyped_storage().data_ptr() == storage


def test_a_forward_without_a_cache_says_what_to_call():
    model = random_model()
    batch, positions = Session(model, rows=1).prefill([3], [0])
    fresh = random_model()
    with pytest.raises(MLAError, match=r"kv_cache: expected an allocated cache.*caches.allocate"):
        fresh(torch.zeros(3, dtype=torch.int64), positions, batch)


def test_a_model_without_an_mtp_layer_says_so():
    model = MLAForCausalLM(v3_config(), mtp=False)
    batch, positions = Session(model, rows=1).prefill([3], [0])
    with pytest.raises(MLAError, match="mtp: expected a model with an MTP layer"):
        model.forward_mtp(torch.zeros(3, dtype=torch.int64), torch.zeros(3, 48), positions, batch)


@pytest.mark.parametrize("pages", [(0, 4), (4, 0)])
def test_a_cache_of_no_size_is_refused(pages):
    with pytest.raises(MLAError, match="num_pages, page_size: expected >= 1"):
        allocate(random_model().cache_specs(), *pages)


@pytest.mark.long
@pytest.mark.parametrize(
    "config",
    [
        v3_config(rope_parameters=dict(YARN)),
        v2_config(topk_method="group_limited_greedy", q_lora_rank=None),
        v3_config(rope_interleave=False, tie_word_embeddings=True),
    ],
    ids=["v3 yarn", "v2 group limited", "v3 tied, not interleaved"],
)
def test_one_graph_without_breaks_serves_every_number_of_tokens(config):
    model = MLAForCausalLM(config, mtp=True)
    randomize(model)
    session, graphs = Session(model, rows=1), []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm

    def step(tokens, positions, batch):
        hidden = model(tokens, positions, batch).hidden
        return model.logits(model.forward_mtp(tokens, hidden, positions, batch))

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for length in (5, 1, 17):
        tokens = torch.arange(length) * 5 % 97
        batch, positions = session.prefill([length], [0])
        for tensor in (tokens, positions, batch.prefill.slot_mapping):
            mark_unbacked(tensor, 0)
        mark_unbacked(batch.prefill.key_slots, 1)
        expected = step(tokens, positions, batch)
        torch.testing.assert_close(compiled(tokens, positions, batch), expected, atol=1e-5, rtol=1e-5)
    assert len(graphs) == 1


@pytest.mark.long
def test_importing_the_models_does_not_import_transformers():
    check = "import sys, mla_compile.models; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
