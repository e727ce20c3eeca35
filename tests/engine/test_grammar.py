"""Completions that follow a grammar: with drafts as without, and beside rows that are free."""

import json
import random
import re
import sys
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mla_compile import Grammar, MLAError, SamplingParams, generate, load_tokenizer
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.engine import Completion
from mla_compile.engine.grammar import GrammarRow, allowed_tokens
from mla_compile.engine.reports import Logprob, RowReport
from mla_compile.speculate import DecodeState
from mla_compile.speculate.drafter import MtpDrafter, Verified
from tests.engine.engines import engine, finish
from tests.models_for_tests import VOCAB, one_layer_model
from tests.speculate.defined_sampling import defined_token
from tests.speculate.from_scratch import FromScratch

pytest.importorskip("llguidance")

EOS = 0
# Ids 36 to 39 of the tiny model's vocabulary have no token, as in a checkpoint with padded embeddings.
# Every text of the grammars below can be encoded: llguidance encodes what a grammar forces.
TOKENS = ["</s>", *'abcdtrue{}":,-0123456789=!', "ab", "cd", '{"', '":', '",', "bcd", "12", "true", '"a']
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14]]
SAMPLED = [
    SamplingParams(temperature=0.9, top_k=k, top_p=0.9, seed=seed) for k, seed in ((0, 1), (5, 2), (0, 3))
]
MIXED = [SAMPLED[0], SamplingParams(), SAMPLED[2]]
WITH_LOGPROBS = [
    SamplingParams(
        temperature=0.9, seed=1, min_p=0.02, frequency_penalty=0.6, repetition_penalty=1.4, logprobs=2
    ),
    SamplingParams(
        repetition_penalty=1.8, presence_penalty=-0.7, min_tokens=12, logit_bias={EOS: 9, 1: 2}, logprobs=0
    ),
    SamplingParams(temperature=1.3, seed=3, top_k=12, top_p=0.9, frequency_penalty=1.5, logprobs=7),
]


def tokenizer(tokens: Sequence[str] = TOKENS, eos: str | None = "</s>") -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, **({"eos_token": eos} if eos else {}))


