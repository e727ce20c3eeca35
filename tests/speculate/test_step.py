"""The speculative step, eagerly, on a tiny random model in float64."""

import copy
import itertools

import pytest
import torch

from benchmarks.start import start
from mla_compile import MLAError
from mla_compile.caches import allocate
from mla_compile.models import MLAForCausalLM
from mla_compile.ops.library import implementations
from mla_compile.speculate import DecodeState, SamplingParams, SpeculativeDecoder
from mla_compile.speculate.state import FIRST_TOKEN
from tests.engine.engines import engine
from tests.host_sync import HostSyncError, NoHostSync
from tests.models_for_tests import VOCAB, poison_caches, tiny_model
from tests.speculate.from_scratch import PAGE, FromScratch, sampler

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11, 12, 13]]


GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def model() -> MLAForCausalLM:
    return tiny_model()


@pytest.fixture(scope="module")
def oracle(model: MLAForCausalLM) -> FromScratch:
    return FromScratch(copy.deepcopy(model))


class Started:
    """Prompts after prefill: an engine's state, open to a test's fingers."""

    def __init__(
        self, model: MLAForCausalLM, k: int, *, max_new_tokens: int = 40, sampling: SamplingParams = GREEDY
    ) -> None:
        self.engine = engine(k, model)
        each = [sampling] * len(PROMPTS)
        self.step, self.state = start(self.engine, PROMPTS, max_new_tokens, each, [])
        self.texts = [[*p, t] for p, t in zip(PROMPTS, self.state.last_token.tolist(), strict=True)]

    def propose(self, continuations: list[list[int]], accept: list[int]) -> None:
        """Drafts with exactly `accept[row]` tokens that the target will accept."""
        for row, count in enumerate(accept):
            done = len(self.texts[row]) - len(PROMPTS[row])
            true = continuations[row][done : done + self.engine.config.num_speculative_tokens]
            wrong = [(t + 1) % VOCAB for t in true[count:]]
            self.state.drafts[row] = torch.tensor(true[:count] + wrong)

    def run(self) -> list[list[int]]:
        self.step(self.state)
        emitted = [row[FIRST_TOKEN : FIRST_TOKEN + row[0]] for row in self.state.report.tolist()]
        for text, tokens in zip(self.texts, emitted, strict=True):
            text += tokens
        return emitted


@pytest.fixture(scope="module")
def continuations(oracle: FromScratch) -> list[list[int]]:
    return [oracle.continuation(prompt, 40) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(temperature=1.0, seed=1)], ids=["greedy", "sampled"]
)
def test_the_tiny_models_tokens_depend_on_its_attention(
    sampling: SamplingParams,
) -> None:
    """Else equal tokens would prove nothing about caches."""
    blind = tiny_model()
    mine = engine(0, blind)
    expected = mine.generate(PROMPTS, max_new_tokens=40, sampling=sampling)
    for layer in blind.layers:
        layer.self_attn.o_proj.weight.zero_()
    got = mine.generate(PROMPTS, max_new_tokens=40, sampling=sampling)
    pairs = [
        pair
        for x, y in zip(expected, got, strict=True)
        for pair in zip(x.token_ids, y.token_ids, strict=True)
    ]
    assert sum(x == y for x, y in pairs) < len(pairs) / 4


@pytest.mark.long
@pytest.mark.parametrize("k", range(6))
def test_greedy_tokens_are_those_of_a_forward_from_scratch_per_token(
    model: MLAForCausalLM, continuations: list[list[int]], k: int
) -> None:
    out = engine(k, model).generate(PROMPTS, max_new_tokens=40)
    assert [c.token_ids for c in out] == continuations


@pytest.mark.long
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 8, "top_p": 0.9},
        pytest.param({"top_k": 5}, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.7}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sampled_tokens_are_the_same_for_every_number_of_drafts(model: MLAForCausalLM, params: dict) -> None:
    each = ((0.7, 1), (1.5, 2), (0.0, 3), (1.0, 2**62))
    sampling = [SamplingParams(temperature=temperature, seed=seed, **params) for temperature, seed in each]
    outputs = []
    for k in (0, 1, 3, 5):
        out = engine(k, model).generate(PROMPTS, max_new_tokens=30, sampling=sampling)
        outputs.append([completion.token_ids for completion in out])
    assert all(out == outputs[0] for out in outputs)
    assert len({tuple(tokens) for tokens in outputs[0]}) == 4


