"""A user's mistake is one line on stderr and exit code 2, and costs no file."""

import errno
import json
import os
import random
import resource
import stat
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from typer.main import get_command

from mla_compile import MLAError
from mla_compile.cli.app import app
from mla_compile.cli.commands import demo, env, generate, inspect, serve
from mla_compile.cli.prompts import read_prompts, result_writer
from mla_compile.engine import Engine

GOOD = '{"prompt": "hello"}'
AT_MOST = "expected at most %d, the maximum of new tokens"
MALFORMED = {
    "not json": "expected a JSON object",
    '{"prompt": "a"': "expected a JSON object",
    "[" * 100_000: "expected a JSON object",
    "Once upon a time": 'expected a JSON object such as {"prompt": TEXT}, got "Once upon a time" (Expecting',
    "[1, 2]": "expected one of",
    '"hello"': "expected one of",
    "{}": "expected one of",
    '{"prompt": "a", "prompt_token_ids": [1]}': "expected one of",
    '{"prompt": "a", "text": 3}': '"text": expected one of prompt, prompt_token_ids, temperature, ',
    '{"prompt": "a", "prompt": "b"}': '"prompt": expected a single occurrence, got 2',
    '{"prompt": "a", "seed": 1, "seed": 1}': '"seed": expected a single occurrence',
    '{"prompt": "a", "temperature": "hot"}': "temperature: expected a finite number >= 0, got hot",
    '{"prompt": "a", "temperature": true}': "temperature: expected a finite number >= 0, got True",
    '{"prompt": "a", "temperature": -1}': "temperature: expected a finite number >= 0, got -1",
    '{"prompt": "a", "max_tokens": 0}': "max_tokens: expected None or an integer >= 1, got 0",
    '{"prompt": "a", "max_tokens": 1.5}': "max_tokens: expected None or an integer >= 1, got 1.5",
    '{"prompt": "a", "stop": [1]}': "stop: expected strings that are not empty, got [1]",
    '{"prompt": "a", "min_tokens": 999}': f"min_tokens: {AT_MOST % 12}, got 999",
    '{"prompt": "a", "max_tokens": 2, "min_tokens": 3}': f"min_tokens: {AT_MOST % 2}, got 3",
    '{"prompt": "a", "logit_bias": {"257": 1}}': "logit_bias: expected token ids in [0, 257), got 257",
    '{"prompt": "a", "stop_token_ids": [257]}': "stop_token_ids: expected token ids in [0, 257), got 257",
    json.dumps({"prompt": "a", "stop_token_ids": [*range(64)]}): "stop_token_ids: expected at most 64 ids",
    '{"prompt": "a", "ignore_eos": 1}': "ignore_eos: expected True or False, got 1",
    '{"prompt": 5}': "expected a string",
    '{"prompt": "\\ud800"}': "expected valid Unicode text",
    '{"prompt": ""}': "an empty prompt",
    '{"prompt_token_ids": []}': "an empty prompt",
    '{"prompt_token_ids": "12"}': "expected token ids in [0, 2**63), got '1'",
    '{"prompt_token_ids": [1, true]}': "expected token ids in [0, 2**63), got True",
    '{"prompt_token_ids": [1.0]}': "expected token ids in [0, 2**63), got 1.0",
    '{"prompt_token_ids": [257]}': "expected token ids in [0, 257), got 257",
    '{"prompt_token_ids": [-1]}': "expected token ids in [0, 2**63), got -1",
    json.dumps({"prompt": "x" * 256}): "fewer tokens than the model's max_position_embeddings = 256, got 256",
}


COMMANDS = get_command(app).commands


def assert_one_line(result, *parts):
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("mla-compile: ") and result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr


