"""The pieces of a stream join to `Completion.text`, for tokenizers of every kind and tokens of any sense.

`MLA_TEXTS=20000` sets how many texts are drawn for each kind.
"""

import os
import random
import re
from typing import Any

import pytest

from mla_compile import SamplingParams
from mla_compile.engine import Request, TextStream
from mla_compile.engine.detokenizer import Detokenizer, TextReader
from mla_compile.engine.reports import RowReport
from mla_compile.errors import RequestError
from mla_compile.serving.token_bytes import Vocabulary
from tests.engine.tokenizers_of_every_kind import KINDS, straddled_text, text_of

NUM_TEXTS = int(os.environ.get("MLA_TEXTS", "150"))
REPLACEMENT = "\ufffd"
STOPS = [(), (".",), ("the", "🚀"), ("e", "é", "cat s"), (REPLACEMENT,)]


def run(kind: str, draw: random.Random) -> tuple[list[int], Request, list[str]]:
    """Random tokens, the request that they are reported to in steps of random sizes, and what its stream gave."""
    tokenizer, stops = KINDS[kind](), draw.choice(STOPS)
    ids = [draw.randrange(len(tokenizer)) for _ in range(draw.randrange(1, 25))]
    params = SamplingParams(
        stop=stops,
        min_tokens=draw.choice([0, 0, 3, 9]),
        include_stop_str_in_output=draw.random() < 0.3,
        skip_special_tokens=draw.random() < 0.7,
    )
    if draw.random() < 0.5:
        params = SamplingParams(stop=stops)
    request = Request([1], 100, params=params, reader=TextReader(tokenizer, params))
    if draw.random() < 0.3:
        request.stop_ids = frozenset(ids[-1:])
    stream, pieces, left = TextStream(tokenizer, params), [], ids
    while left and not request.has_ended:
        new, left = left[: (count := draw.randrange(1, 6))], left[count:]
        request.take(RowReport(new, active=bool(left)), is_step=True)
        pieces.append(stream.feed(request.completion))
    return ids, request, pieces


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_join_to_the_text(kind: str) -> None:
    tokenizer, num_plain, num_stopped = KINDS[kind](), 0, 0
    for seed in range(NUM_TEXTS):
        ids, request, pieces = run(kind, random.Random(seed))
        completion = request.completion
        assert "".join(pieces) == completion.text, (kind, seed)
        raised = any(token % 41 == 40 for token in completion.token_ids) and kind == "raises"
        assert (completion.finish_reason == "error") == raised
        params = request.params
        if params != SamplingParams(stop=params.stop) or request.stop_ids:
            continue
        if completion.finish_reason == "stop":
            num_stopped += 1
            assert not any(stop in completion.text for stop in request.params.stop_strings)
        elif not raised:
            whole = tokenizer.decode(ids, skip_special_tokens=True)
            # Clean-up looks behind and ahead; a special token may part the bytes of a character.
            if kind not in ("word_piece", "in_python") and REPLACEMENT not in whole:
                num_plain += 1
                assert completion.text == whole
    assert num_stopped or kind == "in_python"
    assert num_plain or kind in ("word_piece", "in_python")


WORD, SPECIAL = "▁the", "<|user|>"


