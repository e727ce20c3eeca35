"""The table of decode backends: which backend serves a call, and the reasons why others do not."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mla_compile import MLABatch, MLAError, mla_attention, mla_decode
from mla_compile.ops import dispatch
from mla_compile.ops.attention import decode_backends
from mla_compile.ops.attention.decode_backends import (
    DECODE_BACKENDS,
    MANY_QUERIES,
    MANY_QUERIES_OF_ROW,
    QUERIES,
    DecodeBackend,
    QueryLenSupport,
    decode_call,
    of_any_size,
    select_backend,
)
from mla_compile.ops.dispatch import Call
from tests.cases import make_case
from tests.kernel_cases import BACKENDS, check_decode, decode_case

FLASHINFER, FLASH_MLA, GLUON, GLUON_INVARIANT, TRITON, TRITON_INVARIANT, REFERENCE, BY_TOKEN = DECODE_BACKENDS

GLM = Call(
    device_type="cuda",
    capability=(9, 0),
    captured=True,
    facts={
        "dtype": torch.bfloat16,
        "heads": 20,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "page_size": 64,
        QUERIES: "few",
    },
)
"""The verify step of few rows of GLM-4.7-Flash on a Hopper GPU."""
MANY = {QUERIES: "many"}
HOST_WORK = "needs the host in every step, so it serves by name only, without CUDA graphs"
BATCH_DEPENDENT = "is not batch-invariant: a token's bits depend on the rest of the batch"


def glm(**changes: Any) -> Call:
    """GLM's call with other facts, or on another device."""
    facts = {name: changes.pop(name) for name in list(changes) if name in GLM.facts}
    return replace(GLM, facts={**GLM.facts, **facts}, **changes)


def serving(call: Call) -> str:
    """The backends that serve a call, as errors list them."""
    return ", ".join(backend.name for backend in DECODE_BACKENDS if backend.why_not(call) is None)


def limited(backend: DecodeBackend, **limits: range) -> DecodeBackend:
    return replace(backend, constraints={**backend.constraints, **limits})


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Private, as a package counts as installed only if this machine has it.
    monkeypatch.setattr(dispatch, "_installed", lambda package: True)
    monkeypatch.setattr(dispatch, "_import_error", lambda function: None)
    select_backend.cache_clear()
    yield
    select_backend.cache_clear()


@pytest.mark.parametrize(
    ("backend", "changed", "reason"),
    [
        (TRITON, {}, None),
        (TRITON, {"device_type": "cpu", "capability": None}, "runs on cuda, not cpu"),
        (TRITON, {"device_type": "hip", "capability": None}, "runs on cuda, not hip"),
        (TRITON, {"capability": (7, 5)}, "runs on SM 80 and newer, not SM 75"),
        (TRITON, {"dtype": torch.float64}, "supports dtype float16, bfloat16, float32, not float64"),
        (
            TRITON,
            {"kv_lora_rank": 1024},
            "supports kv_lora_rank of 16..512 by 16, not 1024",
        ),
        (FLASHINFER, {}, HOST_WORK),
        (FLASHINFER, {"captured": False}, None),
        (
            FLASHINFER,
            {"kv_lora_rank": 256, "qk_rope_head_dim": 32},
            "supports kv_lora_rank of 512, not 256",
        ),
        (FLASHINFER, {"dtype": torch.float32}, "supports dtype float16, bfloat16, not float32"),
        (FLASH_MLA, MANY, None),
        (FLASH_MLA, {}, "supports queries many, not few"),
        (FLASH_MLA, {**MANY, "dtype": torch.float32}, "supports dtype float16, bfloat16, not float32"),
        (FLASH_MLA, {**MANY, "page_size": 16}, "supports page_size of 64, not 16"),
        (FLASH_MLA, {**MANY, "kv_lora_rank": 256}, "supports kv_lora_rank of 512, not 256"),
        (FLASH_MLA, {**MANY, "qk_rope_head_dim": 32}, "supports qk_rope_head_dim of 64, not 32"),
        (FLASH_MLA, {**MANY, "capability": (10, 0)}, "runs on SM 90, not SM 100"),
        (FLASH_MLA, {**MANY, "batch_invariant": True}, BATCH_DEPENDENT),
        (REFERENCE, {"device_type": "xpu", "capability": None, "kv_lora_rank": 7}, None),
        (limited(TRITON, heads=range(8, 129, 8)), {}, "supports heads of 8..128 by 8, not 20"),
        (limited(TRITON, page_size=range(64, 65)), {"page_size": 16}, "supports page_size of 64, not 16"),
        (GLUON, {}, None),
        (GLUON, {"capability": (10, 0)}, "runs on SM 90, not SM 100"),
        (GLUON, {"batch_invariant": True}, BATCH_DEPENDENT),
        (GLUON_INVARIANT, {"batch_invariant": True}, None),
        (TRITON_INVARIANT, {"batch_invariant": True}, None),
        (BY_TOKEN, {"batch_invariant": True, "dtype": torch.float64}, None),
    ],
)
def test_a_reason_names_what_a_backend_supports_and_what_came(
    backend: DecodeBackend, changed: dict, reason: str | None
) -> None:
    assert backend.why_not(glm(**changed)) == reason


