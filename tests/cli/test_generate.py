"""`mla-compile generate`: the contract that scripts rely on."""

import json

import pytest
import torch

from mla_compile.engine import Engine
from mla_compile.models.checkpoint import read_config
from tests.speculate.eagle3_heads import config_of, weights_of, write_head

HELLO = {"prompt": "hello"}
HELLO_IDS = {"prompt_token_ids": [71, 68, 75, 75, 78]}
MIXED = [{"prompt": "to be, or not to be"}, HELLO_IDS, {"prompt": "é"}]


def set_end_ids(checkpoint, file, ids):
    path = checkpoint / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ids}))


def test_an_output_line_has_these_keys_and_types(complete):
    (line,) = complete([HELLO])
    assert list(line) == ["token_ids", "text", "finish_reason", "acceptance_length"]
    assert len(line["token_ids"]) == 12 and all(isinstance(token, int) for token in line["token_ids"])
    assert isinstance(line["text"], str)
    assert line["finish_reason"] == "length"
    assert 1 <= line["acceptance_length"] <= 4


def test_a_head_drafts_the_same_text(complete, checkpoint, run, tmp_path):
    """By default K is 3 with a head, and the checkpoint's MTP layer is not loaded."""
    sizes = read_config(checkpoint)[0]
    config = config_of(sizes.hidden_size, [0, 1], vocab_size=sizes.vocab_size)
    head = write_head(tmp_path / "head", config, weights_of(config))
    (plain,), (drafted,) = complete([HELLO]), complete([HELLO], "--drafter-model", head)
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["acceptance_length"] != plain["acceptance_length"]
    planned = run("plan", checkpoint, "--drafter-model", head).stdout
    assert f"without an MTP layer, as the head in {head} drafts" in planned
    assert planned != run("plan", checkpoint, "--num-speculative-tokens", 0).stdout


@pytest.mark.long
def test_output_lines_come_in_the_order_of_more_prompts_than_decode_at_once(complete):
    prompts = [{"prompt": "to be, or not"[:n]} for n in range(1, 12)]
    together = complete(prompts)
    assert together == [complete([prompt])[0] for prompt in prompts]
    assert len({str(line["token_ids"]) for line in together}) > 1


def test_text_and_its_token_ids_give_the_same_completion(complete):
    text, ids = complete([HELLO, HELLO_IDS])
    assert text == ids


def test_without_output_the_lines_go_to_stdout(complete, generate, tmp_path):
    lines = complete(MIXED)
    result = generate("--input", tmp_path / "prompts.jsonl")
    numbered = [{"line": number} | line for number, line in enumerate(lines, start=1)]
    assert [json.loads(line) for line in result.stdout.splitlines()] == numbered


def test_a_prompt_is_streamed_to_stdout(complete, generate):
    (line,) = complete([HELLO])
    result = generate("--prompt", "hello")
    assert (result.exit_code, result.stdout, result.stderr) == (0, line["text"] + "\n", "")


@pytest.mark.long
def test_a_completion_ends_before_a_stop_string(complete, generate):
    (whole,) = complete([{"prompt": "to be"}], "--max-new-tokens", 30)
    stop = whole["text"][6:8]
    at = whole["text"].index(stop)
    (cut,) = complete([{"prompt": "to be"}], "--max-new-tokens", 30, "--stop", stop, "--stop", "never, never")
    assert (cut["text"], cut["finish_reason"]) == (whole["text"][:at], "stop")
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    result = generate("--prompt", "to be", "--max-new-tokens", 30, "--stop", stop)
    assert result.stdout == cut["text"] + "\n", "nothing of the stop string was shown"


def test_a_prompt_can_have_an_output_file_too(complete, generate, tmp_path):
    (line,) = complete([HELLO])
    result = generate("--prompt", "hello", "--output", tmp_path / "one.jsonl")
    assert result.stdout == line["text"] + "\n"
    assert json.loads((tmp_path / "one.jsonl").read_text()) == line


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("listed", [False, True])
def test_a_completion_ends_with_the_checkpoints_end_of_sequence_token(complete, copy, file, listed):
    (before,) = complete([HELLO])
    end = before["token_ids"][5]
    if file == "config.json":
        (copy / "generation_config.json").unlink()
    set_end_ids(copy, file, [255, end] if listed else end)
    (line,) = complete([HELLO], "--model", copy)
    assert line["token_ids"] == before["token_ids"][: before["token_ids"].index(end) + 1]
    assert line["finish_reason"] == "stop"


def test_without_a_tokenizer_token_ids_still_work_and_text_is_null(complete, checkpoint, without_tokenizer):
    (line,) = complete([HELLO_IDS], "--model", without_tokenizer)
    assert line["text"] is None
    assert line["token_ids"] == complete([HELLO_IDS], "--model", checkpoint)[0]["token_ids"]