@pytest.mark.parametrize("line", MALFORMED, ids=lambda line: line[:40])
def test_a_malformed_line_is_named_before_anything_runs(generate, tmp_path, monkeypatch, line):
    monkeypatch.delattr(Engine, "stream")
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    output.write_text("what was there before")
    result = generate("--input", file, "--output", output)
    assert_one_line(result, f"{file}, line 2", MALFORMED[line])
    assert output.read_text() == "what was there before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "expected one of them, got neither"),
        (["--prompt", "a", "--input", "b"], "expected one of them, got both"),
        (["--prompt", ""], "--prompt: expected at least one token"),
        (["--prompt", "\udc80"], "expected valid Unicode text"),
        (["--prompt", "x" * 300], "max_position_embeddings = 256, got 300"),
        (["--prompt", "a", "--max-new-tokens", "0"], "'--max-new-tokens'"),
        (["--prompt", "a", "--max-new-tokens", "many"], "'--max-new-tokens'"),
        (
            ["--prompt", "a", "--max-new-tokens", "2", "--min-tokens", "3"],
            f"--min-tokens: {AT_MOST % 2}, got 3",
        ),
        (["--prompt", "a", "--num-speculative-tokens", "-1"], "'--num-speculative-tokens'"),
        (["--prompt", "a", "--num-speculative-tokens", "99999999"], "'--num-speculative-tokens'"),
        (["--prompt", "a", "--temperature", "-1"], "temperature: expected"),
        (["--prompt", "a", "--temperature", "nan"], "temperature: expected"),
        (["--prompt", "a", "--min-p", "2"], "--min-p: expected"),
        (["--prompt", "a", "--repetition-penalty", "0"], "--repetition-penalty: expected"),
        (["--prompt", "a", "--frequency-penalty", "3"], "--frequency-penalty: expected"),
        (["--prompt", "a", "--logprobs", "21"], "--logprobs: expected"),
        (
            ["--prompt", "a", "--logprobs", "1"],
            "got --prompt without --output; add --output FILE",
        ),
        (["--prompt", "a", "--top-p", "0"], "--top-p: expected"),
        (["--prompt", "a", "--top-k", "-2"], "--top-k: expected"),
        (["--prompt", "a", "--top-k", str(2**31)], "--top-k: expected"),
        (["--prompt", "a", "--seed", "9223372036854775808"], "--seed: expected"),
        (["--prompt", "a", "--dtype", "int4"], "'--dtype'"),
        (["--prompt", "a", "--quantize", "int4"], "'--quantize'"),
        (
            ["--prompt", "a", "--quantize", "fp8", "--dequantize"],
            "--quantize, --dequantize: expected one of the two",
        ),
        (["--prompt", "a", "--device", "cuda:9"], "--device: expected a device of this machine"),
        (["--prompt", "a", "--device", "toaster"], "--device: expected cpu, cuda or cuda:N"),
        (["--prompt", "a", "--device", "meta"], "--device: expected cpu, cuda or cuda:N"),
        (["--prompt", "a", "--model", "no/such/directory"], "no such directory"),
        (["--prompt", "a", "--model", ""], "--model: expected a checkpoint's directory, got an empty path"),
        (
            ["--prompt", "a", "--model", "x" * 300],
            "--model: expected a checkpoint's directory, got File name",
        ),
        (["--prompt", "a", "--model", "a\0b"], "--model: expected a checkpoint's directory, got 'a\\x00b'"),
        (
            ["--prompt", "a", "--tokenizer", ""],
            "--tokenizer: expected a checkpoint's directory, got an empty",
        ),
        (
            ["--prompt", "a", "--tokenizer", "x/y/z"],
            "--tokenizer: expected a directory in Hugging Face format",
        ),
        (["--prompt", "a", "--drafter-model", ""], "--drafter-model: expected a directory with a head"),
        (
            ["--prompt", "a", "--batch-invariant"],
            "--batch-invariant: expected compiled steps, got --no-compile",
        ),
        (
            ["--prompt", "a", "--expert-parallel"],
            "--expert-parallel: expected more than one process, got 1; use --tensor-parallel-size 2, for example",
        ),
        (["--prompt", "a", "--frobnicate"], "No such option"),
        (["--prompt"], "requires an argument"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_bad_flag_is_named(generate, args, message):
    assert_one_line(generate(*args), message)


@pytest.mark.parametrize("flag", ["--rows", "--prefill-tokens", "--num-speculative-tokens"])
def test_a_size_too_large_to_inspect_is_named(run, checkpoint, flag):
    assert_one_line(run("inspect", "--model", checkpoint, flag, 10**9), f"'{flag}'", "less than or equal to")


@pytest.mark.parametrize("failing", ["Checkpoint.load", "fitting_engine"])
def test_out_of_memory_names_what_to_reduce(generate, monkeypatch, failing):
    monkeypatch.setattr(f"mla_compile.cli.generate.{failing}", lambda *_, **__: torch.empty(2**60))
    assert_one_line(
        generate("--prompt", "a"), "fewer or shorter prompts", "--dtype bfloat16", "allocate memory"
    )


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
def test_out_of_memory_of_a_gpu_or_of_python_is_one_line_too(generate, monkeypatch, error):
    def fail(*args, **settings):
        raise error

    monkeypatch.setattr(Engine, "stream", fail)
    assert_one_line(generate("--prompt", "a"), "--prefill-tokens); ", str(error) or "MemoryError")


def test_another_error_of_torch_keeps_its_traceback(generate, monkeypatch):
    monkeypatch.setattr(Engine, "stream", lambda *_, **__: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        generate("--prompt", "a")


@pytest.mark.parametrize(
    ("args", "message"),
    [([], "Missing command"), (["frobnicate"], "frobnicate"), (["--frobnicate"], "--frobnicate")],
)
def test_an_unknown_command_is_named(run, args, message):
    assert_one_line(run(*args), message)


def test_an_input_file_that_cannot_be_read_is_named(generate, tmp_path):
    assert_one_line(generate("--input", tmp_path / "none.jsonl"), "none.jsonl", "No such file")
    assert_one_line(generate("--input", tmp_path), "expected a readable file")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    assert_one_line(generate("--input", tmp_path / "latin.jsonl"), "latin.jsonl", "UTF-8")
    (tmp_path / "empty.jsonl").write_text("\n")
    assert_one_line(generate("--input", tmp_path / "empty.jsonl"), "at least one prompt")


def test_an_output_file_that_cannot_be_written_is_named_before_anything_runs(
    generate, run, tmp_path, monkeypatch
):
    monkeypatch.delattr(Engine, "stream")
    (tmp_path / "loop.svg").symlink_to("loop.svg")
    for output in (
        tmp_path,
        tmp_path / "none" / "out.svg",
        "/dev/null",
        tmp_path / "loop.svg",
        "x" * 252 + ".svg",
    ):
        assert_one_line(generate("--prompt", "a", "--output", output), f"--output {output}")
        if str(output).endswith(".svg"):
            assert_one_line(run("inspect", "--output", output), f"--output {output}: expected a ")
    nowhere = generate("--prompt", "a", "--output", tmp_path / "none" / "out.jsonl").stderr
    assert "got No such file or directory" in nowhere and ".tmp" not in nowhere, (
        "the error names a temporary file"
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(GOOD)
    assert_one_line(generate("--input", prompts, "--output", prompts), "another file than --input")
    assert prompts.read_text() == GOOD


def test_an_error_of_the_system_keeps_its_words():
    for number in errno.errorcode:
        words = os.strerror(number)
        error = MLAError("--output out", "a file", OSError(number, words, "/a/temporary/file"))
        assert str(error) == f"--output out: expected a file, got {words}"
    assert str(MLAError("x", "y", OSError("its own text"))) == "x: expected y, got its own text"


def test_an_error_of_another_file_is_not_blamed_on_the_output_file(generate, tmp_path, monkeypatch):
    def disk_full(*args, **settings):
        raise OSError(28, "No space left on device", "a compile cache")

    monkeypatch.setattr(Engine, "stream", disk_full)
    output = tmp_path / "out.jsonl"
    output.write_text("what was there before")
    with pytest.raises(OSError, match="a compile cache"):
        generate("--prompt", "a", "--output", output)
    assert output.read_text() == "what was there before"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_an_output_file_that_is_written_in_part_is_not_kept(tmp_path):
    """A limit of the size of files in place of a disk that is full."""
    output = tmp_path / "out.jsonl"
    output.write_bytes(b"what was there before")
    write = result_writer(output, None, streamed=False)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(MLAError, match=f"^--output {output}: .*can be written, got File too large"):
            write(["x" * 1000] * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert output.read_bytes() == b"what was there before"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_an_output_file_that_fills_the_disk_is_named_and_keeps_what_it_held(generate, tmp_path, monkeypatch):
    output, opened = tmp_path / "out.jsonl", Path.open
    output.write_bytes(b"what was there before")

    def disk_full(path, mode="r", *args, **settings):
        if path.parent == tmp_path and mode == "w":
            raise OSError(28, "No space left on device")
        return opened(path, mode, *args, **settings)

    monkeypatch.setattr(Path, "open", disk_full)
    result = generate("--prompt", "a", "--output", output)
    assert result.exit_code == 2
    assert f"--output {output}: expected a file that can be written" in result.stderr
    assert output.read_bytes() == b"what was there before"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_text_without_a_tokenizer_is_named(generate, without_tokenizer):
    result = generate("--prompt", "a", "--model", without_tokenizer)
    assert_one_line(result, "--prompt: expected token ids, as the checkpoint has no tokenizer")


def test_a_bad_end_of_sequence_id_is_named(generate, copy):
    (copy / "generation_config.json").write_text('{"eos_token_id": "stop"}')
    assert_one_line(
        generate("--prompt", "a", "--model", copy),
        "generation_config.json: eos_token_id: expected a token id",
    )
    (copy / "generation_config.json").write_text("{")
    assert_one_line(
        generate("--prompt", "a", "--model", copy), "generation_config.json: expected a readable JSON"
    )


def test_ctrl_c_ends_it_with_130_and_keeps_the_output_file(generate, tmp_path, monkeypatch):
    def interrupted(self, *args, **settings):
        yield []
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "_stream", interrupted)
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(GOOD)
    output.write_text("what was there before")
    result = generate("--input", prompts, "--output", output)
    assert (result.exit_code, result.stderr) == (130, "")
    assert output.read_text() == "what was there before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl"]


def test_output_goes_through_a_link_to_the_file_behind_it(generate, tmp_path):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "file.jsonl")
    assert generate("--prompt", "a", "--output", tmp_path / "link.jsonl").exit_code == 0
    assert (tmp_path / "link.jsonl").is_symlink() and (tmp_path / "file.jsonl").is_file()


def test_an_output_file_keeps_its_mode_and_may_have_the_longest_name(generate, tmp_path):
    output = tmp_path / ("x" * 255)
    for mode in (0o600, 0o640, 0o444):
        output.touch()
        output.chmod(mode)
        assert generate("--prompt", "a", "--output", output).exit_code == 0
        assert stat.S_IMODE(output.stat().st_mode) == mode and json.loads(output.read_text())


def test_standard_input_that_is_closed_is_named(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(MLAError, match=r"^--input -: expected an open standard input, got a closed one$"):
        read_prompts(None, Path("-"), {})


def test_the_installed_command_reports_a_mistake_the_same_way():
    code = "from mla_compile.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", "--prompt", "a", "--seed", "x"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--seed" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--regex", "a("],
            "regex: expected a regular expression that llguidance accepts, got invalid regex",
        ),
        (["--grammar", __file__], "--grammar: expected rules in Lark's form"),
        (["--regex", "a", "--json-schema", "b"], "--json-schema, --regex: expected one of them, got both"),
        (["--json-schema", "missing.json"], "--json-schema missing.json: expected a readable file"),
    ],
)
def test_a_grammar_that_cannot_be_is_named_before_anything_runs(generate, monkeypatch, args, message):
    pytest.importorskip("llguidance")
    monkeypatch.delattr(Engine, "stream")
    assert_one_line(generate("--prompt", "hello", *args), message)


