"""Every decode backend and the other Triton kernels on a CUDA device, at the sizes of real models, against float64."""

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import pytest
import torch

from mla_compile import MLAError, mla_append, mla_decode
from mla_compile.latents import fp8_width, unpack
from mla_compile.ops.attention.append import append_torch
from mla_compile.ops.attention.decode_backends import DECODE_BACKENDS, DecodeBackend, decode_call
from mla_compile.ops.attention.masked_decode import mla_masked_decode
from mla_compile.ops.attention.metadata import (
    decode_metadata_torch,
    mla_decode_metadata,
    prefill_metadata_torch,
)
from mla_compile.ops.attention.norm_rope import mla_norm_rope_append, mla_rotate_queries
from mla_compile.ops.attention.operands import PrefillOperands
from mla_compile.ops.attention.prefill import PREFILL
from mla_compile.ops.batch_invariant import product_by_row
from mla_compile.ops.device import device_of
from mla_compile.ops.dispatch import Call, describe_device
from mla_compile.ops.experts.moe import moe_by_token, moe_experts, moe_experts_op
from mla_compile.ops.experts.norm_router import norm_router
from mla_compile.ops.experts.routing import moe_router
from mla_compile.ops.library import choose
from mla_compile.ops.linear import cublas
from mla_compile.ops.linear.kernels import blocks
from mla_compile.ops.linear.matmul import (
    batch_invariant_matmul,
    batch_invariant_matmul_op,
    fused_linear,
    matmul_by_head,
)
from mla_compile.ops.linear.norm_linear import norm_linear
from mla_compile.ops.linear.tiles import many_block_tiles, matmul_tiles
from mla_compile.ops.norm.rms_norm import fused_add_rms_norm
from mla_compile.ops.reductions.last_dim import row_argmax, row_argmax_op
from mla_compile.ops.sampling.sample import sample_tokens, sample_tokens_op, sample_torch
from tests.kernel_cases import (
    BACKENDS,
    HUGE,
    MaskedCase,
    MoeCase,
    check_decode,
    check_masked,
    check_matmul,
    check_moe,
    check_norm_rope_append,
    check_padded_moe,
    check_prefill,
    decode_case,
    drawn_matmul,
    fp8_cache,
    masked_case,
    metadata_args,
    moe_case,
    norm_rope_append_case,
    padding,
    prefill_args,
    prefill_metadata_args,
)
from tests.ops import row_argmax as argmax_rows
from tests.ops import sample_tokens as samples
from tests.ops.conformance import INVARIANT, DecodeConformance, DecodeInvariance, Shown, Subject, Texts
from tests.ops.norm_linear import check as check_norm_linear
from tests.ops.prefill_conformance import INVARIANT as INVARIANT_PREFILL
from tests.ops.prefill_conformance import PrefillConformance, PrefillInvariance, subject_of
from tests.ops.prefill_conformance import Subject as PrefillSubject
from tests.ops.prefill_conformance import Texts as Prompts
from tests.ops.rotate_queries import check as check_rotation
from tests.ops.rotate_queries import expected as expected_rotation
from tests.ops.rotate_queries import rotation_case
from tests.ops.routing import ROUTINGS, check, check_after_norm, check_bits, router_args

pytestmark = pytest.mark.gpu

# heads, kv_lora_rank, qk_rope_head_dim
MODELS = {
    "GLM": (20, 512, 64),
    "V2-Lite": (16, 512, 64),
    "V3": (128, 512, 64),
    "Mistral4": (32, 256, 64),
    "MiniCPM3": (40, 256, 32),
}


@pytest.fixture(scope="module", params=DECODE_BACKENDS, ids=lambda backend: backend.name)
def subject(request: pytest.FixtureRequest) -> Subject:
    return on_the_gpu(request.param)


def on_the_gpu(backend: DecodeBackend) -> Subject:
    reason = backend.why_not(Call(*describe_device(torch.device("cuda:0"))))
    if reason is not None:
        pytest.skip(f"{backend.name} {reason}")
    return Subject(backend, "cuda", heads=20, rank=512, rope=64, page_size=64, dtype=torch.bfloat16)


def matmul_triton(*args: torch.Tensor, **options) -> torch.Tensor:
    from mla_compile.ops.linear.kernels.matmul import matmul_triton as run

    return run(*args, **options)


def is_triton(op: str, *args: object) -> bool:
    return choose(op, args).chosen.name == "triton"


def sizes(model: str) -> dict[str, int]:
    return dict(zip(("heads", "rank", "rope"), MODELS[model], strict=True))