@pytest.mark.parametrize("k", [1, 2, 3])
def test_drafts_equal_a_run_from_scratch_after_every_acceptance_count(
    model: MLAForCausalLM, oracle: FromScratch, continuations: list[list[int]], k: int
) -> None:
    started = Started(model, k)
    for text, drafts in zip(started.texts, started.state.drafts.tolist(), strict=True):
        assert drafts == oracle.drafts(text, k)
    # Each row sees every count, in an order of its own: a stale latent of one count would spoil a later draft.
    orders = list(itertools.permutations(range(k + 1)))
    plan = [orders[row * 5 % len(orders)] * 2 for row in range(4)]
    for counts in zip(*plan, strict=True):
        started.propose(continuations, list(counts))
        emitted = started.run()
        assert [len(tokens) - 1 for tokens in emitted] == list(counts)
        for text, drafts in zip(started.texts, started.state.drafts.tolist(), strict=True):
            assert drafts == oracle.drafts(text, k), f"after accepting {counts}"


@pytest.mark.parametrize(
    "params", [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 10, "top_p": 0.9}], ids=str
)
def test_sampled_drafts_take_the_noise_of_the_positions_that_they_propose_for(
    model: MLAForCausalLM, oracle: FromScratch, params: dict
) -> None:
    sampling = SamplingParams(seed=11, **params)
    started = Started(model, 3, sampling=sampling)
    for _ in range(4):
        for text, drafts in zip(started.texts, started.state.drafts.tolist(), strict=True):
            assert drafts == oracle.drafts(text, 3, sampler(sampling))
        started.run()


