"""A checkpoint whose tokenizer is code takes another directory's, or token ids."""

import json

import pytest

import mla_compile
from mla_compile import MLAError
from mla_compile.engine import Checkpoint
from tests.cli.conftest import save_byte_tokenizer

HELLO_IDS = {"prompt_token_ids": [71, 68, 75, 75, 78]}


@pytest.fixture
def with_code(copy):
    """The checkpoint as Kimi-K2 has it: its model_type, a vocabulary, and code that reads it."""
    (copy / "tokenizer.json").rename(copy / "tiktoken.model")
    config = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    model = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(model | {"model_type": "kimi_k2"}))
    (copy / "tokenization_kimi.py").write_text("raise SystemExit('this ran')")
    return copy


@pytest.fixture
def tokenizer(tmp_path):
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    save_byte_tokenizer(directory)
    return directory


def test_text_for_it_is_refused_before_weights_are_read(generate, with_code, monkeypatch):
    monkeypatch.delattr("mla_compile.engine.text.load_model")
    result = generate("--prompt", "hello", "--model", with_code)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "auto_map: expected a tokenizer that is not code" in result.stderr
    assert "--tokenizer DIR" in result.stderr and "token ids" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.long
def test_another_directorys_tokenizer_gives_the_same_text(complete, generate, with_code, tokenizer):
    prompts = [{"prompt": "hello"}, HELLO_IDS]
    assert complete(prompts, "--model", with_code, "--tokenizer", tokenizer) == complete(prompts)
    one = generate("--prompt", "hello", "--model", with_code, "--tokenizer", tokenizer)
    assert one.stdout == generate("--prompt", "hello").stdout


@pytest.mark.long
def test_token_ids_need_no_tokenizer(complete, with_code):
    ((with_text,), (without,)) = complete([HELLO_IDS]), complete([HELLO_IDS], "--model", with_code)
    assert without == with_text | {"text": None}
    (with_code / "tokenizer_config.json").write_text("{")
    assert complete([HELLO_IDS], "--model", with_code) == [without]


@pytest.mark.parametrize("option", [["--stop", "a"], ["--regex", "a"]])
def test_text_in_an_option_needs_the_tokenizer_too(generate, with_code, tmp_path, option):
    (tmp_path / "ids.jsonl").write_text(json.dumps(HELLO_IDS))
    result = generate("--input", tmp_path / "ids.jsonl", "--model", with_code, *option)
    assert result.exit_code == 2
    assert "expected a tokenizer that is not code" in result.stderr


def test_the_option_names_a_directory_with_a_tokenizer(generate, tmp_path, without_tokenizer):
    result = generate("--prompt", "a", "--tokenizer", without_tokenizer)
    assert f"tokenizer: expected a directory with a tokenizer.json, got {without_tokenizer}" in result.stderr
    result = generate("--prompt", "a", "--tokenizer", tmp_path / "none")
    expected = (
        f"--tokenizer: expected a directory in Hugging Face format, got {tmp_path / 'none'}, which is none"
    )
    assert expected in result.stderr


def test_the_library_takes_it_too(with_code, tokenizer):
    def complete(prompt, **settings):
        return mla_compile.generate([prompt], max_new_tokens=4, compile=False, **settings)[0]

    assert complete("hello", model=with_code, tokenizer=tokenizer).text is not None
    assert complete(HELLO_IDS["prompt_token_ids"], model=with_code).text is None
    with pytest.raises(MLAError, match="expected a tokenizer that is not code"):
        complete("hello", model=with_code)


def test_text_that_a_tokenizer_cannot_read_is_a_named_error(copy):
    words = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}}
    (copy / "tokenizer.json").write_text(json.dumps(words))
    (copy / "tokenizer_config.json").unlink()
    with pytest.raises(MLAError, match="prompt: expected text that the tokenizer accepts, got "):
        Checkpoint.load(copy).encode("hello")


def test_no_error_of_a_config_mentions_the_tokenizer(generate, copy):
    config = json.loads((copy / "config.json").read_text())
    for changes, expected in (
        ({"hidden_size": "big"}, "config.json: hidden_size: expected an integer"),
        ({"rms_norm_eps": "x"}, "config.json: rms_norm_eps: expected a number"),
        ({"num_hidden_layers": 0}, "config.json: num_hidden_layers: expected an integer in [1, 1024], got 0"),
        ({"num_hidden_layers": 1}, "(generate: --num-speculative-tokens 0)"),
    ):
        (copy / "config.json").write_text(json.dumps(config | changes))
        result = generate("--prompt", "a", "--model", copy)
        assert expected in result.stderr
        assert "tokenizer" not in result.stderr
    (copy / "config.json").write_text("{")
    assert "config.json: expected a readable JSON object" in generate("--prompt", "a", "--model", copy).stderr
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert generate("--prompt", "a", "--model", copy, "--num-speculative-tokens", 0).exit_code == 0