def test_a_missing_package_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_installed", lambda package: package != "triton")
    assert TRITON.why_not(GLM) == "needs the Python package triton, which is not installed"


def test_what_is_not_known_of_a_call_is_no_reason() -> None:
    for backend in DECODE_BACKENDS:
        (device, *_) = backend.device_types or ("cuda",)
        assert backend.why_not(Call(device)) is None


def test_the_fastest_backend_that_serves_is_chosen_and_says_why_the_others_were_not() -> None:
    *rejected, chosen = select_backend(GLM).explain().splitlines()
    assert f"flashinfer: {HOST_WORK}" in rejected
    assert "flash_mla: supports queries many, not few" in rejected
    assert chosen == "gluon: chosen (loading and computing warps, for Hopper)"
    assert select_backend(glm(**MANY)).chosen is select_backend(of_any_size(GLM)).chosen is FLASH_MLA
    assert select_backend(glm(**MANY, page_size=16)).chosen is GLUON
    assert select_backend(glm(**MANY, batch_invariant=True)).chosen is GLUON_INVARIANT
    assert select_backend(glm(capability=(10, 0))).chosen is TRITON
    assert select_backend(glm(kv_lora_rank=256, qk_rope_head_dim=32)).chosen is TRITON
    assert select_backend(glm(dtype=torch.float64)).chosen is REFERENCE


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("dtype", REFERENCE.constraints["dtype"], ids=str)
def test_some_backend_serves_every_call_and_may_be_captured(
    capability: tuple[int, int], dtype: torch.dtype
) -> None:
    for call in (
        glm(capability=capability, dtype=dtype),
        glm(device_type="cpu", capability=None, kv_lora_rank=30, qk_rope_head_dim=6, dtype=dtype),
    ):
        for asked in (call, replace(call, batch_invariant=True)):
            chosen = select_backend(asked).chosen
            assert chosen.capturable and chosen.why_not(asked) is None
            assert chosen.batch_invariant == asked.batch_invariant


@pytest.mark.parametrize("dtype", REFERENCE.constraints["dtype"], ids=str)
@pytest.mark.parametrize("rank", [512, 40])
@pytest.mark.parametrize("device", [("cuda", (9, 0)), ("cuda", (7, 5)), ("cpu", None)], ids=str)
def test_batch_invariant_kernels_serve_where_the_others_do_and_plain_torch_all_else(
    device: tuple[str, Any], rank: int, dtype: torch.dtype
) -> None:
    call = glm(device_type=device[0], capability=device[1], kv_lora_rank=rank, dtype=dtype)
    twins = ((GLUON, GLUON_INVARIANT), (TRITON, TRITON_INVARIANT), (REFERENCE, BY_TOKEN))
    expected = next(invariant for backend, invariant in twins if backend.why_not(call) is None)
    assert select_backend(replace(call, batch_invariant=True)).chosen is expected


