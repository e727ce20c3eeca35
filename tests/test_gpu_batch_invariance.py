"""On a CUDA device: `batch_invariant=True` gives a token the same bits in any mix, in an engine and in a module."""

import pytest
import torch

from mla_compile import SamplingParams, load_model, pack_batch
from mla_compile.caches import allocate
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.ops.norm.kernels.rms_norm import add_rms_norm_triton, rms_norm_triton
from mla_compile.ops.reductions.kernels.row_sums import sum_triton
from mla_compile.testing import check_batch_invariance
from tests.models_for_tests import tiny_model
from tests.ops import rms_norm, row_sums

pytestmark = pytest.mark.gpu

PROMPTS = [
    [1 + (7 * i + 3 * j * j) % 20 for j in range(n)] for i, n in enumerate((3, 90, 17, 150, 1, 40, 33, 64))
]
MIXED = [
    SamplingParams(),
    SamplingParams(
        temperature=0.8,
        top_p=0.9,
        top_k=30,
        min_p=0.05,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        logprobs=3,
        seed=4,
    ),
]
"""Two kinds of steps: each of them is compiled four times."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize("columns", [1, 64, 100, 256, 512, 768, 2048, 3001, 7168])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_and_norms_of_rows(dtype: torch.dtype, columns: int) -> None:
    row_sums.check(sum_triton, dtype, columns, device="cuda")
    rms_norm.check(rms_norm_triton, add_rms_norm_triton, dtype, columns, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_requests_of_the_shipped_model_alone_and_in_any_mix(dtype: torch.dtype) -> None:
    model = load_model(SHIPPED_MODEL, dtype=dtype, device="cuda")
    report = check_batch_invariance(model, PROMPTS, max_new_tokens=48, rounds=4)
    assert report.num_latents > 1000 and report.num_tokens > 1000
    assert not report.num_different, report


def test_all_kinds_of_sampling_of_a_tiny_model() -> None:
    report = check_batch_invariance(tiny_model(torch.float16).cuda(), PROMPTS, MIXED, drafts=(0, 2), rounds=3)
    assert not report.num_different, report


def test_a_users_own_module() -> None:
    model = load_model(SHIPPED_MODEL, dtype=torch.bfloat16, device="cuda")
    allocate(model.cache_specs(), num_pages=41, page_size=64)
    compiled = torch.compile(model, backend="mla", fullgraph=True, options={"batch_invariant": True})
    tables = 1 + torch.arange(40, device="cuda", dtype=torch.int32).view(10, 4)
    prompt = torch.randint(1, 3000, (100,), device="cuda")

    def run(lens: list[int], cached: list[int], table: torch.Tensor, *ids: torch.Tensor) -> torch.Tensor:
        sampled = [n <= 3 and held > 0 for n, held in zip(lens, cached)]
        packed = pack_batch(
            lens, cached, table, torch.cat(ids), has_sampled=sampled, page_size=64, num_speculative_tokens=2
        )
        with torch.no_grad():
            return compiled(*packed.tensors, packed.positions, packed.batch).hidden[packed.order].clone()

    alone = run([100], [0], tables[:1], prompt)
    then = [run([1], [100 + i], tables[:1], prompt[i : i + 1]) for i in range(3)]
    other = torch.randint(1, 3000, (77,), device="cuda")
    # The same text at other pages, in two chunks, beside another prompt; then three tokens of it at once.
    first = run([60, 77], [0, 0], tables[3:5], prompt[:60], other)
    second = run([2, 40], [77, 60], tables[[4, 3]], other[:2], prompt[60:])
    third = run([3, 2, 3], [100, 79, 0], tables[[3, 4, 7]], prompt[:3], other[:2], other[:3])
    assert torch.equal(torch.cat([first[:60], second[2:]]), alone)
    assert torch.equal(third[:3], torch.cat(then))
