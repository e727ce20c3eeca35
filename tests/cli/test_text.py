"""`mla_compile.generate` and what it is made of."""

import json
import random

import pytest

import mla_compile
from mla_compile import Completion, MLAError, SamplingParams
from mla_compile.engine import Checkpoint, Engine, TextStream, fitting_engine
from tests.engine.tokenizers_of_every_kind import text_of


@pytest.fixture(scope="module")
def loaded(checkpoint) -> Checkpoint:
    return Checkpoint.load(checkpoint)


def test_generate_completes_text_and_token_ids(checkpoint, loaded):
    prompts = ["to be, or not", loaded.encode("to be, or not")]
    text, ids = mla_compile.generate(prompts, model=checkpoint, max_new_tokens=9, compile=False)
    assert text == ids
    assert len(text.token_ids) == 9 and text.finish_reason == "length"
    assert text.text == text_of(loaded.tokenizer, text.token_ids)


def test_generate_takes_sampling_for_each_prompt(checkpoint):
    def run(sampling):
        out = mla_compile.generate(
            ["hello", "hello"], model=checkpoint, max_new_tokens=9, sampling=sampling, compile=False
        )
        return [completion.token_ids for completion in out]

    greedy, sampled = SamplingParams(), SamplingParams(temperature=2.0, seed=5)
    (first, second), (same, other) = run(greedy), run([greedy, sampled])
    assert first == second == same != other


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("hello", "prompts: expected a list of prompts"),
        (iter(["hello", "world"]), "prompts: expected a list of prompts, got list_iterator"),
        (None, "prompts: expected a list of prompts, got NoneType"),
        ([1, 2], r"prompts\[0\]: expected text or a list of token ids"),
        (["a", ""], r"prompts\[1\]: expected at least one token"),
        ([[1.5]], r"prompts\[0\]: expected token ids"),
    ],
)
def test_a_bad_prompt_is_named(checkpoint, prompts, message):
    with pytest.raises(MLAError, match=message):
        mla_compile.generate(prompts, model=checkpoint, compile=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling": {"temperature": 1.0}}, "sampling: expected SamplingParams for all prompts, or a list"),
        ({"sampling": [None]}, "sampling.0.: expected SamplingParams, got None"),
        ({"sampling": [SamplingParams()] * 2}, "sampling: expected one entry per prompt .1., got 2"),
        ({"sampling": 5}, "sampling: expected SamplingParams for all prompts, or a list"),
        ({"max_new_tokens": 2.0}, "max_new_tokens: expected an integer >= 1, got 2.0"),
    ],
)
def test_a_bad_argument_is_named_before_the_model_is_loaded(arguments, message):
    with pytest.raises(MLAError, match=message):
        mla_compile.generate(["hello"], model="no/such-model", **arguments)


@pytest.mark.parametrize("seed", range(3))
def test_a_tokenizer_whose_regex_gives_up_is_a_mistake_by_name(copy, generate, capfd, seed):
    draw = random.Random(seed)
    letter, ends = draw.choice("abx"), draw.choice(["$", "c", "(?!.)"])
    file = copy / "tokenizer.json"
    content = json.loads(file.read_text())
    pattern = {
        "type": "Split",
        "pattern": {"Regex": f"({letter}+)+{ends}"},
        "behavior": "Isolated",
        "invert": False,
    }
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [pattern, content["pre_tokenizer"]]}
    file.write_text(json.dumps(content))
    prompt = letter * draw.randrange(40, 60) + "!"
    with pytest.raises(
        MLAError, match=r"^prompts\[0\]: expected text that the tokenizer accepts, got .*over"
    ):
        mla_compile.generate([prompt], model=copy, compile=False)
    assert "panicked" in capfd.readouterr().err
    result = generate("--prompt", prompt, "--model", copy)
    assert capfd.readouterr().err == ""
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_outside_of_the_vocabulary_is_left_out_and_named(copy, caplog, file):
    content = json.loads((copy / file).read_text())
    (copy / file).write_text(json.dumps(content | {"eos_token_id": [257, 3, 100_001]}))
    if file == "config.json":
        (copy / "generation_config.json").unlink()
    assert Checkpoint.load(copy).model.stop_ids == [3]
    assert "eos_token_id [257, 100001] is outside of the vocabulary of 257" in caplog.text


def test_no_prompts_give_no_completions(checkpoint):
    assert mla_compile.generate([], model=checkpoint, compile=False) == []


def test_pieces_of_streamed_text_add_up_to_the_text(loaded):
    """Tokens are random bytes, mostly parts of characters."""
    for seed in range(100):
        rng = random.Random(seed)
        token_ids = [rng.randrange(257) for _ in range(40)]
        stream, completion, text = TextStream(loaded.tokenizer), Completion(), ""
        for start in range(0, 40, 4):  # a step emits several tokens
            completion.token_ids += token_ids[start : start + 4]
            completion.finish_reason = "length" if start == 36 else None
            text += stream.feed(completion)
        assert text == text_of(loaded.tokenizer, token_ids)


def test_a_streamed_character_is_not_cut_in_half(loaded):
    stream, completion = TextStream(loaded.tokenizer), Completion()
    pieces = []
    for token in loaded.encode("naïve"):
        completion.token_ids.append(token)
        pieces.append(stream.feed(completion))
    assert pieces == ["n", "a", "", "ï", "v", "e"]


def test_similar_prompts_get_engines_of_the_same_size(loaded, monkeypatch):
    def size(num_prompts, length, max_new_tokens):
        prompts = [[1] * length] * num_prompts
        engine = fitting_engine(loaded, prompts, max_new_tokens=max_new_tokens, compile=False)
        return engine.config.max_rows, engine.config.max_model_len, engine.config.num_pages

    monkeypatch.setattr(loaded.model.config, "max_position_embeddings", 16384)
    assert size(1, 5, 20) == (1, 16384, 8193)
    monkeypatch.setattr("mla_compile.engine.config.bytes_left", lambda model: 0)
    assert size(1, 5, 20) == size(1, 300, 200) == (1, 2048, 1025)
    assert size(3, 5, 20) == size(4, 5, 300) == (4, 2048, 1025)
    assert size(50, 600, 20) == (8, 2048, 1025)
    assert size(2, 2000, 100) == (2, 4096, 1025)
    assert size(8, 2000, 100) == (8, 4096, 2049)
    assert size(1, 1000, 50000) == (1, 16384, 1025)  # the model's positions end there
    default = Engine(loaded.model, compile=False).config
    assert (default.max_rows, default.max_model_len, default.num_pages) == size(8, 5, 20)