class TestOnTheGpu(DecodeConformance):
    """The conformance suite, and tests for a GPU alone: models' sizes, far pages, captured graphs."""

    @pytest.mark.parametrize(
        "lengths", [[1], [1000], [5000, 1, 63], [1000] * 32, [0, 1, 64, 65, 9000, *range(100, 127)]], ids=str
    )
    @pytest.mark.parametrize("q_len", [1, 4])
    @pytest.mark.parametrize("model", MODELS)
    def test_models(self, subject: Subject, model: str, q_len: int, lengths: list[int]) -> None:
        subject.check(lengths, q_len=q_len, **sizes(model))

    @pytest.mark.parametrize("page_size", [1, 48, 64])
    @pytest.mark.parametrize("q_len", [1, 4])
    @pytest.mark.parametrize("model", MODELS)
    def test_models_with_fp8_latents(self, subject: Subject, model: str, q_len: int, page_size: int) -> None:
        lengths = [0, 1, 64, 65, 9000, *range(100, 127)]
        subject.check(lengths, q_len=q_len, page_size=page_size, fp8=True, **sizes(model))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("model", MODELS)
    def test_models_in_other_dtypes(self, subject: Subject, model: str, dtype: torch.dtype) -> None:
        subject.check([0, 1, 70, 1500], q_len=2, q_lens=[0, 1, 2, 2], dtype=dtype, **sizes(model))

    @pytest.mark.parametrize("page_size", [1, 7, 16, 128])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_page_sizes_with_ragged_queries(
        self, subject: Subject, page_size: int, dtype: torch.dtype
    ) -> None:
        lengths, q_lens = [2, 700, 0, 129, 5, 127], [4, 1, 0, 3, 2, 4]
        subject.check(lengths, q_len=4, q_lens=q_lens, page_size=page_size, dtype=dtype)

    @pytest.mark.parametrize("columns", [4, 16, 64, 512])
    def test_borders_of_splits_in_tables_of_all_widths(self, subject: Subject, columns: int) -> None:
        lengths = [n + d for n in (64, 128, 192, 256) for d in (-1, 0, 1) if n + d <= columns * 64]
        subject.check(lengths, q_len=2, columns=columns)

    @pytest.mark.parametrize("widths", [(32, 16), (48, 16), (128, 32), (512, 128)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_other_widths(self, subject: Subject, widths: tuple[int, int], dtype: torch.dtype) -> None:
        rank, rope = widths
        subject.check([300, 0, 17], q_len=3, heads=6, rank=rank, rope=rope, dtype=dtype)

    def test_pages_beyond_two_to_the_thirty_one_elements(self, subject: Subject) -> None:
        case = subject.case([100, 3])
        pages = 2**31 // (64 * 576) + 10
        far = torch.full((pages, 64, 576), torch.nan, dtype=torch.bfloat16, device="cuda")
        far[-case.kv_cache.shape[0] :] = case.kv_cache
        moved = case.block_table + pages - case.kv_cache.shape[0]
        table = torch.where(case.block_table == HUGE, HUGE, moved).int()
        got = subject.run(replace(case, kv_cache=far, block_table=table))
        assert all(map(torch.equal, got, subject.run(case)))

    def test_captured_once_it_serves_other_lengths_at_replay(self, subject: Subject) -> None:
        if not subject.backend.capturable:
            pytest.skip(f"{subject.backend.name} may not be captured")
        case = subject.case([2000, 64, 5, 700], q_len=4)
        lengths = case.seq_lens.clone()
        subject.run(case)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        case.seq_lens.fill_(1)
        with torch.cuda.graph(graph):
            out, lse = subject.run(case)
        for shorter in (0, 1, 63, 64, 2000):
            case.seq_lens.copy_((lengths - shorter).clamp(min=0))
            graph.replay()
            check_decode(case, (out, lse))


@pytest.mark.parametrize("page_size", [1, 48, 64])
@pytest.mark.parametrize(("heads", "q_len"), [(16, 1), (20, 1), (20, 4), (32, 3), (128, 2)])
def test_on_hopper_fp8_latents_have_the_bits_of_a_bfloat16_cache_that_holds_their_values(
    heads: int, q_len: int, page_size: int
) -> None:
    """Over fixed splits, where lengths do not change the order of sums."""
    sizes = {"heads": heads, "rank": 512, "rope": 64, "page_size": page_size, "device": "cuda"}
    case = decode_case([700, 64, 1, 0, 3000], q_len=q_len, dtype=torch.bfloat16, fp8=True, **sizes)
    backend = BACKENDS["gluon_invariant"]
    if (reason := backend.why_not(decode_call(case.operands(), captured=False))) is not None:
        pytest.skip(f"{backend.name} {reason}")
    values = replace(case, kv_cache=unpack(case.kv_cache, 512, torch.bfloat16))
    found, expected = backend.run(case.operands()), backend.run(values.operands())
    assert all(map(torch.equal, found, expected))


class TestBatchInvariantOnTheGpu(DecodeInvariance):
    borders: tuple[int, ...] = (1, 64, 128, 512, 1024, 4096)

    @pytest.fixture(params=INVARIANT, ids=lambda backend: backend.name)
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        return on_the_gpu(request.param)

    def sizes(self, draw: random.Random) -> dict[str, int]:
        return {
            **sizes(draw.choice([*MODELS])),
            "page_size": draw.choice([1, 16, 64]),
            "seed": draw.randint(0, 99),
        }

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("model", MODELS)
    def test_models(self, subject: Subject, model: str, dtype: torch.dtype) -> None:
        texts = Texts(subject, [3000, 260, 70, 1], dtype=dtype, **sizes(model))
        for q_len in (1, 2, 4, 6):
            rows = [Shown(0, 3000, q_len), Shown(1, 257, q_len), Shown(2, 64 + q_len, q_len), Shown(3, 1, 1)]
            for more in (0, 500):
                texts.check(rows, q_len, more)
                texts.check(rows[::-1], q_len + 1, more)

    @pytest.mark.parametrize("rows", [32, 100, 256])
    def test_many_rows(self, subject: Subject, rows: int) -> None:
        draw = random.Random(rows)
        texts = Texts(subject, [draw.randint(1, 1200) for _ in range(rows)], **sizes("GLM"))
        found = texts.call([Shown(text, n, 1) for text, n in enumerate(texts.lengths)], 1)
        for text in draw.sample(range(rows), 20):
            token = text, texts.lengths[text] - 1
            assert all(map(torch.equal, found[token], texts.alone(*token)))


def test_a_rows_bits_of_triton_do_not_depend_on_the_other_rows() -> None:
    heads, rank, rope = MODELS["GLM"]
    case = decode_case(
        [3000, 500, 0, 7], q_len=4, heads=heads, rank=rank, rope=rope, dtype=torch.bfloat16, device="cuda"
    )
    *tensors, q_lens, q_len, scale = case.args()
    first = mla_decode(*tensors, q_len=q_len, softmax_scale=scale, q_lens=q_lens, backend="triton")
    case.seq_lens[0], case.seq_lens[3] = 0, 1
    case.q_latent[:4] = torch.nan
    again = mla_decode(*tensors, q_len=q_len, softmax_scale=scale, q_lens=q_lens, backend="triton")
    assert all(torch.equal(a[4:8], b[4:8]) for a, b in zip(first, again))


def test_a_backend_that_may_not_be_captured_is_refused_while_a_graph_is_recorded() -> None:
    case = decode_case([70, 5], heads=16, rank=512, rope=64, dtype=torch.bfloat16, device="cuda")
    *tensors, q_lens, q_len, scale = case.args()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(MLAError, match="got flashinfer, which"):
        mla_decode(*tensors, q_len=q_len, softmax_scale=scale, q_lens=q_lens, backend="flashinfer")


@pytest.mark.parametrize("scale", [192**-0.5, 576**-0.5, 0.02])
@pytest.mark.parametrize(("heads", "q_len"), [(20, 4), (16, 4), (128, 2)])
def test_flash_mla_hides_keys_about_the_borders_of_pages_and_splits(
    heads: int, q_len: int, scale: float
) -> None:
    """Some parts of a row hold no key that its first tokens see."""
    subject = on_the_gpu(BACKENDS["flash_mla"])
    for rows in (1, 40):
        lengths = [64 * (1 + i % 50) + i % 6 - 1 for i in range(rows)]
        q_lens = [q_len - i % 2 for i in range(rows)]
        case = subject.case([*lengths, 3000, 2, 0], heads=heads, q_len=q_len, q_lens=[*q_lens, q_len, 2, 0])
        scaled = replace(case, softmax_scale=scale)
        check_decode(scaled, subject.run(scaled))


@pytest.mark.parametrize("longest", [60, 1100])
def test_flash_mla_reads_this_calls_queries_in_calls_back_to_back(longest: int) -> None:
    """FlashMLA's kernel may start before the previous kernel ends, and does not wait for it."""
    subject = on_the_gpu(BACKENDS["flash_mla"])
    draw = random.Random(longest)
    for rows in (8, 32, 128):
        lengths = [draw.randint(4, longest) for _ in range(rows)]
        case = subject.case(lengths, heads=20, q_len=4)
        layers = [
            replace(case, q_latent=case.q_latent.roll(i, 1), q_pe=case.q_pe.roll(i, 1)) for i in range(6)
        ]
        operands = [layer.operands() for layer in layers]
        graph = torch.cuda.CUDAGraph()
        subject.run(case)
        with torch.cuda.graph(graph):
            plan = subject.backend.plan(operands[0], 0)
            found = [subject.backend.run(of, plan) for of in operands]
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        for layer, result in zip(layers, found, strict=True):
            check_decode(layer, result)


@pytest.mark.parametrize("heads", [1, 16, 20, 128])
@pytest.mark.parametrize("q_len", [1, 4])
def test_sizes_of_flash_mlas_plan_follow_from_sizes_of_the_call(heads: int, q_len: int) -> None:
    backend = on_the_gpu(BACKENDS["flash_mla"]).backend
    sizes = {"rank": 512, "rope": 64, "page_size": 64, "dtype": torch.bfloat16, "device": "cuda"}
    operands = decode_case([500, 3, 0], q_len=q_len, heads=heads, **sizes).operands()
    for plan, like in zip(backend.plan(operands, 0), backend.plan(operands, 0, unused=True), strict=True):
        assert (plan.shape, plan.dtype, plan.device) == (like.shape, like.dtype, like.device)


def masked_decode(case: MaskedCase) -> torch.Tensor:
    assert is_triton("mla_masked_decode", *case.args())
    *tensors, scale = case.args()
    return mla_masked_decode(*tensors, softmax_scale=scale)


def make_masked(model: str, lengths: list[int], **settings) -> MaskedCase:
    heads, rank, rope = MODELS[model]
    defaults = {"keys": 1500, "dtype": torch.bfloat16, "device": "cuda"}
    return masked_case(lengths, heads=heads, rank=rank, rope=rope, **defaults | settings)


@pytest.mark.parametrize("masked", ["none", "bool", "float", "heads"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_masked_decode_equals_the_definition(model: str, dtype: torch.dtype, masked: str) -> None:
    case = make_masked(model, [0, 1, 64, 1500], masked=masked, q_len=2, dtype=dtype)
    check_masked(case, masked_decode(case))


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 129, 5000])
@pytest.mark.parametrize("masked", ["none", "bool"])
def test_masked_decode_of_one_token_in_caches_of_any_size(masked: str, keys: int) -> None:
    check_masked(
        case := make_masked("GLM", [keys, 0, keys // 2], masked=masked, keys=keys), masked_decode(case)
    )


@pytest.mark.parametrize("widths", [(32, 16), (48, 16), (512, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_masked_decode_with_other_widths(widths: tuple[int, int], dtype: torch.dtype) -> None:
    rank, rope = widths
    case = masked_case(
        [300, 0, 17],
        masked="heads",
        q_len=3,
        keys=333,
        heads=6,
        rank=rank,
        rope=rope,
        dtype=dtype,
        device="cuda",
    )
    check_masked(case, masked_decode(case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_masked_decode_reads_shared_latents_and_none_that_are_hidden(dtype: torch.dtype) -> None:
    case = make_masked("GLM", [700, 333], q_len=2, shared=True, dtype=dtype)
    latents = torch.cat([case.kv_c, case.k_pe], -1)
    latents[:, 700:] = torch.nan
    out = masked_decode(replace(case, kv_c=latents[..., :512], k_pe=latents[..., 512:]))
    check_masked(case, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("masked", ["bool", "float"])
def test_a_captured_masked_decode_serves_other_masks_at_replay(masked: str, dtype: torch.dtype) -> None:
    case = make_masked("GLM", [1500, 64, 5], masked=masked, q_len=2, dtype=dtype)
    masked_decode(case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = masked_decode(case)
    for lengths in ([1, 2, 3], [0, 1500, 700], [64, 65, 0]):
        case.mask.copy_(make_masked("GLM", lengths, masked=masked, q_len=2, dtype=dtype).mask)
        graph.replay()
        check_masked(case, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 32, 100, 128])
def test_experts_at_the_size_of_glm(tokens: int, dtype: torch.dtype) -> None:
    case = moe_case(tokens, 4, experts=64, hidden=2048, intermediate=1536, dtype=dtype, device="cuda")
    name = choose("moe_experts", (*case.all_args(), False)).chosen.name
    assert name == ("gemv" if tokens <= 2 and dtype != torch.float32 else "triton")
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


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_captured_experts_of_few_tokens_serve_other_choices_and_padding_at_replay(
    fp8: bool, tokens: int
) -> None:
    if fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs SM 89")

    def drawn(seed: int) -> MoeCase:
        size = {"experts": 16, "hidden": 2048, "intermediate": 1408, "shared": 2}
        return moe_case(tokens, 6, **size, dtype=torch.bfloat16, device="cuda", seed=seed, fp8=fp8)

    case = drawn(0)
    row_lens = torch.ones(tokens, dtype=torch.int32, device="cuda")
    args = case.all_args(row_lens)
    assert choose("moe_experts", (*args, False)).chosen.name == ("gemv_fp8" if fp8 else "gemv")
    moe_experts_op(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_experts_op(*args)
    for seed in range(3):
        for name in ("x", "topk_weights", "topk_ids"):
            getattr(case, name).copy_(getattr(drawn(seed), name))
        graph.replay()
        check_moe(case, out)
    case.x.fill_(torch.nan)
    row_lens.zero_()
    graph.replay()
    assert not out.any()


def many_experts(
    tokens: int, dtype: torch.dtype, *, intermediate: int = 264, among: int | None = None, seed: int = 0
) -> MoeCase:
    """8 of 64 experts for a token, and by default an intermediate size that fills no tile."""
    size = {"experts": 64, "hidden": 512, "intermediate": intermediate}
    return moe_case(tokens, 8, **size, among=among, dtype=dtype, device="cuda", seed=seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_opcheck_of_many_experts(dtype: torch.dtype) -> None:
    case = many_experts(100, dtype)
    torch.library.opcheck(moe_experts_op, (*case.args(), *padding(case, 4, [4, 0, 3])[:2]))


@pytest.mark.parametrize(
    ("tokens", "dtype", "intermediate"),
    [
        *(
            (tokens, torch.bfloat16, 264) for tokens in (64, 65, 400, 672, 1500)
        ),  # 64: the most that are not sorted
        (600, torch.bfloat16, 256),
        (200, torch.float16, 264),
        (200, torch.float32, 264),
    ],
    ids=str,
)
def test_many_captured_experts_serve_other_choices_and_padding_at_replay(
    tokens: int, dtype: torch.dtype, intermediate: int
) -> None:
    draw = partial(many_experts, tokens, dtype, intermediate=intermediate)
    case, padded = draw(), draw()
    row_lens, q_len, _ = padding(padded, 4, [4] * 8)
    chosen = choose("moe_experts", (*case.all_args(), False)).chosen.name
    assert chosen in ("triton", "rounded", "grouped")

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return moe_experts_op(*case.args()), moe_experts_op(*padded.args(), row_lens, q_len)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, padded_out = run()
    for seed, (among, lens) in enumerate([(None, [4] * 8), (5, [4, 0, 1, 3, 0, 2, 4, 4]), (1, [0] * 8)]):
        drawn = draw(among=among, seed=seed)
        for target in (case, padded):
            for name in ("x", "topk_weights", "topk_ids"):
                getattr(target, name).copy_(getattr(drawn, name))
        new_lens, _, runs = padding(padded, q_len, lens)
        row_lens.copy_(new_lens)
        graph.replay()
        check_moe(case, out)
        check_padded_moe(padded, padded_out, runs)


@pytest.mark.parametrize("tokens", [70, 130, 300, 3000])
@pytest.mark.parametrize("parts", [0, 1, 2])
@pytest.mark.parametrize(
    "sizes", [(24, 256, 128, 0), (24, 512, 384, 2), (160, 256, 128, 1), (24, 2048, 1536, 1)], ids=str
)
def test_grouped_experts_have_the_bits_of_other_kernels(
    sizes: tuple[int, int, int, int], parts: int, tokens: int
) -> None:
    """parts: the FP8 vectors of a token; 0: weights and tokens are in bfloat16."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    from mla_compile.ops.experts.kernels.grouped import moe_grouped
    from mla_compile.ops.experts.kernels.moe import moe_rounded
    from mla_compile.ops.experts.kernels.moe_fp8 import moe_fp8

    experts, hidden, intermediate, shared = sizes
    grouped, other = moe_grouped, moe_rounded
    if parts:
        grouped, other = (partial(run, parts=parts) for run in (moe_grouped, moe_fp8))
    size = {"experts": experts, "hidden": hidden, "intermediate": intermediate, "shared": shared}
    among = {70: 1, 300: 3}.get(tokens, experts)
    case = moe_case(tokens, 4, **size, among=among, dtype=torch.bfloat16, device="cuda", fp8=parts > 0)
    got = grouped(case.operands())
    if parts != 1:
        check_moe(case, got)
    assert torch.equal(got, other(case.operands()))
    wide = torch.cat([case.x, case.x], 1)[:, :hidden]
    assert torch.equal(grouped(case.operands()._replace(x=wide)), got)
    row_lens, q_len, runs = padding(case, 4, [4, 0, 3, 1])
    padded = grouped(case.operands(row_lens, q_len))
    assert torch.equal(padded[runs], got[runs]) and not padded[~runs].any()


def test_the_plans_know_the_device() -> None:
    device = device_of(torch.empty(1, device="cuda"))
    assert device.multiprocessors > 0 and device.capability >= (8, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 32, 3000])
def test_latents_go_to_their_slots_and_masked_ones_nowhere(tokens: int, dtype: torch.dtype) -> None:
    latents = torch.randn(tokens, 576, device="cuda", dtype=dtype)
    cache = torch.full((1 + tokens // 32, 64, 576), float("nan"), device="cuda", dtype=dtype)
    slots = torch.randperm(cache.shape[0] * 64, device="cuda")[:tokens]
    slots[::5] = -1
    expected = cache.clone()
    assert is_triton("mla_append", latents[:, :512], latents[:, 512:], cache, slots)
    mla_append(latents[:, :512], latents[:, 512:], cache, slots)
    append_torch(latents[:, :512], latents[:, 512:], expected, slots)
    torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("widths", [(512, 64), (384, 20)], ids=str)
def test_fp8_latents_have_the_bytes_of_the_torch_code_fused_and_alone(
    widths: tuple[int, int], dtype: torch.dtype
) -> None:
    rank, rope = widths
    kv_c = torch.randn(300, rank, device="cuda") * 10.0 ** torch.randint(-6, 5, (300, 1), device="cuda")
    kv_c[0, :128], kv_c[3, 5], kv_c[6, -1] = 0, torch.nan, -torch.inf
    kv_c, k_pe = kv_c.to(dtype), torch.randn(300, rope, device="cuda").to(dtype)
    cache = torch.full((11, 32, fp8_width(rank, rope)), 0xFF, dtype=torch.uint8, device="cuda")
    slots = torch.randperm(352, device="cuda")[:300]
    slots[::5] = -1
    expected = cache.clone()
    mla_append(kv_c, k_pe, cache, slots)
    append_torch(kv_c, k_pe, expected, slots)
    assert torch.equal(cache, expected)
    case = norm_rope_append_case(300, rank, rope, dtype=dtype, device="cuda")
    packed = case._replace(kv_cache=fp8_cache(torch.full_like(case.kv_cache, torch.nan), rank))
    for each in (case, packed):
        assert is_triton("mla_norm_rope_append", *each)
        mla_norm_rope_append(**each._asdict())
    assert torch.equal(packed.kv_cache, fp8_cache(case.kv_cache, rank))


@pytest.fixture(scope="module", params=[row.name for row in PREFILL if row.name != "reference"])
def prefill_subject(request: pytest.FixtureRequest) -> PrefillSubject:
    subject = subject_of(request.param, device="cuda", dtype=torch.bfloat16)
    if (reason := subject.row.why_not(Call(*describe_device(torch.device("cuda"))))) is not None:
        pytest.skip(f"{subject.row.name} {reason}")
    return subject


class TestPrefill(PrefillConformance):
    @pytest.fixture(scope="class")
    def subject(self, prefill_subject: PrefillSubject) -> PrefillSubject:
        return prefill_subject

    @pytest.mark.parametrize("sizes", [{"nope": 128, "v": 128}, {"nope": 192, "v": 256}], ids=["V3", "GLM"])
    def test_a_captured_call_serves_other_lengths(
        self, subject: PrefillSubject, sizes: dict[str, int]
    ) -> None:
        """With the same numbers of tokens, rows and keys; a token's bits do not depend on the chunks."""
        sizes = {"rope": 64, "rank": 512, "heads": 8, "page_size": 16} | sizes
        first, second = ([(300, 0), (1, 700), (129, 64)], [(200, 500), (30, 30), (200, 234)])
        args = [
            x.cuda() if isinstance(x, torch.Tensor) else x for x in prefill_args(subject.case(first, **sizes))
        ]
        case = subject.case(second, **sizes)
        other = prefill_args(case)
        pages = max(args[1].shape[0], other[1].shape[0])
        args[1] = torch.nn.functional.pad(args[1], (0, 0, 0, 0, 0, pages - args[1].shape[0]))
        run = subject.row.load()
        run(PrefillOperands(*args))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(PrefillOperands(*args))
        for mine, given in zip(args, other, strict=True):
            if isinstance(mine, torch.Tensor):
                mine[: len(given)].copy_(given)
        graph.replay()
        check_prefill(case, out)


PROMPTS = {
    "V3": {"nope": 128, "rope": 64, "v": 128, "rank": 512, "heads": 16},
    "GLM": {"nope": 192, "rope": 64, "v": 256, "rank": 512, "heads": 20},
    "MiniCPM3": {"nope": 64, "rope": 32, "v": 64, "rank": 256, "heads": 40},
}


@pytest.fixture(params=[row.name for row in INVARIANT_PREFILL])
def invariant(request: pytest.FixtureRequest) -> PrefillSubject:
    subject = subject_of(request.param, device="cuda", dtype=torch.bfloat16)
    if (reason := subject.row.why_not(Call(*describe_device(torch.device("cuda"))))) is not None:
        pytest.skip(f"{subject.row.name} {reason}")
    return subject


class TestBatchInvariantPrefill(PrefillInvariance):
    borders: tuple[int, ...] = (1, 64, 128, 256)

    @pytest.fixture
    def subject(self, invariant: PrefillSubject) -> PrefillSubject:
        return invariant

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("model", PROMPTS)
    @pytest.mark.parametrize("drawn_weights", [False, True])
    def test_models(
        self, subject: PrefillSubject, model: str, dtype: torch.dtype, drawn_weights: bool
    ) -> None:
        """Drawn weights also test the products that make keys."""
        texts = Prompts(
            replace(subject, drawn_weights=drawn_weights),
            [900, 70],
            page_size=16,
            dtype=dtype,
            **PROMPTS[model],
        )
        for size in (17, 100, 512):
            for start in range(0, 900, size):
                texts.check([(0, start, min(900, start + size))])
        texts.check([(1, 3, 70), (0, 130, 140)], num_tokens=300, num_chunks=5, num_keys=2000)


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
            heads=20 if interleaved_in else 0,
            angles=dtype if per_column else torch.float32,
            dtype=dtype,
            device="cuda",
        )
        assert is_triton("mla_norm_rope_append", *case)
        before, alone = case.kv_cache.clone(), None if case.q_pe is None else case.q_pe.clone()
        mla_norm_rope_append(**case._asdict())
        check_norm_rope_append(case, before)
        if alone is not None:
            layout = {"interleaved_in": interleaved_in, "interleaved_out": interleaved_out}
            mla_rotate_queries(alone, case.cos, case.sin, **layout)
            assert torch.equal(case.q_pe, alone), "the bits that the op for queries alone gives"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [16, 20, 128])
@pytest.mark.parametrize("tokens", [1, 33, 3000])
def test_queries_are_rotated_in_place(tokens: int, heads: int, dtype: torch.dtype) -> None:
    for layout in itertools.product([False, True], repeat=2):
        for per_column in (False, True):
            case = rotation_case(
                tokens,
                heads,
                64,
                128,
                interleaved_in=layout[0],
                interleaved_out=layout[1],
                per_column=per_column,
                angles=dtype if per_column else torch.float32,
                dtype=dtype,
                device="cuda",
            )
            assert is_triton("mla_rotate_queries", *case)
            want = expected_rotation(case)
            mla_rotate_queries(*case[:3], interleaved_in=layout[0], interleaved_out=layout[1])
            check_rotation(case, want)


def test_a_captured_norm_rotation_and_append_serves_other_slots_at_replay() -> None:
    case = norm_rope_append_case(8, 512, 64, dtype=torch.bfloat16, device="cuda")
    mla_norm_rope_append(**case._asdict())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_norm_rope_append(**case._asdict())
    for seed in range(3):
        case.kv_a.copy_(norm_rope_append_case(8, 512, 64, seed=seed, device="cuda").kv_a)
        case.slot_mapping.copy_(case.slot_mapping.roll(1))
        case.kv_cache.fill_(torch.nan)
        before = case.kv_cache.clone()
        graph.replay()
        check_norm_rope_append(case, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(ROUTINGS))
def test_a_router_in_two_launches(name: str, dtype: torch.dtype) -> None:
    for tokens in (1, 33, 700):
        args = router_args(name, tokens, 2048, dtype, "cuda")
        assert is_triton("moe_router", *args, False) == (tokens <= 32)
        check(moe_router, args)
        invariant = partial(moe_router, batch_invariant=True)
        check(invariant, args)
        check_bits(invariant, args)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        *((rows, columns) for rows in (1, 6, 40) for columns in (1, 7, 1000, *argmax_rows.VOCABULARIES)),
        (2200, 3001),  # enough for a program to reduce a whole row
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_largest_of_each_row(dtype: torch.dtype, rows: int, columns: int) -> None:
    x = argmax_rows.rows_of(rows, columns, dtype).cuda()
    assert is_triton("row_argmax", x)
    argmax_rows.check(row_argmax, x)


def test_a_captured_argmax_serves_other_numbers_at_replay() -> None:
    x = torch.empty(4, argmax_rows.VOCABULARIES[0], dtype=torch.bfloat16, device="cuda").zero_()
    row_argmax_op(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = row_argmax_op(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, x.argmax(dim=-1))


@pytest.mark.parametrize("vocab", [2, 3, 1000])
def test_the_best_of_the_ids_that_filters_keep(vocab: int) -> None:
    args = tuple(x.cuda() for x in samples.args_of_all(vocab))
    assert is_triton("sample_tokens", *args)
    samples.check(sample_tokens, args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sampled_tokens_of_real_vocabularies(dtype: torch.dtype) -> None:
    for vocab in argmax_rows.VOCABULARIES:
        args = tuple(x.cuda() for x in samples.sample_args(16, 4, vocab, dtype))
        assert torch.equal(sample_tokens(*args), sample_torch(*args))
        samples.check_shapes(sample_tokens, args)
    samples.check_not_finite(lambda *args: sample_tokens(*(x.cuda() for x in args)), dtype)


def test_captured_sampling_serves_other_logits_and_parameters_at_replay() -> None:
    args = tuple(x.cuda() for x in samples.sample_args(16, 4, 3001))
    sample_tokens_op(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample_tokens_op(*args)
    for _ in range(3):
        args[0].normal_(std=3)
        for parameter in args[1:]:
            parameter.copy_(parameter.roll(1, 0))
        graph.replay()
        assert torch.equal(out, sample_torch(*args))


@pytest.mark.parametrize("page_size", [1, 7, 64])
@pytest.mark.parametrize("q_len", [1, 4, 33])
@pytest.mark.parametrize("ragged", [False, True], ids=["all", "ragged"])
def test_decode_metadata_equals_the_torch_code_to_the_bit(ragged: bool, q_len: int, page_size: int) -> None:
    *tensors, q_len, page_size = metadata_args(q_len, page_size, ragged=ragged, device="cuda")
    assert is_triton("mla_decode_metadata", *tensors, q_len, page_size)
    got = mla_decode_metadata(*tensors, q_len=q_len, page_size=page_size)
    expected = decode_metadata_torch(*tensors, q_len, page_size)
    assert all(map(torch.equal, got, expected)) and [x.dtype for x in got] == [x.dtype for x in expected]


@pytest.mark.parametrize("seed", range(8))
def test_prefill_metadata_equals_the_torch_code_to_the_bit(seed: int) -> None:
    args = prefill_metadata_args(random.Random(seed), "cuda")
    assert is_triton("mla_prefill_metadata", *args)
    got = torch.ops.mla_compile.mla_prefill_metadata(*args)
    expected = prefill_metadata_torch(*args)
    assert all(map(torch.equal, got, expected)) and [x.dtype for x in got] == [x.dtype for x in expected]


def test_captured_decode_metadata_serves_other_lengths_at_replay() -> None:
    cached, table, q_lens, q_len, page_size = metadata_args(4, 64, ragged=True, device="cuda")
    cached, q_lens = cached.contiguous(), q_lens.contiguous()
    mla_decode_metadata(cached, table, q_lens, q_len=q_len, page_size=page_size)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = mla_decode_metadata(cached, table, q_lens, q_len=q_len, page_size=page_size)
    for n in range(5):
        cached.copy_(torch.arange(n, n + len(cached)))
        q_lens.fill_(n)
        graph.replay()
        assert all(map(torch.equal, got, decode_metadata_torch(cached, table, q_lens, q_len, page_size)))


# The product that gives a token the same bits in any batch, and the experts.

# groups, k, n
MATMULS = {
    "GLM q_a": (1, 2048, 768),
    "GLM kv_a": (1, 2048, 576),
    "GLM q_b": (1, 768, 5120),
    "GLM w_uk": (20, 192, 512),
    "GLM w_uv": (20, 512, 256),
    "GLM o": (1, 5120, 2048),
    "GLM dense up": (1, 2048, 10240),
    "GLM dense down": (1, 10240, 2048),
    "GLM shared up": (1, 2048, 3072),
    "GLM shared down": (1, 1536, 2048),
    "GLM head": (1, 2048, 154880),
    "V3 q_a": (1, 7168, 1536),
    "V3 kv_a": (1, 7168, 576),
    "V3 q_b": (1, 1536, 24576),
    "V3 w_uk": (128, 128, 512),
    "V3 w_uv": (128, 512, 128),
    "V3 o": (1, 16384, 7168),
    "V3 shared up": (1, 7168, 4096),
    "V3 shared down": (1, 2048, 7168),
    "shipped q_a": (1, 256, 64),
    "shipped q_b": (1, 64, 1280),
    "shipped w_uk": (16, 16, 512),
    "shipped w_uv": (16, 512, 16),
    "shipped o": (1, 256, 256),
    "shipped dense down": (1, 640, 256),
    "shipped head": (1, 256, 3072),
}
ROUTERS = {"GLM": (1, 2048, 64), "V3": (1, 7168, 256), "shipped": (1, 256, 8), "odd": (3, 300, 33)}
TOKENS = (
    *range(1, 20),
    31,
    32,
    33,
    48,
    63,
    64,
    65,
    95,
    96,
    97,
    128,
    129,
    200,
    256,
    257,
    544,
    552,
    700,
    1024,
    1064,
    2088,
    4095,
)


def order_sensitive(
    shape: tuple[int, int, int], dtype: torch.dtype, *, transposed: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to 4096 tokens and weights whose products differ in most elements when they add in another order."""
    groups, k, n = shape
    strides = (k * n if groups > 1 else 0, *((1, k) if transposed else (n, 1)))
    # Private: the inputs of cuBLAS's trial, which are made to show the order.
    x, w = cublas._draw(cublas.Weights(torch.device("cuda", 0), dtype, *shape, strides))
    return x, w.as_strided(shape, (k * n, *strides[1:]))


def bits_are_those_of_all(
    call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, numbers: Iterable[int]
) -> None:
    """The first, the last and some other tokens, alone and shuffled, have the same bits as among all."""
    whole = call(x)
    assert whole.is_contiguous() and whole.isfinite().all()
    for tokens in numbers:
        if tokens > len(x):
            continue
        between = (len(x) - tokens) // 2
        for part in (slice(tokens), slice(-tokens, None), slice(between, between + tokens)):
            assert torch.equal(call(x[part]), whole[part]), (tokens, part)
        some = torch.randperm(len(x), device=x.device)[:tokens]
        assert torch.equal(call(x[some]), whole[some]), tokens


@pytest.mark.parametrize("transposed", [True, False], ids=["n x k", "k x n"])
@pytest.mark.parametrize("name", MATMULS)
def test_bits_of_the_product_do_not_depend_on_other_tokens(name: str, transposed: bool) -> None:
    x, w = order_sensitive(MATMULS[name], torch.bfloat16, transposed=transposed)
    print(f"{name}: {choose('batch_invariant_matmul', (x, w)).chosen.name}")
    bits_are_those_of_all(lambda x: batch_invariant_matmul(x, w), x, TOKENS)
    bits_are_those_of_all(lambda x: matmul_triton(x, w), x, TOKENS)


@pytest.mark.parametrize("name", MATMULS)
def test_bits_of_the_product_in_float16(name: str) -> None:
    x, w = order_sensitive(MATMULS[name], torch.float16)
    bits_are_those_of_all(lambda x: batch_invariant_matmul(x, w), x, TOKENS[::3])
    bits_are_those_of_all(lambda x: matmul_triton(x, w), x, TOKENS[::3])


@pytest.mark.parametrize("name", ROUTERS)
def test_bits_of_float32_products(name: str) -> None:
    groups, k, n = ROUTERS[name]
    x, w = torch.randn(4096, groups, k, device="cuda"), torch.randn(groups, n, k, device="cuda").mT
    assert is_triton("batch_invariant_matmul", x, w)
    bits_are_those_of_all(lambda x: batch_invariant_matmul(x, w), x, TOKENS)
    first = x[:300]
    bits = {split: matmul_triton(first, w, split=split) for split in (False, True)}
    assert torch.equal(bits[False], bits[True]) and torch.equal(bits[True], matmul_triton(x, w)[:300])
    check_matmul(first, w, bits[True])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 2048, 576), (1, 5120, 2048), (4, 192, 512), (2, 1000, 77)], ids=str)
def test_no_tile_changes_a_bit(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    groups, k, n = shape
    if dtype == torch.float32 or k % 8:
        x, w = torch.randn(200, groups, k, device="cuda"), torch.randn(groups, n, k, device="cuda").mT
        x, w = x.to(dtype), w.to(dtype)
    else:
        x, w = order_sensitive(shape, dtype)
        x = x[:200]
    device = device_of(x)
    tiles = {
        matmul_tiles(t, c, dtype, device)
        for t in (1, 20, 40, 100, 5000)
        for c in (64, 2048, 5120, 10240, 200_000)
    }
    assert len(tiles) >= 3
    expected = matmul_triton(x, w)
    for one in tiles:
        assert torch.equal(matmul_triton(x, w, tiles=one), expected), one


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2048, 1344), (768, 5120), (5120, 2048), (256, 80)], ids=str)
def test_no_tile_of_blocks_changes_a_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Few tokens are multiplied by another instruction than many."""
    k, n = shape
    x, w = order_sensitive((1, k, n), dtype)
    x, weight = x[:600, 0], w[0].t()
    whole = blocks.multiply_in_order(x, weight, None)
    check_matmul(x[:, None], w, whole[:, None])
    plans = {many_block_tiles(tokens, n, 4, device_of(x))[0] for tokens in (40, 200, 5000)}
    for tiles, split in itertools.product(plans, (False, True)):
        assert torch.equal(blocks.multiply_in_order(x, weight, None, tiles=tiles, split=split), whole)
    for tokens in (1, 8, 16, 32, 33):
        assert torch.equal(blocks.multiply_in_order(x[-tokens:], weight, None), whole[-tokens:])


@pytest.mark.parametrize("seed", range(40))
def test_drawn_products_of_any_strides(seed: int) -> None:
    draw = random.Random(seed)
    x, w = drawn_matmul(draw, most_tokens=600, most=600, device="cuda")
    check_matmul(x, w, batch_invariant_matmul(x, w))
    bits_are_those_of_all(lambda x: batch_invariant_matmul(x, w), x, (1, 2, 7, 64, 65, 200, 500))
    if x.dtype != torch.float64:
        check_matmul(x, w, matmul_triton(x, w))
    check_matmul(x[:9], w, product_by_row(x[:9], w))
    bits_are_those_of_all(lambda x: product_by_row(x, w), x[:9], (1, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_opcheck_of_the_product(dtype: torch.dtype) -> None:
    for groups in (1, 3):
        x, w = torch.randn(5, groups, 64, device="cuda"), torch.randn(groups, 40, 64, device="cuda").mT
        torch.library.opcheck(batch_invariant_matmul_op, (x.to(dtype), w.to(dtype)))


@pytest.mark.parametrize("name", ["GLM w_uk", "V3 w_uk", "shipped w_uk"])
def test_bits_of_the_product_do_not_depend_on_strides_of_x(name: str) -> None:
    x, w = order_sensitive(MATMULS[name], torch.bfloat16)
    x = x[:600]
    whole = batch_invariant_matmul(x, w)
    for before, after in ((0, 64), (64, 0), (1, 2), (8, 8)):
        wide = torch.full(
            (*x.shape[:2], before + x.shape[2] + after), torch.nan, device="cuda", dtype=x.dtype
        )
        strided = wide[..., before : before + x.shape[2]].copy_(x)
        assert torch.equal(batch_invariant_matmul(strided, w), whole)
        assert torch.equal(matmul_triton(strided, w), matmul_triton(x, w))


@pytest.mark.parametrize("name", ["GLM o", "GLM q_b", "GLM w_uv", "shipped o"])
def test_bits_of_captured_products_are_those_of_eager_ones(name: str) -> None:
    x, w = order_sensitive(MATMULS[name], torch.bfloat16)
    whole = batch_invariant_matmul(x, w)
    compiled = torch.compile(batch_invariant_matmul, fullgraph=True, dynamic=True)
    for tokens in (1, 3, 64, 200):
        part = x[-tokens:].clone()
        assert torch.equal(compiled(part, w), whole[-tokens:])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = batch_invariant_matmul_op(part, w)
        part.copy_(x[:tokens])
        graph.replay()
        assert torch.equal(out, whole[:tokens])


def test_compiling_tries_a_shape_and_recording_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "_same_bits", {})  # private: asking by the public call would be a trial
    x, w = torch.randn(8, 2, 1032, device="cuda").half(), torch.randn(2, 264, 1032, device="cuda").half().mT
    matmul_triton(x, w)
    state = torch.cuda.get_rng_state()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert is_triton("batch_invariant_matmul", x, w)
        batch_invariant_matmul_op(x, w)
    assert not cublas._same_bits
    torch.compile(batch_invariant_matmul, backend="aot_eager", fullgraph=True)(x, w)
    assert list(cublas._same_bits) == [cublas.weights_of(x, w)]
    assert torch.equal(torch.cuda.get_rng_state(), state)


def experts_in_any_batch(case: MoeCase) -> torch.Tensor:
    assert is_triton("moe_experts", *case.all_args(), True)
    return moe_experts_op(*case.args(), batch_invariant=True)


@pytest.mark.parametrize(
    ("size", "topk"),
    [
        ({"experts": 64, "hidden": 2048, "intermediate": 1536}, 4),
        ({"experts": 256, "hidden": 512, "intermediate": 264}, 8),
    ],
    ids=["GLM", "256 experts"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_bits_of_experts_do_not_depend_on_other_tokens(
    dtype: torch.dtype, size: dict[str, int], topk: int
) -> None:
    """Around the numbers of pairs at which sorting and other tiles begin, and beside padding."""
    case = moe_case(3000, topk, **size, dtype=dtype, device="cuda")
    whole = experts_in_any_batch(case)
    for tokens in (1, 2, 7, 8, 16, 33, 63, 64, 65, 127, 128, 129, 200, 500, 552, 1100, 2200, 2999):
        for which in (slice(tokens), slice(-tokens, None), torch.randperm(3000, device="cuda")[:tokens]):
            part = replace(
                case, **{name: getattr(case, name)[which] for name in ("x", "topk_weights", "topk_ids")}
            )
            assert torch.equal(experts_in_any_batch(part), whole[which]), tokens
        part = replace(
            part, **{name: getattr(part, name).clone() for name in ("x", "topk_weights", "topk_ids")}
        )
        row_lens, q_len, runs = padding(part, 1, [i % 3 % 2 for i in range(tokens // 2)])
        got = moe_experts_op(*part.args(), row_lens, q_len, batch_invariant=True)
        assert torch.equal(got[runs], whole[which][runs]) and not got[~runs].any(), tokens


def test_experts_by_token_on_the_gpu() -> None:
    for dtype in (torch.float64, torch.float32):
        case = moe_case(9, 2, dtype=dtype, device="cuda")
        row_lens, q_len, runs = padding(case, 2, [2, 0, 1])
        whole = moe_by_token(case.operands(row_lens, q_len))
        check_padded_moe(case, whole, runs)
        last = case.operands()._replace(
            x=case.x[-3:], topk_weights=case.topk_weights[-3:], topk_ids=case.topk_ids[-3:]
        )
        assert torch.equal(moe_by_token(last), whole[-3:])


@pytest.mark.parametrize(
    ("n_first", "n_second", "k"), [(768, 576, 2048), (1536, 576, 7168), (10240, 10240, 2048)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_joined_product_is_two_products(dtype: torch.dtype, n_first: int, n_second: int, k: int) -> None:
    both = torch.randn(n_first + n_second, k, device="cuda", dtype=dtype)
    first, second = both.split([n_first, n_second])
    for tokens in (1, 2, 7, 64, 300, 2048):
        x = torch.randn(tokens, k, device="cuda", dtype=dtype) / k**0.5
        expected = torch.cat([x.double() @ w.double().T for w in (first, second)], dim=1)
        for other in (second, second.clone()):
            out = fused_linear(x, first, other).double()
            torch.testing.assert_close(out, expected, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("columns", "k"), [(5120, 768), (2048, 5120), (154880, 2048), (2048, 10240), (7, 41)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_product_of_few_tokens(dtype: torch.dtype, columns: int, k: int) -> None:
    weight = torch.randn(columns, k, device="cuda", dtype=dtype)
    for tokens in (1, 2, 3, 16, 17, 64):
        x = torch.randn(tokens, k + 8, device="cuda", dtype=dtype)[:, 8:] / k**0.5
        few, some = tokens <= 2 and k < 8192, 2 < tokens <= 16 and columns <= 8192
        name = "triton" if few else "blocks" if some else "reference"
        name = "reference" if dtype == torch.float32 else name
        assert choose("fused_linear", (x, weight, None, False)).chosen.name == name
        expected = (x.double() @ weight.double().T).float()
        torch.testing.assert_close(fused_linear(x, weight).float(), expected, atol=2e-2, rtol=1e-2)


def by_head(tokens: int, heads: int, dtype: torch.dtype, of: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights as in the models: parts of `kv_b_proj`, w_uv transposed."""
    kv_b = torch.randn(heads, 448, 512, device="cuda", dtype=dtype)
    w = kv_b[:, :192] if of == "w_uk" else kv_b[:, 192:].mT
    return torch.randn(tokens, heads, w.shape[1], device="cuda", dtype=dtype) / w.shape[1] ** 0.5, w


@pytest.mark.parametrize("heads", [1, 20, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("of", ["w_uk", "w_uv"])
def test_a_product_by_head(dtype: torch.dtype, heads: int, of: str) -> None:
    for tokens in (0, 1, 2, 4, 33, 300):
        x, w = by_head(tokens, heads, dtype, of)
        name = "triton" if tokens <= 2 and heads <= 64 else "tiles"
        name = name if 1 <= tokens <= 32 and (tokens > 2 or heads <= 64) else "cublas"
        assert choose("matmul_by_head", (x, w)).chosen.name == name
        expected = torch.einsum("thk,hkn->thn", x.double(), w.double())
        torch.testing.assert_close(matmul_by_head(x, w).double(), expected, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("heads", [1, 20, 128])
@pytest.mark.parametrize("of", ["w_uk", "w_uv"])
def test_a_product_by_head_copies_nothing(heads: int, of: str) -> None:
    for tokens in (0, 1, 2, 4, 33, 300):
        x, w = by_head(tokens, heads, torch.bfloat16, of)
        matmul_by_head(x, w)
        with torch.profiler.profile() as profile:
            matmul_by_head(x, w)
        names = [
            event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        # cuBLAS may add up parts of a product in a second one.
        assert not any("copy" in name or "elementwise" in name for name in names), names


@pytest.mark.parametrize("fused", [False, True])
def test_products_and_norms_that_start_early_wait_for_each_other(fused: bool) -> None:
    """In a graph each kernel starts while the one before runs; results are those of separate launches."""
    hidden, layers = 2048, 20
    weights = [torch.randn(hidden, hidden, device="cuda", dtype=torch.bfloat16) * 0.03 for _ in range(layers)]
    scale = torch.rand(hidden, device="cuda", dtype=torch.bfloat16)

    def chain(x: torch.Tensor, *, alone: bool) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x
        for weight in weights:
            if fused:
                x, residual = norm_linear(x, residual, scale, 1e-6, weight)
            else:
                x, residual = fused_add_rms_norm(x, residual, scale, 1e-6)
                if alone:
                    torch.cuda.synchronize()
                x = fused_linear(x, weight)
            if alone:
                torch.cuda.synchronize()
        return x, residual

    x = torch.randn(1, hidden, device="cuda", dtype=torch.bfloat16)
    chain(x, alone=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x, alone=False)
    for seed in range(50):
        x.copy_(torch.randn(1, hidden, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)))
        graph.replay()
        assert all(map(torch.equal, out, chain(x.clone(), alone=True)))


@pytest.mark.parametrize(("name", "hidden"), [("glm", 2048), ("v3", 7168), ("v2", 5120), ("odd", 100)])
def test_a_norm_in_the_launch_of_the_routers_scores(name: str, hidden: int) -> None:
    for tokens in (1, 8, 32, 33):
        for dtype in (torch.bfloat16, torch.float32):
            check_after_norm(norm_router, router_args(name, tokens, hidden, dtype, "cuda"))


@pytest.mark.parametrize("k", [768, 2048, 5120])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_norm_in_the_launch_of_its_product(dtype: torch.dtype, k: int) -> None:
    for tokens in (1, 2, 8):
        check_norm_linear(norm_linear, dtype, tokens, k, "cuda")


@pytest.mark.parametrize(("n_first", "n_second", "k"), [(768, 576, 2048), (1536, 1536, 2048)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_joined_product_has_the_bits_of_each(
    dtype: torch.dtype, n_first: int, n_second: int, k: int
) -> None:
    first, second = torch.randn(n_first + n_second, k, device="cuda").to(dtype).split([n_first, n_second])
    x = torch.randn(TOKENS[-1], k, device="cuda").to(dtype)
    expected = torch.cat(
        [batch_invariant_matmul(x[:, None], w.T[None]).squeeze(1) for w in (first, second)], dim=1
    )
    for tokens in TOKENS:
        for other in (second, second.clone()):
            out = fused_linear(x[:tokens], first, other, batch_invariant=True)
            assert torch.equal(out, expected[:tokens]), tokens
