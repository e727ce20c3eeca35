"""Op contracts (schema, fake, mutation) and the errors that bad input gets."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from mla_compile import (
    MLABatch,
    MLAError,
    decode_segment,
    mla_append,
    mla_attention,
    mla_decode,
    mla_prefill,
    prefill_segment,
)
from mla_compile.ops.attention.metadata import mla_decode_metadata, mla_prefill_metadata
from tests.cases import Case, make_case, relative_error
from tests.kernel_cases import metadata_args, prefill_metadata_args
from tests.reference import mla_attention_reference

ops = torch.ops.mla_compile


def attention_args(case: Case) -> tuple:
    d, p = case.batch.decode, case.batch.prefill
    decode = (d.seq_lens, d.block_table, d.slot_mapping, d.q_lens) if d else (None,) * 4
    prefill = (p.cu_seqlens_q, p.slot_mapping, p.key_slots, p.cu_seqlens_k) if p else (None,) * 4
    return (
        *case.args()[:7],
        *decode,
        *prefill,
        d.q_len if d else 1,
        case.batch.page_size,
        case.softmax_scale,
    )


def decode_kwargs(case: Case) -> dict:
    d = case.batch.decode
    tokens, heads = case.q_nope.shape[:2]
    return {
        "q_latent": torch.randn(tokens, heads, case.w_uk.shape[2]),
        "q_pe": case.q_pe,
        "kv_cache": case.kv_cache,
        "block_table": d.block_table,
        "seq_lens": d.seq_lens,
        "q_len": d.q_len,
        "softmax_scale": 0.2,
        "q_lens": d.q_lens,
    }


def prefill_kwargs(case: Case) -> dict:
    p = case.batch.prefill
    return {
        "q": torch.cat([case.q_nope, case.q_pe], dim=-1),
        "kv_cache": case.kv_cache,
        "w_uk": case.w_uk,
        "w_uv": case.w_uv,
        "cu_seqlens_q": p.cu_seqlens_q,
        "cu_seqlens_k": p.cu_seqlens_k,
        "key_slots": p.key_slots,
        "softmax_scale": 0.2,
    }


def append_kwargs(case: Case) -> dict:
    slots = case.batch.decode.slot_mapping
    return {"kv_c": case.kv_c, "k_pe": case.k_pe, "kv_cache": case.kv_cache, "slot_mapping": slots}


DECODE = {"decode": [3, 6], "q_len": 2, "q_lens": [2, 1], "poison": False}
PREFILL = {"prefill": [(3, 0), (2, 5)], "poison": False}


@pytest.mark.parametrize(
    "shape", [DECODE, PREFILL, {**DECODE, **PREFILL}], ids=["decode", "prefill", "mixed"]
)
def test_the_unified_op_keeps_its_contract(shape: dict) -> None:
    opcheck(ops.mla_attention.default, attention_args(make_case(**shape)))


def test_append_keeps_its_contract() -> None:
    opcheck(ops.mla_append.default, tuple(append_kwargs(make_case(**DECODE)).values()))


def test_decode_keeps_its_contract() -> None:
    kwargs = decode_kwargs(make_case(**DECODE))
    order = ("q_latent", "q_pe", "kv_cache", "block_table", "seq_lens", "q_lens", "q_len", "softmax_scale")
    opcheck(ops.mla_decode.default, (*(kwargs[name] for name in order), "reference"))


def test_prefill_keeps_its_contract() -> None:
    args = tuple(prefill_kwargs(make_case(**PREFILL)).values())
    opcheck(ops.mla_prefill.default, args)
    opcheck(ops.mla_prefill.default, (*args, torch.randn(2, args[0].shape[1], args[3].shape[2])))


@pytest.mark.parametrize("ragged", [False, True], ids=["all", "ragged"])
def test_decode_metadata_keeps_its_contract(ragged: bool) -> None:
    opcheck(ops.mla_decode_metadata.default, metadata_args(3, 4, ragged=ragged))


@pytest.mark.parametrize("seed", range(3))
def test_prefill_metadata_keeps_its_contract(seed: int) -> None:
    opcheck(ops.mla_prefill_metadata.default, prefill_metadata_args(random.Random(seed)))


def test_append_with_no_valid_slot_leaves_the_cache_alone() -> None:
    case = make_case([3, 6])
    before = case.kv_cache.clone()
    mla_append(case.kv_c, case.k_pe, case.kv_cache, torch.full((2,), -1))
    torch.testing.assert_close(case.kv_cache, before, rtol=0, atol=0, equal_nan=True)


Change = Callable[[dict], dict]


def changed(name: str, change: Callable) -> Change:
    return lambda kwargs: {**kwargs, name: change(kwargs[name])}


def with_padding_beyond(key_slots: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(key_slots, (0, 2), value=10_000)


def strided(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, dim=1)[:, ::2]


BAD_APPEND = {
    "kv_c of rank 3": ("kv_c", changed("kv_c", lambda x: x[None])),
    "an integer kv_c": ("kv_c", changed("kv_c", lambda x: x.long())),
    "k_pe of another dtype": ("k_pe", changed("k_pe", lambda x: x.double())),
    "k_pe of fewer tokens": ("k_pe", changed("k_pe", lambda x: x[:-1])),
    "a cache of another width": ("kv_cache", changed("kv_cache", lambda x: x[..., :-1].contiguous())),
    "a strided cache": ("kv_cache", changed("kv_cache", strided)),
    "a cache without pages": ("kv_cache", changed("kv_cache", lambda x: x[:0])),
    "a page size of 0": ("kv_cache", changed("kv_cache", lambda x: x[:, :0])),
    "int32 slots": ("slot_mapping", changed("slot_mapping", lambda x: x.int())),
    "too few slots": ("slot_mapping", changed("slot_mapping", lambda x: x[:-1])),
    "a slot past the cache": ("slot_mapping", changed("slot_mapping", lambda x: x + 10_000)),
    "a slot below -1": ("slot_mapping", changed("slot_mapping", lambda x: x - 10_000)),
    "something that is no tensor": ("kv_c", changed("kv_c", lambda x: x.tolist())),
    "slots on another device": ("slot_mapping", changed("slot_mapping", lambda x: x.to("meta"))),
}
BAD_DECODE = {
    "heads that differ": ("q_pe", changed("q_pe", lambda x: x[:, :-1])),
    "tokens that differ": ("q_pe", changed("q_pe", lambda x: x[:-1])),
    "a cache of another dtype": ("kv_cache", changed("kv_cache", lambda x: x.double())),
    "a cache of rank 2": ("kv_cache", changed("kv_cache", lambda x: x.flatten(0, 1))),
    "a strided cache": ("kv_cache", changed("kv_cache", strided)),
    "q_len 0": ("q_len", changed("q_len", lambda _: 0)),
    "q_len None": ("q_len", changed("q_len", lambda _: None)),
    "a q_len that is no int": ("q_len", changed("q_len", lambda _: 1.5)),
    "q_len that does not divide the tokens": ("q_len", changed("q_len", lambda _: 3)),
    "int64 seq_lens": ("seq_lens", changed("seq_lens", lambda x: x.long())),
    "seq_lens of rank 2": ("seq_lens", changed("seq_lens", lambda x: x[None])),
    "negative seq_lens": ("seq_lens", changed("seq_lens", lambda x: -x)),
    "a block table too short for seq_lens": ("seq_lens", changed("seq_lens", lambda x: x + 100)),
    "a block table of other rows": ("block_table", changed("block_table", lambda x: x[:-1])),
    "an int64 block table": ("block_table", changed("block_table", lambda x: x.long())),
    "a block table without columns": ("block_table", changed("block_table", lambda x: x[:, :0])),
    "a page that the cache does not have": ("block_table", changed("block_table", lambda x: x + 10_000)),
    "q_lens of other rows": ("q_lens", changed("q_lens", lambda x: x[:-1])),
    "q_lens above q_len": ("q_lens", changed("q_lens", lambda x: x + 5)),
    "negative q_lens": ("q_lens", changed("q_lens", lambda x: x - 5)),
    "int64 q_lens": ("q_lens", changed("q_lens", lambda x: x.long())),
}
BAD_METADATA = {
    "q_len 0": ("q_len", changed("q_len", lambda _: 0)),
    "a page size of 0": ("page_size", changed("page_size", lambda _: 0)),
    "num_cached of rank 2": ("num_cached", changed("num_cached", lambda x: x[None])),
    "a float num_cached": ("num_cached", changed("num_cached", lambda x: x.float())),
    "a list": ("num_cached", changed("num_cached", lambda x: x.tolist())),
    "an int64 block table": ("block_table", changed("block_table", lambda x: x.long())),
    "a block table of other rows": ("block_table", changed("block_table", lambda x: x[:-1])),
    "a block table without columns": ("block_table", changed("block_table", lambda x: x[:, :0])),
    "a block table on another device": ("block_table", changed("block_table", lambda x: x.to("meta"))),
    "q_lens of other rows": ("q_lens", changed("q_lens", lambda x: x[:-1])),
    "int64 q_lens": ("q_lens", changed("q_lens", lambda x: x.long())),
}
BAD_PREFILL = {
    "w_uk of other heads": ("w_uk", changed("w_uk", lambda x: x[:-1])),
    "w_uk of another nope width": ("q", changed("w_uk", lambda x: x[:, :-1])),
    "w_uv of another latent width": ("w_uv", changed("w_uv", lambda x: x[:, :-1])),
    "q without its rotated part": ("q", changed("q", lambda x: x[..., :-1])),
    "q of other heads": ("w_uk", changed("q", lambda x: x[:, :-1])),
    "cu_seqlens_q without the first 0": ("cu_seqlens_q", changed("cu_seqlens_q", lambda x: x + 1)),
    "cu_seqlens_q of more tokens": ("cu_seqlens_q", changed("cu_seqlens_q", lambda x: x * 2)),
    "cu_seqlens_k of other rows": ("cu_seqlens_k", changed("cu_seqlens_k", lambda x: x[:, 1:])),
    "cu_seqlens_k of more keys": ("cu_seqlens_k", changed("cu_seqlens_k", lambda x: x * 2)),
    "cu_seqlens_k that fall": ("cu_seqlens_k", changed("cu_seqlens_k", lambda x: x.flip(1) - x[:, -1:])),
    "int64 cu_seqlens_k": ("cu_seqlens_k", changed("cu_seqlens_k", lambda x: x.long())),
    "a strided cache": ("kv_cache", changed("kv_cache", strided)),
    "a part without slots": ("cu_seqlens_k", changed("key_slots", lambda x: x[:, :0])),
    "a key without a slot": ("key_slots", changed("key_slots", lambda x: -torch.ones_like(x))),
    "a page size of no cache": ("kv_cache", changed("kv_cache", lambda x: x[:, :0])),
    "key_slots of other parts": ("key_slots", changed("key_slots", lambda x: x.repeat(2, 1))),
    "int32 key_slots": ("key_slots", changed("key_slots", lambda x: x.int())),
    "a slot that the cache does not have": ("key_slots", changed("key_slots", lambda x: x + 10_000)),
    "a slot of padding that the cache does not have": (
        "key_slots",
        changed("key_slots", with_padding_beyond),
    ),
    "key_slots on another device": ("key_slots", changed("key_slots", lambda x: x.to("meta"))),
}


def named(table: dict) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "change"), table.values(), ids=table.keys())


def refuse(op: Callable, kwargs: dict, name: str) -> None:
    cache = kwargs["kv_cache"].clone()
    with pytest.raises(MLAError, match=f"^{name}: expected .+, got "):
        op(**kwargs)
    assert torch.equal(cache, kwargs["kv_cache"])


@named(BAD_APPEND)
def test_append_refuses(name: str, change: Change) -> None:
    refuse(mla_append, change(append_kwargs(make_case(**DECODE))), name)


@named(BAD_DECODE)
def test_decode_refuses(name: str, change: Change) -> None:
    refuse(mla_decode, change(decode_kwargs(make_case(**DECODE))), name)


@named(BAD_PREFILL)
def test_prefill_refuses(name: str, change: Change) -> None:
    refuse(mla_prefill, change(prefill_kwargs(make_case(**PREFILL))), name)


def test_attention_refuses_a_batch_of_other_tokens() -> None:
    case = make_case(**DECODE)
    for batch, message in (
        (MLABatch(decode=replace(case.batch.decode, q_len=4)), r"^batch\.decode\.q_len: "),
        (make_case([3, 6, 2], q_len=2).batch, "^(batch|q_nope)"),
        (MLABatch(decode=replace(case.batch.decode, seq_lens=case.batch.decode.seq_lens + 99)), "seq_lens"),
    ):
        with pytest.raises(MLAError, match=message):
            mla_attention(*case.args()[:7], batch, 0.2)


def test_compiled_code_on_the_cpu_refuses_rows_that_the_block_table_cannot_hold() -> None:
    case = make_case(**DECODE)
    compiled = torch.compile(mla_attention, backend="aot_eager", fullgraph=True)
    long = replace(case.batch.decode, seq_lens=case.batch.decode.seq_lens + 90)
    with pytest.raises(MLAError, match=r"seq_lens: .*\b8\b"):
        compiled(*case.args()[:7], MLABatch(decode=long), 0.2)


def with_entry(table: torch.Tensor, place: tuple[int, int], page: int) -> torch.Tensor:
    table = table.clone()
    table[place] = page
    return table


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_batch_that_fits_no_longer_is_refused_or_harms_no_other_row(draw: random.Random) -> None:
    """One number of a good batch is changed: a page size, a page, a slot, a length."""
    decode = [draw.randint(0, 9) for _ in range(draw.randint(0, 3))]
    prefill = [(draw.randint(1, 6), draw.randint(0, 6)) for _ in range(draw.randint(0 if decode else 1, 2))]
    case = make_case(decode, prefill, q_len=draw.randint(1, 3), seed=draw.randint(0, 99), poison=False)
    kinds = [name for name in ("decode", "prefill") if getattr(case.batch, name) is not None]
    kind = draw.choice(kinds)
    segment = getattr(case.batch, kind)
    rows, columns = segment.block_table.shape
    num_pages = case.kv_cache.shape[0]
    row, token = draw.randrange(rows), draw.randrange(len(segment.slot_mapping))
    what = draw.choice(["page_size", "page", "zeros", "slot", "length"])
    if what == "page_size":
        wrong = replace(segment, page_size=draw.choice([1, 2, 3, 5, 8, 16]))
    elif what == "page":
        place = (row, draw.randrange(columns))
        wrong = replace(
            segment, block_table=with_entry(segment.block_table, place, draw.randint(-1, num_pages))
        )
    elif what == "zeros":
        wrong = replace(segment, block_table=torch.zeros_like(segment.block_table))
    elif what == "slot":
        slots = segment.slot_mapping.clone()
        slots[token] = draw.randint(-1, 4 * num_pages)
        wrong = replace(segment, slot_mapping=slots)
    else:
        lens = segment.seq_lens.clone()
        lens[row] += draw.choice([-1, 1, 4])
        wrong = replace(segment, seq_lens=lens)
    before, of_the_good_batch = case.kv_cache.clone(), mla_attention_reference(*case.clone().args())
    try:
        case.batch = MLABatch(**{name: getattr(case.batch, name) for name in kinds} | {kind: wrong})
        expected = mla_attention_reference(*case.clone().args())
        out = mla_attention(*case.args())
    except (MLAError, IndexError):  # the definition checks nothing
        with pytest.raises(MLAError):
            mla_attention(*case.args()[:7], MLABatch(**{**vars(case.batch), kind: wrong}), 0.2)
        assert torch.equal(case.kv_cache, before)
        return
    if (kind, what) == ("prefill", "page"):
        expected = of_the_good_batch  # their keys are read by `key_slots`, which has not changed
    assert relative_error(out, expected) < 1e-5
    changed = {int(page) for page in (case.kv_cache != before).any(2).any(1).nonzero()}
    for name in kinds:
        part = getattr(case.batch, name)
        for table, length in zip(part.block_table.tolist(), part.seq_lens.tolist()):
            changed -= set(table[: -(-length // 4)])
    assert not changed, "a page of no row was written to"


def test_a_wrong_page_size_is_refused_while_compiling_too() -> None:
    torch.compiler.reset()
    case = make_case(**DECODE)
    wrong = MLABatch(decode=replace(case.batch.decode, page_size=8))
    with pytest.raises(MLAError, match=r"batch\.page_size: .*kv_cache.*\b4\b.*\b8\b.*; "):
        mla_attention(*case.args()[:7], wrong, 0.2)
    compiled = torch.compile(mla_attention, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"batch\.page_size: .*kv_cache.*\b4\b.*\b8\b.*; "):
        compiled(*case.args()[:7], wrong, 0.2)


def test_a_wrong_page_size_is_refused_where_compiled_code_takes_any() -> None:
    """A cache that is an argument: after two page sizes Dynamo makes the size a symbol."""
    torch.compiler.reset()
    compiled = torch.compile(mla_attention, backend="eager", fullgraph=True)
    for page_size in (4, 8, 4, 2):
        case = make_case(**DECODE, page_size=page_size)
        torch.testing.assert_close(compiled(*case.args()), mla_attention(*case.clone().args()))
    for built, cached in ((4, 8), (8, 4), (2, 8)):
        case = make_case(**DECODE, page_size=cached)
        wrong = MLABatch(decode=replace(case.batch.decode, page_size=built))
        with pytest.raises(Exception, match=rf"batch\.page_size: .*kv_cache.*\b{cached}\b.*\b{built}\b"):
            compiled(*case.args()[:7], wrong, 0.2)


def test_something_that_is_no_batch_is_refused() -> None:
    with pytest.raises(MLAError, match=r"^batch: .*MLABatch.*NoneType"):
        mla_attention(*make_case(**DECODE).args()[:7], None, 0.2)


@named(BAD_METADATA)
@pytest.mark.parametrize("build", [mla_decode_metadata, decode_segment], ids=["op", "segment"])
def test_decode_metadata_that_cannot_be_is_refused(build: Callable, name: str, change: Change) -> None:
    num_cached, block_table, q_lens, q_len, page_size = metadata_args(3, 4, ragged=True)
    kwargs = {"num_cached": num_cached, "block_table": block_table, "q_lens": q_lens}
    with pytest.raises(MLAError, match=f"^{name}: expected .+, got "):
        build(**change({**kwargs, "q_len": q_len, "page_size": page_size}))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("page_size", {"page_size": 0}),
        ("lens", {"lens": torch.zeros(3, 2, dtype=torch.int64), "bounds": torch.zeros(3, 2).long()}),
        ("bounds", {"bounds": torch.zeros(3, 2, dtype=torch.int64)}),
        ("bounds", {"bounds": torch.zeros(2, 3, dtype=torch.int64)}),
        ("lens", {"lens": torch.zeros(2, 2, dtype=torch.int32)}),
        ("block_table", {"block_table": torch.zeros(2, 3)}),
    ],
)
def test_prefill_metadata_that_cannot_be_is_refused(name: str, change: dict[str, Any]) -> None:
    tensors = {
        "lens": torch.zeros(2, 2, dtype=torch.int64),
        "bounds": torch.zeros(2, 2, dtype=torch.int64),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
    }
    with pytest.raises(MLAError, match=f"^{name}: expected .+, got "):
        mla_prefill_metadata(**{**tensors, "tokens": 4, "keys": 4, "page_size": 4, **change})


def test_decode_segments_that_cannot_be_are_refused_while_compiling_too() -> None:
    compiled = torch.compile(decode_segment, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"block_table: .*\b2\b.*num_cached.*\[3, 2\]"):
        compiled(torch.zeros(2).int(), torch.zeros(3, 2).int(), q_len=1, page_size=4)


@pytest.mark.parametrize("q_lens", [None, [3, 1, 0]], ids=["all", "ragged"])
def test_a_decode_segment_is_that_of_its_definition(q_lens: list[int] | None) -> None:
    cached, table = [2, 6, 5], [[4, 7], [1, 9], [3, 2]]
    valid = None if q_lens is None else torch.tensor(q_lens).int()
    segment, positions = decode_segment(
        torch.tensor(cached).int(), torch.tensor(table).int(), q_len=3, page_size=4, q_lens=valid
    )
    lens, slots = [], []
    for held, pages, n in zip(cached, table, q_lens or [3] * 3):
        lens.append(held + n if n else 0)
        slots += [
            pages[position // 4] * 4 + position % 4 if j < n and position < 8 else -1
            for j, position in enumerate(range(held, held + 3))
        ]
    assert positions.tolist() == [held + j for held in cached for j in range(3)]
    assert (segment.seq_lens.tolist(), segment.slot_mapping.tolist()) == (lens, slots)
    assert (None if segment.q_lens is None else segment.q_lens.tolist()) == q_lens


def test_a_wrong_shape_is_refused_while_compiling_too() -> None:
    torch.compiler.reset()  # sizes that other tests have varied are symbols, which no check may compare
    case = make_case(**DECODE)
    compiled = torch.compile(mla_attention, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"w_uk: .*\b3\b.*heads of q_nope"):
        compiled(*case.args()[:5], case.w_uk[:-1], case.w_uv, case.batch, 0.2)


@pytest.mark.parametrize(
    ("lens", "cached", "message"),
    [
        ([3], [0, 0], r"^chunk_lens: .*\b2\b.*\b1\b"),
        ([0, 3], [0, 0], r"^chunk_lens\[0\]: .*\b0\b"),
        ([3, 3], [0, 99], r"^row 1: .*\b8\b.*\b99\b"),
    ],
)
def test_prefill_segments_that_cannot_be_are_refused(
    lens: list[int], cached: list[int], message: str
) -> None:
    with pytest.raises(MLAError, match=message):
        prefill_segment(lens, cached, torch.zeros(2, 2, dtype=torch.int32), page_size=4)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_call_that_would_need_a_backward_is_refused(compiled: bool) -> None:
    case = make_case(**DECODE)
    attend = torch.compile(mla_attention, backend="eager", fullgraph=True) if compiled else mla_attention
    args = (*case.args()[:5], case.w_uk.requires_grad_(), case.w_uv, case.batch, 0.2)
    with pytest.raises(Exception, match=r"w_uk.+torch\.no_grad"):
        attend(*args)
    with torch.no_grad():
        assert not attend(*args).requires_grad