def test_a_backend_that_is_asked_for_by_name_serves_or_is_refused_with_those_that_do() -> None:
    assert select_backend(GLM, "reference").chosen is REFERENCE
    wide, exact = glm(kv_lora_rank=1024), replace(GLM, batch_invariant=True)
    with pytest.raises(MLAError, match=rf"^backend: .*\({serving(wide)}\).*triton.*kv_lora_rank.*512.*1024"):
        select_backend(wide, "triton")
    with pytest.raises(MLAError, match=rf"^backend: .*{', '.join(BACKENDS)}.*None.*'fast'"):
        select_backend(GLM, "fast")
    assert select_backend(GLM, "triton_invariant").chosen is TRITON_INVARIANT, "asked for by name alone"
    with pytest.raises(MLAError, match=rf"^backend: .*\({serving(exact)}\).*gluon.* bits"):
        select_backend(exact, "gluon")


@pytest.mark.parametrize(("heads", "q_len"), [(16, 4), (20, 4), (128, 1)])
def test_the_number_of_queries_limits_the_automatic_choice_alone(heads: int, q_len: int) -> None:
    def known(rows: int, q_len: int) -> object:
        case = decode_case([0] * rows, q_len=q_len, heads=heads, rank=8, rope=4)
        return decode_call(case.operands(), captured=True).facts[QUERIES]

    least = -(-MANY_QUERIES // (heads * q_len))
    assert [known(least - 1, q_len), known(least, q_len)] == ["few", "many"]
    assert known(4 * least, 1) == ("many" if heads >= MANY_QUERIES_OF_ROW else "few"), "few queries a row"
    assert select_backend(GLM, "flash_mla").chosen is FLASH_MLA, "asked for by name"
    for refused, reason in (
        (glm(page_size=16), "page_size of 64, not 16"),
        (glm(dtype=torch.float32), "dtype float16, bfloat16, not float32"),
        (glm(kv_lora_rank=256), "kv_lora_rank of 512, not 256"),
        (glm(batch_invariant=True), BATCH_DEPENDENT),
    ):
        with pytest.raises(MLAError, match=rf"^backend: .*flash_mla, which .*{reason}"):
            select_backend(refused, "flash_mla")


def is_flattened(backend: DecodeBackend, q_len: int, heads: int = 20, *, has_q_lens: bool = False) -> bool:
    q_lens = [1, 1] if has_q_lens else None
    operands = decode_case([5, 3], q_len=q_len, q_lens=q_lens, heads=heads).operands()
    fitting = backend.fitting(operands)
    assert fitting.q_len * len(fitting.seq_lens) == 2 * q_len
    return fitting is not operands


@pytest.mark.parametrize(
    ("support", "q_len", "has_q_lens", "flattened"),
    [
        ("SINGLE_ONLY", 1, False, False),
        ("SINGLE_ONLY", 1, True, True),  # q_lens may be 0
        ("SINGLE_ONLY", 4, False, True),
        ("UNIFORM", 4, False, False),
        ("UNIFORM", 4, True, True),
        ("VARLEN", 4, True, False),
    ],
)
def test_query_tokens_become_rows_where_a_backend_cannot_take_them_as_they_are(
    support: str, q_len: int, has_q_lens: bool, flattened: bool
) -> None:
    backend = replace(REFERENCE, query_len_support=QueryLenSupport[support])
    assert is_flattened(backend, q_len, has_q_lens=has_q_lens) == flattened


@pytest.mark.parametrize(("heads", "flattened"), [(16, False), (20, True), (40, True), (128, False)])
def test_flashinfer_gets_one_token_a_row_where_its_causal_mask_is_wrong(heads: int, flattened: bool) -> None:
    assert is_flattened(FLASHINFER, 4, heads) == flattened
    assert not is_flattened(FLASHINFER, 1, heads)


def test_names_are_unique_and_functions_exist() -> None:
    assert len({backend.name for backend in DECODE_BACKENDS}) == len(DECODE_BACKENDS)
    for backend in DECODE_BACKENDS:
        if "triton" not in backend.packages:  # their modules import triton
            assert callable(backend.load())


def test_decode_takes_a_backend_by_name() -> None:
    case = decode_case([5, 0, 17], q_len=2, q_lens=[2, 0, 1])
    *tensors, q_lens, q_len, scale = case.args()
    for backend in (None, "reference"):
        got = mla_decode(*tensors, q_len=q_len, q_lens=q_lens, softmax_scale=scale, backend=backend)
        check_decode(case, got)
    with pytest.raises(
        MLAError,
        match=r"^backend: .*reference.*triton.*cuda.*cpu",
    ):
        mla_decode(*tensors, q_len=q_len, q_lens=q_lens, softmax_scale=scale, backend="triton")


def test_a_backend_that_may_not_be_captured_serves_eager_calls_and_compiled_ones_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        decode_backends, "DECODE_BACKENDS", (replace(REFERENCE, name="planned", capturable=False), REFERENCE)
    )
    case = decode_case([5, 0, 17])
    *tensors, _, q_len, scale = case.args()
    settings = {"q_len": q_len, "softmax_scale": scale, "backend": "planned"}
    check_decode(case, mla_decode(*tensors, **settings))
    check_decode(case, torch.compile(mla_decode, backend="eager", fullgraph=True)(*tensors, **settings))


