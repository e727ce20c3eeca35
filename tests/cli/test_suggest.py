"""What is suggested for a name that does not exist: another program's word for it, a close spelling, or nothing."""

import random
import string

import pytest
from typer.main import get_command

from mla_compile.cli.app import _names, app
from mla_compile.suggest import _ELSEWHERE, suggestions

GROUP = get_command(app)
CONTEXT = GROUP.make_context("mla-compile", ["env"])
NAMES = {name: _names(command, CONTEXT) for name, command in GROUP.commands.items()}
PLACES = [*NAMES.values(), [*GROUP.commands]]
"""Names among which one is looked for: the flags of each command; the commands."""


def misspell(rng: random.Random, name: str) -> str:
    """Another spelling of a name: in another case, or with one letter wrong, two in a long one."""
    letters = list(name.lstrip("-"))
    if rng.random() < 0.3 or len(letters) < 4:
        spelled = rng.choice([name.replace("-", "_"), name.upper(), name.title(), name.lstrip("-")])
        return rng.choice(["-", "--"]) + spelled.lstrip("-_") if name.startswith("-") else spelled
    for _ in range(1 + (len(letters) > 13)):
        i = rng.randrange(len(letters) - 1)
        letter = rng.choice(string.ascii_lowercase)
        match rng.choice(["drop", "double", "insert", "replace", "swap"]):
            case "drop":
                del letters[i]
            case "double":
                letters.insert(i, letters[i])
            case "insert":
                letters.insert(i, letter)
            case "replace":
                letters[i] = letter
            case "swap":
                letters[i : i + 2] = letters[i + 1], letters[i]
    return name[: -len(name.lstrip("-"))] + "".join(letters)


@pytest.mark.parametrize("seed", range(4))
def test_a_misspelling_leads_to_what_was_meant(seed):
    rng = random.Random(seed)
    for names in PLACES:
        for name in names:
            for _ in range(20):
                spelled = misspell(rng, name)
                if not any(each.startswith(spelled) for each in names if each != name):
                    assert name in suggestions(spelled, names), spelled


@pytest.mark.parametrize("seed", range(4))
def test_a_word_unlike_any_name_leads_to_nothing(seed):
    rng = random.Random(seed)
    for names in PLACES:
        for _ in range(300):
            word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(7, 14)))
            assert suggestions(f"--{word}", names) == [], word


FOREIGN = """trust-remote-code load-format swap-space enable-auto-tool-choice disable-log-requests threads mlock
    lora-modules rope-scaling hf-token revision ssl-keyfile tool-call-parser mirostat"""


@pytest.mark.parametrize("names", PLACES, ids=[*NAMES, "commands"])
@pytest.mark.parametrize("word", FOREIGN.split())
def test_a_flag_of_others_that_has_no_counterpart_leads_to_nothing(names, word):
    assert suggestions(f"--{word}", names) == []


@pytest.mark.parametrize(
    ("command", "given", "expected"),
    [
        ("generate", "--max-tokens", "--max-new-tokens"),
        ("generate", "--max_tokens=5", "--max-new-tokens"),
        ("generate", "--temp", "--temperature"),
        ("generate", "--top", "--top-k or --top-p"),
        ("generate", "-temprature", "--temperature"),
        ("generate", "-m", "--model"),
        ("generate", "--enforce-eager", "--no-compile"),
        ("serve", "--max-num-seqs", "--max-rows"),
        ("serve", "--ctx-size", "--max-model-len"),
        ("serve", "--gpu-memory-utilization", "--num-pages"),
        ("serve", "--enable-expert-parallel", "--expert-parallel"),
        ("serve", "--num_pages", "--num-pages"),
        ("plan", "--tensor-parallel-size", "--gpus"),
        ("plan", "--gpu-memory-utilization", "--gpu-memory or --num-pages"),
        ("plan", "--model", "MODEL_DIR"),
        ("inspect", "--max-num-seqs", "--rows"),
    ],
)
def test_a_mistake_in_a_flag_is_named_with_what_was_meant(run, command, given, expected):
    result = run(command, given, "1")
    name = given.partition("=")[0]
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"mla-compile: No such option: {name}. Did you mean {expected}? (see --help)\n"


LONG = "once upon " * 30 + "a time"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "--frobnicate"], "No such option: --frobnicate"),
        (["generate", "--max-num-seqs"], "No such option: --max-num-seqs"),
        (["serve", "some/where"], "Unexpected argument: some/where. Did you mean --model some/where?"),
        (["serve", "a b"], "Unexpected argument: a b. Did you mean --model 'a b'?"),
        (["generate", "Hello you"], "Unexpected argument: Hello you. Did you mean --prompt 'Hello you'?"),
        (["generate", LONG], f"Unexpected argument: {LONG}. Did you mean --prompt {LONG!r}?"),
        (["env", "all"], "Unexpected argument: all"),
        (["servr"], "No such command 'servr'. Did you mean serve?"),
        (["run"], "No such command 'run'. Did you mean generate?"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["--vers"], "No such option: --vers. Did you mean --version?"),
        (["--rows", "3", "inspect"], "--rows must follow a command (inspect)"),
    ],
)
def test_other_mistakes_are_named_with_what_was_meant(run, args, message):
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"mla-compile: {message} (see --help)\n"


def test_words_of_others_lead_to_names_that_exist_and_have_no_meaning_of_their_own_there():
    assert _ELSEWHERE.keys() <= {name for names in PLACES for name in names}
    for name, words in _ELSEWHERE.items():
        for names in PLACES:
            for word in words.split():
                if name in names:
                    assert word not in [each.lstrip("-") for each in names], (
                        f"{word}: it never gets to {name}"
                    )
                    assert name in suggestions(f"--{word}", names)
