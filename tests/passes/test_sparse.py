"""The passes on models with indexers, with every fusion that a GPU has."""

import pytest
import torch

from mla_compile import mla_attention, mla_select_keys, pack_batch
from mla_compile.caches import allocate
from mla_compile.errors import MLAError
from mla_compile.models import MLAForCausalLM
from mla_compile.passes import pipeline
from tests.cases import make_case
from tests.integrations.test_logits import Reader
from tests.models.small import glm5_config, randomize
from tests.ops.test_sparse import SHAPES, index_case
from tests.passes.capture import nodes_of, ops, without_kernels
from tests.passes.steps import capture_steps

EVERYWHERE = without_kernels(*pipeline.PASSES)
"""The default passes, on the CPU too."""


@pytest.mark.long
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_steps_with_every_fusion_give_the_stock_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(family)
    capture = capture_steps(reader, EVERYWHERE, monkeypatch)
    for _ in range(2):
        reader.assert_as_stock(reader.decode(1))
    (before,), (after,) = capture.before, capture.after
    layers, indexers = (len(nodes_of(before, op)) for op in ("mla_attention", "mla_select_keys"))
    assert (layers, indexers) == ((3, 3) if family == "deepseek_v32" else (4, 3))
    assert len(nodes_of(after, "mla_sparse_attention")) == layers
    assert len(nodes_of(after, "mla_decode_select")) == indexers
    assert len(nodes_of(after, "mla_norm_rope_append")) == layers, "the latents'"
    assert len(nodes_of(after, "mla_append")) == indexers, "the indexers' keys"
    assert not {"mla_attention", "mla_select_keys", "mla_decode"} & set(ops(after))


@pytest.mark.long
@pytest.mark.parametrize("shape", ["padded drafts", "mixed"])
def test_a_users_own_calls_compile_to_what_eager_gives(shape: str) -> None:
    def attend(case_args: tuple, q, k, weights, cache):
        selected = mla_select_keys(q, k, weights, cache, case_args[7], topk=5)
        return mla_attention(*case_args, selected=selected)

    case = make_case(**SHAPES[shape])
    expected = attend(case.clone().args(), *index_case(case))
    torch.compiler.reset()
    compiled = torch.compile(attend, backend="mla", fullgraph=True)
    torch.testing.assert_close(compiled(case.clone().args(), *index_case(case)), expected)
    invariant = torch.compile(attend, backend="mla", fullgraph=True, options={"batch_invariant": True})
    with pytest.raises(MLAError, match=r"batch_invariant: .*use a model without an indexer"):
        invariant(case.clone().args(), *index_case(case))


@pytest.mark.long
def test_any_batches_of_a_whole_model_make_three_graphs() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = MLAForCausalLM(glm5_config(), mtp=False)
    randomize(model)
    allocate(model.cache_specs(), 41, 4)
    table = (1 + torch.randperm(40)).int().view(4, 10)
    compiled = torch.compile(model, backend="mla", fullgraph=True)
    for lens, cached, has_sampled in (
        ([5, 7, 3, 2], [0, 0, 0, 0], [False] * 4),
        ([1, 1, 4, 6], [5, 7, 3, 2], [True, True, False, False]),
        ([1, 1, 1, 1], [6, 8, 7, 8], [True] * 4),
        ([3, 9], [0, 0], [False] * 2),
    ):
        ids = torch.randint(0, 90, (sum(lens),))
        packed = pack_batch(lens, cached, table[: len(lens)], ids, has_sampled=has_sampled, page_size=4)
        before = [spec.cache.clone() for spec in model.cache_specs()]
        call = *packed.tensors, packed.positions, packed.batch
        with torch.no_grad():
            expected = model(*call).hidden
            for spec, cache in zip(model.cache_specs(), before, strict=True):
                spec.cache.copy_(cache)
            torch.testing.assert_close(compiled(*call).hidden, expected, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