@pytest.mark.long
def test_the_tokens_are_the_same_whatever_the_number_of_drafts(complete):
    plain = complete(MIXED, "--num-speculative-tokens", 0)
    assert [line["acceptance_length"] for line in plain] == [1.0] * 3
    for k in (1, 3, 5):
        drafted = complete(MIXED, "--num-speculative-tokens", k)
        assert [line["token_ids"] for line in drafted] == [line["token_ids"] for line in plain]


def test_one_token_takes_no_step_and_has_no_acceptance_length(complete):
    (line,) = complete([HELLO], "--max-new-tokens", 1)
    assert len(line["token_ids"]) == 1 and line["acceptance_length"] is None


def test_three_tokens_are_drafted_by_default_where_there_is_an_mtp_layer_or_a_drafter_is_named(
    generate, without_mtp, monkeypatch
):
    drafts, init = [], Engine.__init__

    def spied(self, *args, **settings):
        init(self, *args, **settings)
        drafts.append(self.config.num_speculative_tokens)

    monkeypatch.setattr(Engine, "__init__", spied)
    assert generate("--prompt", "hello").exit_code == 0
    assert generate("--prompt", "hello", "--model", without_mtp).exit_code == 0
    assert generate("--prompt", "hello", "--model", without_mtp, "--drafter", "ngram").exit_code == 0
    assert drafts == [3, 0, 3]


@pytest.mark.long
def test_without_an_mtp_layer_ngram_lookup_drafts(complete, without_mtp):
    """The tiny model soon repeats itself, so its drafts are mostly accepted."""
    flags = ([], ["--num-speculative-tokens", 2], ["--drafter", "ngram"])
    (plain,), *drafted = (
        complete([MIXED[0]], "--model", without_mtp, "--max-new-tokens", 40, *each) for each in flags
    )
    assert plain["acceptance_length"] == 1
    for (line,) in drafted:
        assert line["token_ids"] == plain["token_ids"]
        assert line["acceptance_length"] > 2


def test_the_mtp_drafter_without_an_mtp_layer_is_an_error(generate, without_mtp):
    result = generate("--prompt", "hello", "--model", without_mtp, "--drafter", "mtp")
    assert result.exit_code == 2 and result.stdout == ""
    expected = "drafter: expected 'ngram' or None for a model without an MTP layer, got 'mtp'"
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.long
def test_a_temperature_samples_and_the_seed_decides_what(complete):
    sample = ("--temperature", 1.5, "--top-k", 50, "--top-p", 0.95)
    first, again, other = (complete(MIXED, *sample, "--seed", seed) for seed in (7, 7, 8))
    assert first == again
    assert [line["token_ids"] for line in first] != [line["token_ids"] for line in other]
    plain = complete(MIXED, *sample, "--seed", 7, "--num-speculative-tokens", 0)
    assert [line["token_ids"] for line in plain] == [line["token_ids"] for line in first]


@pytest.mark.long
def test_without_a_temperature_it_is_greedy(complete):
    greedy = complete(MIXED)
    assert complete(MIXED, "--seed", 3, "--top-k", 5) == greedy
    assert complete(MIXED, "--temperature", 0.7, "--top-k", 1) == greedy


@pytest.mark.long
def test_penalties_and_min_p_choose_tokens_and_logprobs_show_them(complete):
    greedy = complete(MIXED)
    penalties = (
        ("--repetition-penalty", 1.5),
        ("--presence-penalty", 1.5),
        ("--frequency-penalty", 1.5),
    )
    for flags in penalties:
        assert complete(MIXED, *flags) != greedy
    assert complete(MIXED, "--temperature", 1, "--min-p", 1) == greedy
    lines = complete(MIXED, "--logprobs", 2)
    assert [{key: line[key] for key in greedy[0]} for line in lines] == greedy
    for line in lines:
        for token, place in zip(line["token_ids"], line["logprobs"], strict=True):
            assert len(place) == 2
            assert place[str(token)]["rank"] == 1
            assert place[str(token)]["logprob"] <= 0


def test_bfloat16_is_another_dtype(complete):
    (line,) = complete([HELLO], "--dtype", "bfloat16", "--device", "cpu")
    assert len(line["token_ids"]) == 12


def test_a_completion_ends_where_the_models_positions_end(complete):
    (line,) = complete([{"prompt": "x" * 250}], "--max-new-tokens", 100)
    assert len(line["token_ids"]) == 6  # of 256 positions
    assert line["finish_reason"] == "length"


@pytest.mark.long
@pytest.mark.usefixtures("unlowered")
def test_the_compiled_step_gives_the_tokens_of_the_eager_one(complete):
    drafts = ("--num-speculative-tokens", 1)
    eager = complete(MIXED, *drafts)
    assert complete(MIXED, *drafts, "--compile") == eager


