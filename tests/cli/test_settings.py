"""Lines of --input with settings of their own, several completions of a prompt, grammars from files, standard input."""

import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mla_compile
from mla_compile import MLAError, SamplingParams
from mla_compile.cli.prompts import _SETTINGS, read_prompts

HELLO = {"prompt": "hello"}
BAD = st.sampled_from([None, True, 1, 1.5, -1, "x", [], [1], ["x"], {}, float("nan"), 10**400, 2**63])


def parse(tmp_path_factory, line: str, **flags: object) -> SamplingParams:
    file = tmp_path_factory.getbasetemp() / "line.jsonl"
    file.write_text(line + "\n")
    (request,) = read_prompts(None, file, flags)
    return request.sampling({})


@st.composite
def settings_of_lines(draw) -> dict[str, object]:
    """Good ones, of any keys."""
    values = {
        "temperature": st.floats(0, 5) | st.integers(0, 5),
        "top_k": st.integers(0, 2**31 - 1),
        "top_p": st.floats(0.01, 1) | st.just(1),
        "seed": st.integers(-(2**63), 2**62),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0.1, 3),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logprobs": st.none() | st.integers(0, 20),
        "max_tokens": st.none() | st.integers(1, 1000),
        "stop": st.text(min_size=1) | st.lists(st.text(min_size=1)),
        "stop_token_ids": st.lists(st.integers(0, 2**63 - 1)),
        "ignore_eos": st.booleans(),
        "n": st.integers(1, 9),
        "min_tokens": st.integers(0, 1),
        "logit_bias": st.none() | st.dictionaries(st.integers(0, 2**59).map(str), st.floats(-100, 100)),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
    }
    assert values.keys() == {field.name for field in fields(SamplingParams)}, (
        "every setting of a line is drawn"
    )
    keys = draw(st.lists(st.sampled_from(sorted(values)), unique=True))
    return {key: draw(values[key]) for key in keys}


@pytest.mark.long
@given(settings=settings_of_lines(), flags=settings_of_lines())
def test_a_line_overrides_the_flags_by_the_names_of_sampling_params(tmp_path_factory, settings, flags):
    found = parse(tmp_path_factory, json.dumps(HELLO | settings), **flags)
    assert found == SamplingParams(**{**flags, **settings})


@given(key=st.sampled_from(sorted(_SETTINGS)), value=BAD)
def test_a_value_is_taken_as_it_is_or_refused_with_file_line_and_key(tmp_path_factory, key, value):
    line = json.dumps(HELLO | {key: value})
    if _is_accepted(key, value):
        found = getattr(parse(tmp_path_factory, line), key)
        assert (list(found) if isinstance(found, tuple) else found) == value
    else:
        with pytest.raises(MLAError) as raised:
            parse(tmp_path_factory, line)
        assert raised.value.name.endswith(f"line.jsonl, line 1: {key}")


def _is_accepted(key: str, value: object) -> bool:
    try:
        SamplingParams(**{key: value})
    except MLAError:
        return False
    return True


@given(
    line=st.dictionaries(st.sampled_from(["prompt", "seed", "n", "stop"]), st.just(1), min_size=1),
    data=st.data(),
)
def test_a_key_that_comes_twice_is_named(tmp_path_factory, line, data):
    key = data.draw(st.sampled_from(sorted(line)))
    text = json.dumps(line)[:-1] + f', "{key}": 1}}'
    with pytest.raises(MLAError, match=f'line 1: "{key}": expected a single occurrence'):
        parse(tmp_path_factory, text)


@given(key=st.text().filter(lambda key: key not in _SETTINGS and not key.startswith("prompt")))
def test_an_unknown_key_is_named(tmp_path_factory, key):
    with pytest.raises(MLAError, match="expected one of prompt, prompt_token_ids, temperature") as raised:
        parse(tmp_path_factory, json.dumps(HELLO | {key: 1}))
    assert raised.value.name.startswith(f"{tmp_path_factory.getbasetemp() / 'line.jsonl'}, line 1: ")


def test_help_names_every_setting(run):
    text = " ".join(run("generate", "--help").stdout.split())
    own = text.partition("its own settings, named as in SamplingParams")[2].partition("Options:")[0]
    assert all(f" {name}" in own for name in _SETTINGS)