def test_a_grammar_needs_a_tokenizer(generate, without_tokenizer, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_token_ids": [1]}')
    result = generate("--input", file, "--model", without_tokenizer, "--regex", "a")
    assert_one_line(result, "a checkpoint with a tokenizer, got one without")


@pytest.mark.parametrize("command", [generate, serve, inspect, env, demo])
def test_no_placeholder_is_the_name_of_its_flag_which_typer_0_27_would_spell_like_it(command) -> None:
    for name, hint in get_type_hints(command, include_extras=True).items():
        for option in getattr(hint, "__metadata__", ()):
            spelled = str(option.default).startswith("--")  # by the author: typer makes no name of its own
            assert spelled or (option.metavar or "").lower() != name


BAD_VALUES = {
    int: ["x", "1.5", "", "1e3", "0x10", "nan"],
    float: ["x", "", "1,5", "0x10"],
    Literal: ["x", "", "FLOAT32x"],
    bool: ["1"],
}
"""Values that a flag refuses by its type."""


@pytest.mark.parametrize("name", COMMANDS)
def test_random_mistakes_in_any_flag_are_one_line_that_names_it(run, tmp_path, name):
    """What else the line has is right, and comes in any order."""
    rng, command = random.Random(name), COMMANDS[name]
    hints = get_type_hints(command.callback)
    options = [each for each in command.params if each.param_type_name == "option"]
    switches = [each.opts[0] for each in options if hints[each.name] in (bool, bool | None)]
    for option in options:
        kinds = {get_origin(kind) or kind for kind in (hints[option.name], *get_args(hints[option.name]))}
        flags = [*option.opts, *option.secondary_opts]
        mistakes = [
            f"{flag}={value}" for flag in flags for kind in kinds for value in BAD_VALUES.get(kind, ())
        ]
        mistakes += [] if option.opts[0] in switches else flags  # without a value, at the end
        for mistake in mistakes:
            others = [switch for switch in switches if switch not in flags]
            words = [str(tmp_path)] * (name == "plan") + rng.sample(others, rng.randint(0, len(others)))
            words.insert(len(words) if mistake in flags else rng.randint(0, len(words)), mistake)
            assert_one_line(run(name, *words), mistake.partition("=")[0])