def test_without_a_compiler_it_warns_and_runs_eagerly(generate, monkeypatch):
    expected = generate("--prompt", "hello").stdout
    monkeypatch.setattr("mla_compile.cli.machine.cpp_compiler", lambda: None)
    result = generate("--prompt", "hello", "--compile")
    assert (result.exit_code, result.stdout) == (0, expected)
    assert "no C++ compiler found: install one" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_batch_invariant_run_needs_a_compiler(generate, monkeypatch):
    monkeypatch.setattr("mla_compile.cli.machine.cpp_compiler", lambda: None)
    result = generate("--prompt", "hello", "--compile", "--batch-invariant", "--device", "cpu")
    assert result.exit_code == 2
    assert (
        "--batch-invariant: expected a machine that can compile steps, got no C++ compiler" in result.stderr
    )


@pytest.mark.long
def test_a_batch_invariant_engine_serves_where_it_is_asked_for(complete, monkeypatch):
    expected, configs, init = complete(MIXED), [], Engine.__init__

    def spied(self, *args, **settings):
        init(self, *args, **settings)
        configs.append(self.config)

    monkeypatch.setattr(Engine, "__init__", spied)
    with torch.compiler.set_stance("force_eager"):
        assert complete(MIXED, "--compile", "--batch-invariant") == expected
    assert [config.batch_invariant for config in configs] == [True]


def test_weights_are_quantised_on_request(complete, monkeypatch):
    from mla_compile.models import fp8

    put, made = fp8.put_fp8_layers, []
    monkeypatch.setattr(fp8, "put_fp8_layers", lambda model, *rest: made.append(put(model, *rest)))
    (line,) = complete([HELLO], "--quantize", "fp8", "--device", "cpu")
    assert len(made) == 1 and line["token_ids"]
    complete([HELLO], "--dequantize", "--device", "cpu")
    assert len(made) == 1, "a plain checkpoint stays as it is"


def test_help_names_every_flag_and_the_default_number_of_drafts(run):
    text = " ".join(run("generate", "--help").stdout.split())
    assert "3 if the model has an MTP layer or a drafter is given, else 0" in text
    assert (
        "mtp if the model has an MTP layer; else ngram if num_speculative_tokens is given; else no drafts"
        in text
    )
    flags = "model prompt input output num-speculative-tokens drafter max-new-tokens"
    flags += " batch-invariant quantize dequantize"
    flags += " temperature top-k top-p min-p"
    flags += (
        " seed dtype repetition-penalty presence-penalty frequency-penalty logprobs json-schema regex device"
    )
    assert all(f"--{flag} " in text for flag in [*flags.split(), "no-compile"])


def test_completions_follow_a_regex_or_a_json_schema(complete, tmp_path):
    pytest.importorskip("llguidance")
    assert {line["text"] for line in complete(MIXED, "--regex", "yes|no")} <= {"yes", "no"}
    file = tmp_path / "schema.json"
    file.write_text('{"enum": [7, null]}')
    for line in complete(MIXED, "--json-schema", file):
        assert json.loads(line["text"]) in (7, None)
        assert line["finish_reason"] == "stop"


@pytest.mark.long
def test_a_grammar_goes_with_penalties_min_p_and_logprobs(complete):
    pytest.importorskip("llguidance")
    flags = ("--regex", "[a-c]{8}", "--temperature", 1, "--min-p", 0.1, "--logprobs", 1)
    plain, penalised = complete(MIXED, *flags), complete(MIXED, *flags, "--frequency-penalty", 2)
    for line in plain + penalised:
        assert len(line["text"]) == 8 and set(line["text"]) <= set("abc")
        assert [next(iter(place)) for place in line["logprobs"]] == [str(i) for i in line["token_ids"]]
    assert [line["text"] for line in plain] != [line["text"] for line in penalised]


def test_a_grammar_that_reaches_a_dead_end_is_an_error_of_the_completion(complete, generate, copy):
    pytest.importorskip("llguidance")
    file = copy / "tokenizer.json"
    file.write_text(file.read_text().replace('"z":', '"zz":'))  # so that no token spells a single z
    flags = ("--model", copy, "--regex", "(a|b)z")
    expected = "grammars[{}]: expected a grammar that can continue here, got one that allows no token"
    for i, line in enumerate(complete(MIXED, *flags)):
        assert (line["finish_reason"], len(line["token_ids"]), line["text"] in "ab") == ("error", 1, True)
        assert line["error"].startswith(expected.format(i))
    shown = generate("--prompt", "hello", *flags)
    assert shown.stdout in ("a\n", "b\n")
    assert shown.stderr.startswith("mla-compile: " + expected.format(0)) and shown.stderr.count("\n") == 1