SMALL = tokenizer()
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"enum": ["abcd", "cab"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
REGEX = r"(ab|cd){3,9}!"
EBNF = 'start: pair ("," pair)~1..3\npair: WORD "=" ("true" | /[0-9]{1,3}/)\nWORD: /[a-d]{1,4}/'


def follows(kind: str, text: str) -> bool:
    if kind == "regex":
        return re.fullmatch(REGEX, text) is not None
    if kind == "ebnf":
        return re.fullmatch(r"([a-d]{1,4}=(true|[0-9]{1,3}),?)+", text) is not None
    value = json.loads(text)
    return value.keys() == {"a", "b"} and 0 <= value["a"] <= 999 and value["b"] in ("abcd", "cab")


@cache
def grammar(kind: str) -> Grammar:
    if kind == "regex":
        return Grammar.from_regex(REGEX, SMALL)
    if kind == "ebnf":
        return Grammar.from_ebnf(EBNF, SMALL)
    if kind == "dead":  # `z` is no token, so a text that gets there cannot go on
        return Grammar.from_regex("cd(abz|bcdz)|dz", SMALL)
    return Grammar.from_json_schema(SCHEMA, SMALL)


KINDS = ["json_schema", "regex", "ebnf"]
FREE = [None, None, None]


def run(
    k: int,
    grammars: Sequence[Grammar | None] | Grammar | None,
    sampling: Sequence[SamplingParams] | SamplingParams | None = None,
    prompts: Sequence[list[int]] = PROMPTS,
    *,
    dtype: torch.dtype = torch.float64,
    max_new_tokens: int = 40,
    **settings: object,
) -> list[Completion]:
    return engine(k, one_layer_model(dtype), **settings).generate(
        prompts, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=[EOS], grammars=grammars
    )


def plain(
    grammars: Sequence[Grammar | None],
    sampling: Sequence[SamplingParams] | None,
    prompts: Sequence[list[int]] = PROMPTS,
) -> list[Completion]:
    """`run` without drafts, once for all tests that compare others with it."""
    key = tuple(grammars), repr((sampling, prompts))
    if key not in _PLAIN:
        _PLAIN[key] = run(0, grammars, sampling, prompts)
    return _PLAIN[key]


_PLAIN: dict[object, list[Completion]] = {}


def ids(completions: Sequence[Completion]) -> list[list[int]]:
    return [c.token_ids for c in completions]


def text_of(completion: Completion) -> str:
    """Its text; a completion that ended must have a stop id, and only at its end."""
    assert completion.finish_reason == "stop"
    assert completion.token_ids.index(EOS) == len(completion.token_ids) - 1
    return "".join(TOKENS[token] for token in completion.token_ids[:-1])


def guess(
    monkeypatch: pytest.MonkeyPatch, known: list[list[int]], prompts: list[list[int]], *, wrong: int
) -> None:
    """Draft what is known to come and ids that no one knows after it; every `wrong`-th draft another token.

    Rows move: a row is known by the length that it ends at, 40 tokens beyond its prompt.
    """

    def draft(self: MtpDrafter, state: DecodeState, verified: Verified) -> torch.Tensor:
        drafts = torch.full((len(verified.count), verified.k), VOCAB - 1)
        texts = {len(prompt) + 40: (text, prompt) for text, prompt in zip(known, prompts)}
        for row, max_len in enumerate(state.max_len.tolist()):
            text, prompt = texts.get(max_len, ([], []))
            start = max(0, int(verified.num_cached[row]) + 1 - len(prompt))
            for j, token in enumerate(text[start : start + verified.k]):
                drafts[row, j] = (token + 1) % VOCAB if (start + j) % wrong == 0 else token
        return drafts

    monkeypatch.setattr(MtpDrafter, "draft", draft)


@pytest.mark.parametrize(
    "sampling",
    [
        None,
        pytest.param(SAMPLED, marks=pytest.mark.slow),
        pytest.param(MIXED, marks=pytest.mark.slow),
        WITH_LOGPROBS,
    ],
    ids=["greedy", "sampled", "mixed", "penalised"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_text_follows_the_grammar_and_drafts_change_no_token(
    kind: str, sampling: Sequence[SamplingParams] | None
) -> None:
    one = grammar(kind)
    expected = plain([one] * 3, sampling)
    assert all(follows(kind, text_of(completion)) for completion in expected)
    for k in (1, 3):
        assert ids(run(k, one, sampling)) == ids(expected)


@pytest.mark.parametrize("sampling", [MIXED, WITH_LOGPROBS], ids=["mixed", "penalised"])
@pytest.mark.parametrize("wrong", [3, 4, 1000])
@pytest.mark.parametrize(
    "k", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)]
)
def test_drafts_that_are_accepted_change_no_token_either(
    k: int, wrong: int, sampling: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny model's own drafts are poor ones."""
    grammars = [grammar("json_schema"), None, grammar("ebnf")]
    expected = plain(grammars, sampling)
    guess(monkeypatch, ids(expected), PROMPTS, wrong=wrong)
    drafted = run(k, grammars, sampling)
    assert ids(drafted) == ids(expected)
    assert [c.finish_reason for c in drafted] == [c.finish_reason for c in expected]
    if wrong == 1000:
        assert all(c.num_steps <= -(-len(c.token_ids) // (k + 1)) for c in drafted)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_tokens_and_logprobs_are_those_of_the_definitions_from_scratch(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalised, then ruled out, then filtered and sampled, one token at a time; logprobs are of the raw logits."""
    grammars = [grammar("json_schema"), grammar("regex"), None]
    guess(monkeypatch, ids(plain(grammars, WITH_LOGPROBS)), PROMPTS, wrong=4)
    scratch = FromScratch(one_layer_model())
    for prompt, one, params, completion in zip(
        PROMPTS, grammars, WITH_LOGPROBS, run(k, grammars, WITH_LOGPROBS)
    ):
        emitted: list[int] = []
        for token, place in zip(completion.token_ids, completion.logprobs, strict=True):
            text = prompt + emitted
            logits = scratch.model.logits(scratch.trunk(text)[-1])
            allowed = None if one is None else allowed_after(one, emitted)
            assert token == defined_token(logits, len(text), prompt, emitted, params, allowed, [EOS])
            raw = logits.double().log_softmax(-1)
            likely = raw.argsort(descending=True).tolist()
            assert list(place) == list(dict.fromkeys([token, *likely[: params.logprobs]]))
            for i, entry in place.items():
                assert entry.logprob == pytest.approx(float(raw[i]), abs=1e-5)
                assert entry.rank == likely.index(i) + 1
            emitted.append(token)


@pytest.mark.parametrize("k", [0, 3])
def test_a_stop_id_waits_only_where_the_grammar_lets_the_text_go_on(k: int) -> None:
    waits = SamplingParams(min_tokens=20, logit_bias={EOS: 100})
    free = run(k, Grammar.from_regex("[ab]*", SMALL), waits)
    assert [len(text_of(completion)) >= 20 and len(completion.token_ids) for completion in free] == [21] * 3
    for completion in run(k, Grammar.from_regex("abc|d", SMALL), waits):
        assert text_of(completion) in ("abc", "d")
    for completion in run(k, grammar("dead"), waits):
        assert completion.finish_reason == "error"
        assert "".join(TOKENS[token] for token in completion.token_ids) in ("cdab", "cdbcd", "d")


def test_min_p_and_penalties_change_what_a_grammars_row_says() -> None:
    one = grammar("regex")
    greedy = ids(plain([one] * 3, None))
    assert ids(run(0, one, SamplingParams(frequency_penalty=2))) != greedy
    warm = SamplingParams(temperature=2, seed=5)
    assert ids(run(0, one, warm)) != greedy
    assert ids(run(0, one, SamplingParams(temperature=2, seed=5, min_p=1))) == greedy


@pytest.mark.long
@pytest.mark.usefixtures("unlowered")
@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [("ngram", None), pytest.param("mtp", WITH_LOGPROBS, marks=pytest.mark.slow)],
    ids=["ngram-greedy", "mtp-penalised"],
)
def test_compiled_halves_of_a_step_give_the_tokens_and_logprobs_of_eager_ones(
    drafter: str, sampling: list[SamplingParams] | None
) -> None:
    grammars = [grammar("json_schema"), None, grammar("ebnf")]
    eager = run(0, grammars, sampling, dtype=torch.float32)
    compiled = run(2, grammars, sampling, dtype=torch.float32, drafter=drafter, compile=True)
    assert ids(compiled) == ids(eager)
    for mine, expected in zip(compiled, eager):
        assert (mine.logprobs is None) == (expected.logprobs is None)
        for place, other in zip(mine.logprobs or [], expected.logprobs or [], strict=True):
            assert list(place) == list(other)
            assert all(place[i].logprob == pytest.approx(other[i].logprob, abs=1e-4) for i in place)


@pytest.mark.long
@pytest.mark.parametrize(
    "sampling",
    [pytest.param(None, marks=pytest.mark.slow), pytest.param(MIXED, marks=pytest.mark.slow), WITH_LOGPROBS],
    ids=["greedy", "mixed", "penalised"],
)
@pytest.mark.parametrize("k", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_rows_are_the_same_wherever_they_stand_and_whoever_is_beside_them(
    k: int, sampling: list[SamplingParams] | None
) -> None:
    sampling = sampling or [SamplingParams()] * 3
    free = ids(run(k, None, sampling))
    one = grammar("json_schema")
    bound = ids(run(k, one, sampling))
    assert free != bound
    for mask in (2, 5):
        grammars = [one if mask >> row & 1 else None for row in range(3)]
        expected = [bound[row] if grammars[row] else free[row] for row in range(3)]
        assert ids(run(k, grammars, sampling)) == expected
        reversed_ = ids(run(k, grammars[::-1], sampling[::-1], PROMPTS[::-1]))
        assert reversed_[::-1] == expected
        in_waves = ids(run(k, grammars, sampling, max_rows=2))
        assert in_waves == expected


@pytest.mark.parametrize("pages", [17, pytest.param(65, marks=pytest.mark.slow)])
@pytest.mark.parametrize("gap", [0, 1, 3])
@pytest.mark.parametrize("k", [0, pytest.param(1, marks=pytest.mark.slow), 3])
def test_grammars_hold_in_mixed_steps_for_requests_that_arrive_and_are_preempted(
    k: int, gap: int, pages: int
) -> None:
    """Drafts are masked by the tokens that their own row has emitted, whatever stands before them in the step."""
    grammars = [grammar("json_schema"), None, grammar("ebnf"), grammar("regex")]
    prompts, sampling = [*PROMPTS, [1] * 20], [*WITH_LOGPROBS, SAMPLED[0]]
    expected = [plain([one], [params], [p])[0] for one, params, p in zip(grammars, sampling, prompts)]
    mine = engine(k, num_pages=pages, max_tokens_per_step=4 * (1 + k) + 3)
    generations = []
    for prompt, params, one in zip(prompts, sampling, grammars):
        generations.append(mine.add(prompt, params, max_new_tokens=40, stop_ids=[EOS], grammar=one))
        for _ in range(gap):
            mine.step()
    finish(mine)
    got = [generation.completion for generation in generations]
    assert ids(got) == ids(expected)
    assert [c.finish_reason for c in got] == [c.finish_reason for c in expected]
    assert mine.stats.num_mixed_steps > 0
    assert (mine.stats.num_preemptions > 0) == (pages == 17)


def test_rows_of_different_grammars_and_tokenizers_share_a_batch() -> None:
    # Here the end-of-sequence id is another; the row must say the engine's stop id all the same.
    other = tokenizer([*TOKENS, "<end>"], "<end>")
    grammars = [grammar("ebnf"), Grammar.from_regex(REGEX, other), grammar("json_schema")]
    out = run(3, grammars, MIXED)
    assert ids(out)[0] == ids(run(0, grammars[0], MIXED[0], PROMPTS[:1]))[0]
    assert follows("ebnf", text_of(out[0])) and follows("json_schema", text_of(out[2]))
    assert follows("regex", text_of(out[1])) and len(TOKENS) not in out[1].token_ids


@pytest.mark.long
@pytest.mark.parametrize("sampling", [None, MIXED], ids=["greedy", "mixed"])
def test_a_tokenizer_may_have_far_fewer_ids_than_the_model(sampling: list[SamplingParams] | None) -> None:
    """Checkpoints pad their embeddings, by more than the 32 ids of a mask's word too."""
    few = tokenizer(TOKENS[: TOKENS.index("ab")])
    assert -(-len(few) // 32) < -(-VOCAB // 32), "a mask of fewer words"
    grammars = [grammar("ebnf"), Grammar.from_regex(REGEX, few), None]
    out = run(3, grammars, sampling)
    assert follows("ebnf", text_of(out[0])) and follows("regex", text_of(out[1]))
    assert max(out[1].token_ids) < len(few)
    assert ids(out) == ids(run(0, grammars, sampling))


@pytest.mark.parametrize("k", [0, 3])
def test_a_grammar_of_one_text_forces_it(k: int) -> None:
    text = '{"a":12}'
    for completion in run(k, Grammar.from_regex(re.escape(text), SMALL), MIXED):
        assert text_of(completion) == text


@pytest.mark.long
@pytest.mark.parametrize("k", [0, 3])
def test_a_grammar_of_nothing_but_the_empty_text_leaves_the_stop_id(k: int) -> None:
    nothing = Grammar.from_regex("", SMALL)
    free = ids(run(k, None, MIXED))
    out = run(k, [None, nothing, None], MIXED)
    assert ids(out) == [free[0], [EOS], free[2]]
    assert out[1].finish_reason == "stop" and out[1].num_steps == 0


@pytest.mark.parametrize("k", [0, 3])
def test_a_text_that_is_cut_short_is_the_beginning_of_one(k: int) -> None:
    whole = plain([grammar("json_schema")] * 3, None)
    cut = run(k, grammar("json_schema"), max_new_tokens=5)
    assert ids(cut) == [tokens[:5] for tokens in ids(whole)]
    assert {c.finish_reason for c in cut} == {"length"}


@pytest.mark.long
def test_a_slow_grammar_changes_nobodys_tokens() -> None:
    slow = Grammar.from_ebnf(
        "start: x*\nx: /((a|b|c|d)*[ab](a|b|c|d){0,12}){0,40}/ | y\ny: x x | /[a-d]+/", SMALL
    )
    free = ids(run(3, None, MIXED))
    out = run(3, [None, slow, None], MIXED)
    assert [ids(out)[0], ids(out)[2]] == [free[0], free[2]]
    assert ids(out) == ids(run(0, [None, slow, None], MIXED))


@pytest.mark.parametrize("seed", range(6))
def test_the_mask_of_every_position_follows_from_the_rows_own_drafts(seed: int) -> None:
    """Against a matcher that reads each row's text and drafts from the start, with drafts of every kind."""
    rng = torch.Generator().manual_seed(seed)
    grammars = [grammar("json_schema"), None, grammar("regex"), grammar("ebnf"), grammar("json_schema")]
    rows, k = len(grammars), 4
    completions = [Completion() for _ in grammars]
    masks = Masks(grammars, completions)
    for _ in range(12):
        drafts = torch.randint(0, VOCAB, (rows, k), generator=rng)
        for row, one in enumerate(grammars):
            if one is not None and completions[row].finish_reason is None:
                drafts[row] = likely_drafts(one, completions[row].token_ids, drafts[row], rng)
        logits = torch.randn(rows, k + 1, VOCAB, generator=rng)
        tokens = logits.masked_fill(~masks.allowed(drafts), -torch.inf).argmax(dim=2)
        for row, one in enumerate(grammars):
            if completions[row].finish_reason is None:
                emit(completions[row], one, logits[row], drafts[row].tolist(), tokens[row].tolist())
    assert any(c.finish_reason for c in completions)


class Masks:
    """Of a batch whose row i has grammar i, if any."""

    def __init__(self, grammars: Sequence[Grammar | None], completions: Sequence[Completion]) -> None:
        self.completions = completions
        self.rows = {
            i: GrammarRow(one, completions[i], [EOS], f"grammars[{i}]")
            for i, one in enumerate(grammars)
            if one is not None
        }

    def allowed(self, drafts: torch.Tensor, first: Sequence[int] = ()) -> torch.Tensor:
        rows = {i: row for i, row in self.rows.items() if self.completions[i].finish_reason is None}
        return allowed_tokens(rows, drafts, vocab_size=VOCAB, first=first)

    def settle(self, report: RowReport) -> RowReport:
        return self.rows[0].settle(report)


def allowed_after(one: Grammar, text: Sequence[int]) -> list[int]:
    matcher = one.matcher(text)
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    return [token for token in range(len(TOKENS)) if bits >> token & 1]


def likely_drafts(one: Grammar, text: list[int], drafts: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """The first drafts such that the grammar takes them, some number of them; the rest as they were."""
    number = int(torch.randint(0, len(drafts) + 1, (), generator=rng))
    for j in range(number):
        allowed = allowed_after(one, [*text, *drafts[:j].tolist()])
        drafts[j] = allowed[int(torch.randint(0, len(allowed), (), generator=rng))]
        if drafts[j] == EOS:
            break
    return drafts


def emit(
    completion: Completion, one: Grammar | None, logits: torch.Tensor, drafts: list[int], tokens: list[int]
) -> None:
    """What a step would emit of a row's tokens; each is the largest of those that its grammar allows there."""
    for j, token in enumerate(tokens):
        scores = logits[j]
        if one is not None:
            scores = torch.full_like(scores, -torch.inf)
            allowed = allowed_after(one, completion.token_ids)
            scores[allowed] = logits[j, allowed]
        assert token == scores.argmax()
        completion.token_ids.append(token)
        if token == EOS:
            completion.finish_reason = "stop"
        if token == EOS or drafts[j : j + 1] != [token]:
            return


def test_a_stop_id_among_refused_drafts_leaves_the_matcher_where_it_was() -> None:
    a, b, c, d = (TOKENS.index(token) for token in "abcd")
    completion = Completion([a])
    masks = Masks([Grammar.from_regex("ab|acd", SMALL)], [completion])
    assert masks.allowed(torch.tensor([[b, EOS, EOS]]))[0, 0, [b, c]].all()
    completion.token_ids.append(c)
    allowed = masks.allowed(torch.tensor([[d, EOS, EOS]]))
    assert [place.nonzero().flatten().tolist() for place in allowed[0, :2]] == [[d], [EOS]]


def test_json_has_one_space_between_its_words_unless_the_schema_says_otherwise() -> None:
    schema = {key: value for key, value in VERSE.items() if key != "x-guidance"}
    styles = {None: (True, False), " {0,2}": (True, True), "": (False, False)}
    for pattern, expected in styles.items():
        options = {} if pattern is None else {"x-guidance": {"whitespace_pattern": pattern}}
        one = Grammar.from_json_schema(schema | options, SHIPPED)
        for spaces, fits in zip((" ", "  "), expected):
            ids = SHIPPED('{"book":' + spaces)["input_ids"]
            assert (one.matcher().try_consume_tokens(ids) == len(ids)) == fits, (pattern, spaces)


def test_the_text_of_the_end_within_a_grammar_does_not_end_it() -> None:
    """llguidance reads that text as the end-of-sequence id."""
    end, completion = SHIPPED.eos_token_id, Completion()
    row = GrammarRow(Grammar.from_regex(r"a<\|endoftext\|>b", SHIPPED), completion, [end], "grammar")
    completion.token_ids += SHIPPED("a")["input_ids"]
    none = torch.zeros(1, 0, dtype=torch.int64)
    allowed = allowed_tokens({0: row}, none, vocab_size=len(SHIPPED))
    assert allowed[0, 0].nonzero().flatten().tolist() == [end]
    settled = row.settle(RowReport([end], False))
    assert settled.tokens == [] and "got one that requires a special token's text" in str(settled.error)


DEAD = "a(cd)*|bz"
"""`z` is no token, so a text that begins with `b` cannot go on."""


def test_a_dead_end_after_a_draft_is_an_error_only_where_the_draft_is_accepted() -> None:
    a, b, c, d = (TOKENS.index(token) for token in "abcd")
    completion = Completion()
    masks = Masks([Grammar.from_regex(DEAD, SMALL)], [completion])
    expected = r"^grammars\[0\]: expected a grammar that can continue here, got one that allows no token"

    allowed = masks.allowed(torch.tensor([[b, c]]))
    assert allowed[0, 0].nonzero().flatten().tolist() == [a, b]
    assert allowed[0, 1].nonzero().flatten().tolist() == [EOS]
    refused, accepted = (
        RowReport([a], True),
        RowReport([b, EOS], False, logprobs=[{b: Logprob(-1, 1)}, {EOS: Logprob(-2, 2)}]),
    )
    assert masks.settle(refused) == refused
    masks.allowed(torch.tensor([[b, c]]))
    settled = masks.settle(accepted)
    assert (settled.tokens, settled.active, settled.logprobs) == ([b], False, accepted.logprobs[:1])
    assert re.match(expected, settled.error)

    assert masks.allowed(torch.tensor([[a, c]]))[0, 1].nonzero().flatten().tolist() == [
        EOS,
        c,
        TOKENS.index("cd"),
    ]
    assert masks.settle(accepted) == accepted, "that was another step's dead end"
    completion.token_ids.append(b)
    masks.allowed(torch.tensor([[c, d]]))
    settled = masks.settle(RowReport([EOS], False))
    assert settled.tokens == [] and re.match(expected, settled.error)


@pytest.mark.parametrize("sampling", [None, WITH_LOGPROBS], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafts", ["own", "known"])
@pytest.mark.parametrize("k", [0, pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_dead_end_ends_its_own_row_alone(
    k: int, drafts: str, sampling: list[SamplingParams] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, one = grammar("dead"), grammar("json_schema")
    others = plain([None, one, one], sampling)
    expected = plain([None, dead, one], sampling)
    if drafts == "known":
        guess(monkeypatch, ids(expected), PROMPTS, wrong=1000)
    out = run(k, [None, dead, one], sampling, max_rows=4 if drafts == "known" else 2)
    for row in (0, 2):
        assert (out[row].token_ids, out[row].error) == (others[row].token_ids, None)
        assert out[row].finish_reason == others[row].finish_reason
    assert (out[1].finish_reason, ids(out)[1]) == ("error", ids(expected)[1])
    assert re.match(
        r"grammars\[1\]: expected a grammar that can continue here, got one that allows no token",
        out[1].error,
    )
    assert "".join(TOKENS[token] for token in out[1].token_ids) in ("cdab", "cdbcd", "d")
    if sampling is not None:
        assert [next(iter(place)) for place in out[1].logprobs] == out[1].token_ids


@pytest.mark.parametrize("k", [0, 3])
def test_a_text_that_is_cut_short_before_a_dead_end_has_no_error(k: int) -> None:
    dead = Grammar.from_regex("cd(abz|bcdz)", SMALL)
    for completion in run(k, dead, max_new_tokens=1):
        assert (completion.finish_reason, completion.error) == ("length", None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.from_regex("a(", SMALL), r"^regex: .*unclosed group"),
        (lambda: Grammar.from_regex("z", SMALL), r"^regex: .*one that allows no token of the tokenizer"),
        (lambda: Grammar.from_ebnf("start: foo", SMALL), r'^ebnf: .*unknown name: "foo"'),
        (lambda: Grammar.from_ebnf("", SMALL), "^ebnf: "),
        (
            lambda: Grammar.from_json_schema("{type", SMALL),
            "^json_schema: expected a JSON schema, got Expecting",
        ),
        (lambda: Grammar.from_json_schema({"type": "foo"}, SMALL), "^json_schema: .*Invalid type: foo"),
        (lambda: Grammar.from_json_schema({"const": {1, 2}}, SMALL), "^json_schema: .*not JSON serializable"),
        (lambda: Grammar.from_json_schema(False, SMALL), "^json_schema: .*schema is false"),
        (lambda: Grammar.from_json_schema([], SMALL), "^json_schema: "),
        (lambda: Grammar.from_regex("a", tokenizer(eos=None)), "^tokenizer: .*got one without"),
        (lambda: Grammar.from_regex("a", "gpt2"), "^tokenizer: .*got str"),
    ],
)
def test_a_bad_grammar_or_tokenizer_is_refused_by_name(make: object, message: str) -> None:
    with pytest.raises(MLAError, match=message):
        make()


def test_a_tokenizer_that_llguidance_cannot_read_is_refused() -> None:
    made = Tokenizer(models.WordLevel({"</s>": 0, "a": 1}, unk_token="</s>"))
    with pytest.raises(MLAError, match=r"^tokenizer: expected a fast tokenizer .* decoder"):
        Grammar.from_regex("a", PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.from_regex("a", SMALL),
        lambda: Grammar.from_ebnf("start: /a/", SMALL),
        lambda: Grammar.from_json_schema(True, SMALL),
    ],
)
def test_without_llguidance_it_says_how_to_install_it(make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MLAError, match=r"^llguidance: .*pip install '\.\[grammar\]'"):
        make()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grammars": [None]}, r"^grammars: expected one entry per prompt \(3\), got 1"),
        ({"grammars": "ab*"}, r"^grammars\[0\]: expected a Grammar or None, got str"),
        ({"grammars": [None, "ab*", None]}, r"^grammars\[1\]: expected a Grammar or None, got str"),
        (
            {"grammars": Grammar.from_regex("ab*", SMALL), "stop_ids": []},
            r"^stop_ids: .*grammars.*, got \[\]; .*end-of-sequence",
        ),
        ({"grammars": Grammar.from_regex("ab*", SMALL), "stop_ids": [VOCAB]}, "^stop_ids: "),
        (
            {"grammars": Grammar.from_regex("a", tokenizer([*TOKENS, *"ghijklmnopqrstuvw"]))},
            r"^grammars\[0\]: expected one for a tokenizer of at most the model's 40 ids",
        ),
        ({"grammars": FREE, "choose": lambda *_: None}, "^choose: "),
    ],
)
def test_a_bad_request_is_refused_by_name_before_anything_runs(settings: dict, message: str) -> None:
    with pytest.raises(MLAError, match=message):
        engine(0).stream(PROMPTS, **{"stop_ids": [EOS], **settings})


SHIPPED = load_tokenizer(SHIPPED_MODEL)
VERSE = {
    "type": "object",
    "properties": {
        "book": {"enum": ["Genesis", "Psalms", "Job"]},
        "chapter": {"type": "integer", "minimum": 1, "maximum": 150},
        "words": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z]{2,8}$"},
            "minItems": 2,
            "maxItems": 3,
        },
    },
    "required": ["book", "chapter", "words"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.mark.long
@pytest.mark.parametrize(
    "sampling", [None, pytest.param(SAMPLED, marks=pytest.mark.slow)], ids=["greedy", "sampled"]
)
def test_the_shipped_model_follows_grammars_beside_free_text(sampling: list[SamplingParams] | None) -> None:
    prompts = ["In the beginning", "def load(path):\n    return ", "The Lord said"]
    regex = r"(And|But) (the|a) [a-z]{3,10}( [a-z]{2,10}){3,6}\."
    grammars = [
        Grammar.from_regex(regex, SHIPPED),
        Grammar.from_json_schema(json.dumps(VERSE), SHIPPED),
        None,
    ]

    def out(k: int, wanted: list[Grammar | None] | None, rows: slice = slice(3)) -> list[Completion]:
        return generate(
            prompts[rows],
            num_speculative_tokens=k,
            max_new_tokens=60,
            sampling=sampling and sampling[rows],
            grammars=wanted,
            compile=False,
        )

    expected = out(0, grammars)
    assert [c.finish_reason for c in expected[:2]] == ["stop", "stop"]
    assert re.fullmatch(regex, expected[0].text)
    value = json.loads(expected[1].text)
    assert value["book"] in VERSE["properties"]["book"]["enum"] and 1 <= value["chapter"] <= 150
    assert 2 <= len(value["words"]) <= 3 and all(re.fullmatch("[a-z]{2,8}", word) for word in value["words"])
    assert expected[2].token_ids == out(0, None, slice(2, 3))[0].token_ids
    drafted = out(3, grammars)
    assert ids(drafted) == ids(expected)
    assert sum(c.num_steps for c in drafted[:2]) < sum(c.num_steps for c in expected[:2]), (
        "drafts are accepted"
    )


def large_grammars(draw: random.Random) -> tuple[str, Any]:
    """Some kilobytes that mean very much."""
    n, m = draw.randint(500, 4000), draw.randint(20, 60)

    def needs(name: str) -> dict[str, Any]:
        return {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}

    schemas = {
        "optional": {"type": "object", "properties": {f"a{i}": {"type": "string"} for i in range(n)}},
        "any": {"anyOf": [{"type": "object", "properties": {f"a{i}": {"type": "string"}}} for i in range(n)]},
        "product": {"allOf": [{"anyOf": [needs(f"{c}{i}") for i in range(2 * m)]} for c in "ab"]},
        "power": {"allOf": [{"anyOf": [needs(f"a{i}"), needs(f"b{i}")]} for i in range(draw.randint(9, 13))]},
    }
    kind = draw.choice([*schemas, "regex", "long"])
    if kind == "regex":
        return "regex", f"(a{{{n}}}){{{n}}}"
    return ("regex", "a|" * 2**20) if kind == "long" else ("json_schema", schemas[kind])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_what_a_grammar_may_cost_is_bounded_and_its_refusal_is_in_words(seed: int) -> None:
    kind, source = large_grammars(random.Random(seed))
    make = Grammar.from_regex if kind == "regex" else Grammar.from_json_schema
    start = time.process_time()
    try:
        (completion,) = run(0, make(source, SMALL), prompts=[[1, 2]], max_new_tokens=4)
        error = completion.error
    except MLAError as refused:
        error = str(refused)
    assert time.process_time() - start < 8, "20 s and more, once"
    assert error is None or "too large; use fewer" in error or "at most 1048576 characters" in error, error


def test_a_key_that_comes_twice_in_a_schema_is_refused() -> None:
    with pytest.raises(MLAError, match="json_schema: expected a JSON schema, got the key 'type' twice"):
        Grammar.from_json_schema('{"properties": {"a": {"type": "string", "type": "integer"}}}', SMALL)


def test_a_character_that_the_tokenizer_drops_is_a_dead_end_with_drafts_as_without() -> None:
    """`z` is no token: llguidance encodes `za` as `a`, and allows it where it cannot consume it."""
    a = TOKENS.index("a")
    row = GrammarRow(Grammar.from_regex("za", SMALL), Completion(), [EOS])
    masks = allowed_tokens({0: row}, torch.tensor([[a, a]]), vocab_size=VOCAB)[0]
    assert masks[0].nonzero().flatten().tolist() == [a]
    assert masks[1].nonzero().flatten().tolist() == [EOS]
    report = row.settle(RowReport([a, EOS], False))
    assert report.tokens == [a] and "grammar that can continue here" in str(report.error)