def test_rejecting_2_0_1_3_of_3_drafts_samples_the_drafter_at_1_3_2_0(
    model: MLAForCausalLM,
    oracle: FromScratch,
    continuations: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = Started(model, 3)
    started.propose(continuations, [1, 3, 2, 0])
    calls = []
    forward_mtp = model.forward_mtp

    def spy(tokens, hidden, positions, batch):
        calls.append((batch.decode.q_len, tokens.numel()))
        return forward_mtp(tokens, hidden, positions, batch)

    monkeypatch.setattr(model, "forward_mtp", spy)
    before = started.state.num_cached.tolist()
    started.run()
    assert calls == [(4, 16), (1, 4), (1, 4)]
    assert [n - b - 1 for n, b in zip(started.state.num_cached.tolist(), before, strict=True)] == [1, 3, 2, 0]
    monkeypatch.undo()
    for text, drafts in zip(started.texts, started.state.drafts.tolist(), strict=True):
        assert drafts == oracle.drafts(text, 3)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_stop_token_inside_accepted_drafts_cuts_exactly_there(
    model: MLAForCausalLM, continuations: list[list[int]], place: int
) -> None:
    started = Started(model, 3)
    row = 0
    stop = continuations[row][1 + place]
    assert stop not in continuations[row][1 : 1 + place], "this row's text must not have it earlier"
    started.state.stop_ids[row] = stop
    started.propose(continuations, [3, 3, 3, 3])
    emitted = started.run()
    assert emitted[row] == continuations[row][1 : 2 + place]
    assert started.state.active.tolist()[row] is False
    assert started.run()[row] == []


@pytest.mark.parametrize("max_new_tokens", range(1, 9))
def test_the_length_limit_inside_accepted_drafts_cuts_exactly_there(
    model: MLAForCausalLM, continuations: list[list[int]], max_new_tokens: int
) -> None:
    started = Started(model, 3, max_new_tokens=max_new_tokens)
    while started.state.active.any():
        started.propose([c + [0] * 8 for c in continuations], [3, 3, 3, 3])
        started.run()
    for prompt, text, expected in zip(PROMPTS, started.texts, continuations, strict=True):
        assert text[len(prompt) :] == expected[:max_new_tokens]


def caches(model: MLAForCausalLM) -> list[torch.Tensor]:
    return [b for name, b in model.named_buffers() if name.endswith("kv_cache")]


def test_nothing_is_written_outside_a_rows_own_positions(
    model: MLAForCausalLM, continuations: list[list[int]]
) -> None:
    started = Started(model, 3, max_new_tokens=6)
    while started.state.active.any():
        started.propose([c + [0] * 8 for c in continuations], [3, 1, 0, 2])
        started.run()
    for cache in caches(model):
        written = cache.view(-1, cache.shape[-1]).isfinite().all(-1)
        for row, prompt in enumerate(PROMPTS):
            table = started.state.block_table[row]
            slots = (table[:, None] * PAGE + torch.arange(PAGE)).view(-1)
            # Neither the last token (position max_len - 1) nor anything after it has a latent.
            assert not written[slots[len(prompt) + 6 - 1 :]].any()
        assert not written[:PAGE].any(), "page 0 belongs to no row"


def test_an_inactive_row_reads_and_writes_nothing_whatever_its_state_holds(model: MLAForCausalLM) -> None:
    started = Started(model, 3)
    started.state.active[1:3] = False
    before = [cache.clone() for cache in caches(model)]
    started.state.num_cached[1:3] = 2**20
    started.state.block_table[1:3] = 2**30
    started.run()
    for cache, old in zip(caches(model), before, strict=True):
        changed = (cache.nan_to_num(7) != old.nan_to_num(7)).any(-1).nonzero()[:, 0].unique().tolist()
        assert set(changed) <= set(started.state.block_table[[0, 3]].flatten().tolist())
    assert started.state.report[1:3, 0].tolist() == [0, 0]
    assert started.state.num_cached[1:3].tolist() == [2**20] * 2


def test_a_padded_bucket_gives_the_tokens_of_the_rows_alone(
    model: MLAForCausalLM, continuations: list[list[int]]
) -> None:
    mine = engine(2, model)
    for rows in (slice(0, 3), slice(1, 2), slice(0, 4)):
        out = mine.generate(PROMPTS[rows], max_new_tokens=20)
        assert [c.token_ids for c in out] == [c[:20] for c in continuations[rows]]


def test_an_all_inactive_bucket_runs_on_a_cache_of_two_pages(model: MLAForCausalLM) -> None:
    allocate(model.cache_specs(), 2, PAGE)
    poison_caches(model)
    state = DecodeState.allocate(8, 3, max_pages=16)
    SpeculativeDecoder(model, 3, page_size=PAGE)(state)
    assert not state.report[:, 0].any()
    assert all(cache.isnan().all() for cache in caches(model))


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_step_never_waits_for_the_device(k: int, sampled: bool) -> None:
    """On meta tensors, which take every branch of a device's tensors and have no values to read."""
    model = tiny_model().to("meta")
    allocate(model.cache_specs(), 9, PAGE)
    state = DecodeState.allocate(4, k, max_pages=2, device="meta")
    step = SpeculativeDecoder(model, k, page_size=PAGE, sampled=sampled)
    with NoHostSync():
        step(state)


def test_the_host_sync_check_sees_reads_boolean_indexing_and_copies() -> None:
    x = torch.arange(3)
    reads = (
        lambda: int(x[0]),
        lambda: x.nonzero(),
        lambda: x[x > 1],
        lambda: bool(x.any()),
        lambda: x.to("meta"),
    )
    for read in reads:
        with pytest.raises(HostSyncError), NoHostSync():
            read()


def test_the_ops_implementations_never_wait_for_the_device() -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    cache, slots, ids = meta(9, PAGE, 24), meta(8, dtype=torch.int64), meta(8, 2, dtype=torch.int64)
    table, lens = meta(2, 4, dtype=torch.int32), meta(2, dtype=torch.int32)
    with NoHostSync():
        implementations["mla_append"](meta(8, 16), meta(8, 8), cache, slots)
        out, lse = implementations["mla_decode"](
            meta(8, 3, 16), meta(8, 3, 8), cache, table, lens, lens, 4, 0.1
        )
        metadata = implementations["mla_decode_metadata"](lens, table, lens, 4, PAGE)
        experts = implementations["moe_experts"](
            meta(8, 16), meta(8, 2), ids, meta(4, 24, 16), meta(4, 16, 12)
        )
    assert (out.shape, lse.shape, experts.shape) == ((8, 3, 16), (8, 3), (8, 16))
    assert [x.shape for x in metadata] == [(2,), (2,), (8,), (8,)]


def test_a_negative_number_of_drafts_is_refused(model: MLAForCausalLM) -> None:
    with pytest.raises(MLAError, match="num_speculative_tokens"):
        SpeculativeDecoder(model, -1, page_size=PAGE)