@pytest.mark.parametrize("sizes", [[6], [1] * 6, [2, 4], [4, 2]])
@pytest.mark.parametrize(
    ("fields", "text", "num_tokens"),
    [
        ({"stop": "cat"}, "the ", 2),
        ({"stop": "cat", "include_stop_str_in_output": True}, "the cat", 2),
        ({"stop": ["cat", "cat the"], "min_tokens": 2}, "the ", 3),
        ({"stop": "cat", "min_tokens": 2}, "the cat the ", 5),
        ({"stop": "cat", "min_tokens": 5}, "the cat the cat", 6),
        ({"stop": "the", "min_tokens": 2, "include_stop_str_in_output": True}, "the cat the", 3),
        ({"stop": SPECIAL}, "the cat the cat", 6),
        ({"stop": SPECIAL, "skip_special_tokens": False}, "the cat the", 4),
        ({"skip_special_tokens": False}, f"the cat the{SPECIAL} cat", 6),
        (
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            f"the cat the{SPECIAL} cat</s>",
            6,
        ),
    ],
    ids=str,
)
def test_a_text_ends_as_its_parameters_say(
    sizes: list[int], fields: dict[str, Any], text: str, num_tokens: int
) -> None:
    """vLLM's rules: a stop string ends after `min_tokens` tokens, and what ends a text is not part of it."""
    tokenizer = KINDS["metaspace"]()
    ids = tokenizer.convert_tokens_to_ids([WORD, "▁cat", WORD, SPECIAL, "▁cat", "</s>"])
    params = SamplingParams(**fields)
    request = Request(
        [1], 100, params=params, reader=TextReader(tokenizer, params), stop_ids=frozenset(ids[-1:])
    )
    stream, shown, left = TextStream(tokenizer, params), "", ids
    for size in sizes:
        new, left = left[:size], left[size:]
        if not request.has_ended:
            request.take(RowReport(new, active=bool(left)), is_step=True)
            shown += stream.feed(request.completion)
    assert (request.completion.text, shown) == (text, text)
    assert request.completion.token_ids == ids[:num_tokens]
    assert request.completion.finish_reason == "stop"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_invalid_bytes_are_replaced_and_valid_characters_stay(kind: str) -> None:
    tokenizer = KINDS[kind]()
    vocabulary, num_invalid = Vocabulary(tokenizer), 0
    ordinary = [  # only the vocabulary knows which tokens were added
        token
        for token in range(len(tokenizer))
        if vocabulary.bytes_of(token) and token not in vocabulary._added
    ]
    first = ordinary[-1]  # decoders treat the first token in their own way
    for seed in range(NUM_TEXTS):
        draw = random.Random(seed)
        ids = [first, *(draw.choice(ordinary) for _ in range(draw.randrange(1, 25)))]
        expected = b"".join(map(vocabulary.bytes_of, ids)).decode(errors="replace")
        reader = TextReader(tokenizer)
        reader.feed(ids, is_end=True)
        num_invalid += REPLACEMENT in expected
        # A space beside a wrong byte may go, as decoders strip the one that a text begins with.
        got, expected = (
            re.sub(f"{REPLACEMENT}+", REPLACEMENT, text.replace(" ", "")) for text in (reader.text, expected)
        )
        assert got == expected, (kind, ids)
    assert num_invalid > NUM_TEXTS / 10


def test_tokens_that_straddle_characters_give_every_character_as_it_is_complete() -> None:
    tokenizer, num_straddling = KINDS["straddling"](), 0
    for seed in range(NUM_TEXTS):
        draw = random.Random(seed)
        text = straddled_text(draw)
        ids = tokenizer(text)["input_ids"]
        detokenizer = Detokenizer(tokenizer)
        for i, token in enumerate(ids):
            detokenizer.feed(token)
            complete = tokenizer.decode(ids[: i + 1]).rstrip(REPLACEMENT)
            assert complete.startswith(detokenizer.text) and len(complete) <= len(detokenizer.text) + 2
            num_straddling += complete != tokenizer.decode(ids[: i + 1]) != REPLACEMENT
        assert detokenizer.text == text, seed
        ids = [draw.randrange(500) for _ in range(30)]
        assert text_of(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=True), seed
    assert num_straddling > NUM_TEXTS


def test_a_broken_character_between_words_is_replaced() -> None:
    """Decoding all at once would replace the newline and the rocket too."""
    tokenizer = KINDS["byte_fallback"]()
    for pieces, text in (
        (["<0x0A>", "<0xF0>", "<0x9F>", "▁the"], f"\n{REPLACEMENT * 2} the"),
        (["<0xF0>", "<0x9F>", "<0x9A>", "<0x80>", "<0xF0>", "<0x9F>"], f"🚀{REPLACEMENT * 2}"),
        (["<0xFF>", "<0xF0>", "<0x9F>", "<0x9A>", "<0x80>"], f"{REPLACEMENT}🚀"),
    ):
        reader = TextReader(tokenizer)
        reader.feed(tokenizer.convert_tokens_to_ids(pieces), is_end=True)
        assert reader.text == text


@pytest.mark.parametrize("given", [None, b"a"])
def test_a_decode_that_gives_no_text_is_named(given: object, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = KINDS["in_python"]()
    monkeypatch.setattr(tokenizer, "decode", lambda *_, **__: given)
    with pytest.raises(RequestError, match=rf"tokenizer cannot decode token 3: .*{type(given).__name__}"):
        TextReader(tokenizer).feed([3])


def test_tokens_that_add_nothing_take_no_longer_as_they_become_more() -> None:
    """And do not part a word from what stands before it."""
    tokenizer = KINDS["metaspace"]()
    calls, user = 0, tokenizer.convert_tokens_to_ids("<|user|>")
    reader = TextReader(tokenizer)
    decode = reader._known._decode  # the work of a call shows in what it decodes

    def counted(token_ids: list[int]) -> str:
        nonlocal calls
        calls += len(token_ids)
        return decode(token_ids)

    reader._known._decode = counted
    the = tokenizer.convert_tokens_to_ids("▁the")
    reader.feed([the, *[user] * 1000, the])
    assert reader.text == "the the"
    assert calls < 10_000