def test_no_rows_need_no_backend() -> None:
    case = decode_case([5])
    out, lse = mla_decode(
        case.q_latent[:0],
        case.q_pe[:0],
        case.kv_cache,
        case.block_table[:0],
        case.seq_lens[:0],
        q_len=1,
        softmax_scale=1.0,
    )
    assert (out.shape, lse.shape) == ((0, 4, 32), (0, 4))


def test_attention_refuses_a_segments_backend_before_it_touches_the_cache() -> None:
    case = make_case([3, 6], poison=False)
    before = case.kv_cache.clone()
    with pytest.raises(MLAError, match=r"^backend: .*triton.*cuda.*cpu"):
        mla_attention(*case.args()[:7], MLABatch(decode=replace(case.batch.decode, backend="triton")), 0.2)
    assert torch.equal(case.kv_cache, before)
    chosen = MLABatch(decode=replace(case.batch.decode, backend="reference"))
    expected = mla_attention(*case.args()[:7], case.batch, 0.2)
    assert torch.equal(mla_attention(*case.args()[:7], chosen, 0.2), expected)


def test_a_call_reads_no_value_and_leaves_symbolic_sizes_out() -> None:
    case = decode_case([5, 3], q_len=2)
    tensors, names = case.operands(), ("q_latent", "q_pe", "kv_cache")
    meta = tensors._replace(**{name: getattr(tensors, name).to("meta") for name in names})
    call = decode_call(meta, captured=False)
    assert call.device_type == "meta"
    sizes = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "page_size": 16, QUERIES: "few"}
    dtypes = {"dtype": torch.float32, "kv_cache.dtype": torch.float32}
    assert call.facts == {**dtypes, **sizes}
    symbols = FakeTensorMode(shape_env=ShapeEnv())
    symbolic = {name: symbols.from_tensor(getattr(tensors, name), static_shapes=False) for name in names}
    call = decode_call(tensors._replace(**symbolic), captured=True)
    assert call.facts == dtypes
    assert select_backend(call).chosen is REFERENCE