@pytest.mark.long
def test_each_line_gets_what_it_asks_for(complete, checkpoint):
    lines = [
        HELLO,
        HELLO | {"max_tokens": 3},
        HELLO | {"temperature": 2.0, "seed": 5, "max_tokens": 20},
        HELLO | {"logprobs": 1},
        {"prompt_token_ids": [71, 68], "max_tokens": 30},
    ]
    plain, short, sampled, with_logprobs, long = complete(lines)
    assert len(plain["token_ids"]) == 12
    assert short["token_ids"] == plain["token_ids"][:3]
    assert sampled["token_ids"][:12] != plain["token_ids"] and len(sampled["token_ids"]) == 20
    assert with_logprobs["token_ids"] == plain["token_ids"] and len(with_logprobs["logprobs"]) == 12
    assert len(long["token_ids"]) == 30
    params = [SamplingParams(), SamplingParams(temperature=2.0, seed=5, max_tokens=20)]
    library = mla_compile.generate(
        ["hello"] * 2, model=checkpoint, sampling=params, max_new_tokens=12, compile=False
    )
    assert [line["token_ids"] for line in (plain, sampled)] == [
        completion.token_ids for completion in library
    ]


@pytest.mark.long
def test_several_completions_of_a_prompt_are_one_line(complete, generate):
    hot = ("--temperature", 1.5)
    alone = [complete([HELLO], *hot, "--seed", seed)[0] for seed in (3, 4)]
    one, both = complete([HELLO, HELLO | {"n": 2}], *hot, "--seed", 3)
    assert one == alone[0]
    assert both == {"completions": alone}
    assert complete([HELLO], *hot, "--seed", 3, "--n", 2) == [both]
    shown = generate("--prompt", "hello", *hot, "--seed", 3, "--n", 2)
    assert shown.stdout == "".join(line["text"] + "\n" for line in alone)


def test_prompts_come_from_standard_input(complete, generate):
    lines = complete([HELLO, {"prompt": "to be"}])
    result = generate("--input", "-", input='{"prompt": "hello"}\n{"prompt": "to be"}\n')
    numbered = [{"line": number} | line for number, line in enumerate(lines, start=1)]
    assert [json.loads(line) for line in result.stdout.splitlines()] == numbered
    result = generate("--input", "-", input='{"prompt": "a"}\n{"prompt": 1}\n')
    assert result.exit_code == 2 and result.stderr.startswith("mla-compile: stdin, line 2: prompt: ")


BLANK = st.sampled_from(["", " ", "\t", "\r", "  \r"])
LINES = st.lists(st.builds(str.__add__, st.just(json.dumps(HELLO)), BLANK) | BLANK, max_size=12)


@given(lines=LINES, last=st.sampled_from(["", "\n", "\r\n"]), data=st.data())
def test_blank_lines_are_skipped_and_each_other_line_keeps_its_number(tmp_path_factory, lines, last, data):
    file = tmp_path_factory.getbasetemp() / "lines.jsonl"
    file.write_bytes(("\n".join(lines) + last).encode())
    numbers = [number for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbers:
        with pytest.raises(MLAError, match=r"--input .*at least one prompt"):
            read_prompts(None, file, {})
        return
    found = read_prompts(None, file, {})
    assert [each.line for each in found] == numbers
    assert [each.name for each in found] == [f"{file}, line {number}" for number in numbers]
    bad = data.draw(st.sampled_from(numbers))
    lines[bad - 1] = data.draw(
        st.sampled_from(["Once", "{", "[]", '{"prompt": 1}', '{"prompt": "a", "seed": ""}'])
    )
    file.write_bytes(("\n".join(lines) + last).encode())
    with pytest.raises(MLAError, match=rf"lines.jsonl, line {bad}\b"):
        read_prompts(None, file, {})


def test_an_output_line_has_the_number_of_its_input_line(generate, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('\n{"prompt": "hello"}\n\n   \n{"prompt": "hello", "n": 2}\n\n')
    one, two = map(json.loads, generate("--input", file).stdout.splitlines())
    assert next(iter(one)) == "line"
    assert (one["line"], two["line"], list(two)) == (2, 5, ["line", "completions"])


def test_a_grammar_comes_from_a_file(complete, tmp_path):
    pytest.importorskip("llguidance")
    file = tmp_path / "rules.lark"
    file.write_text('start: "yes" | "no" ("!")~2')
    for line in complete([HELLO, {"prompt": "to be"}], "--grammar", file):
        assert line["text"] in ("yes", "no!!")
