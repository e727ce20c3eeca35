"""Every entrance has the same defaults, of settings and of a checkpoint's `generation_config.json`."""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

import mla_compile
from mla_compile import Engine, MLAError, SamplingParams, load_model
from mla_compile.cli import generate as command
from mla_compile.cli import plan, serve
from mla_compile.defaults import default_max_model_len
from mla_compile.engine import Checkpoint, EngineConfig, fitting_engine
from mla_compile.engine.config import FittedConfig
from mla_compile.engine.memory import plan_memory
from mla_compile.integrations.transformers import accelerate
from mla_compile.serving import engine_process
from mla_compile.serving.openai_requests import parse_completion
from mla_compile.serving.settings import ServerSettings
from tests.cli.conftest import Run
from tests.integrations.mtp import load_checkpoint

NAMES = (
    "num_speculative_tokens",
    "max_rows",
    "max_model_len",
    "page_size",
    "num_pages",
    "max_tokens_per_step",
)


def recorded(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, call: Callable[[], object]) -> Any:
    """What a function of a module returns while `call` runs."""
    found: list[Any] = []
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **given: found.append(real(*args, **given)) or found[0])
    call()
    return found[0]


def served(run: Run, monkeypatch: pytest.MonkeyPatch, path: Path) -> ServerSettings:
    """The settings that `mla-compile serve` gives to its server."""
    found: list[ServerSettings] = []
    monkeypatch.setattr(serve, "_server", lambda replicas: lambda settings, **_: found.append(settings))
    result = run("serve", "--model", path, "--no-compile")
    assert result.exit_code == 0, result.output
    return found[0]


@pytest.mark.parametrize(("memory", "expected"), [(None, 6000), (194 * 10**6, 4096), (10**6, 2048)])
def test_all_entrances_agree(
    run: Run, copy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory: int | None, expected: int
) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 6000}))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "max_tokens": 1}\n' * 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    if memory is not None:
        for module in ("mla_compile.engine.device_memory", "mla_compile.cli.plan"):
            monkeypatch.setattr(f"{module}.usable_memory", lambda device: memory)
    planned = recorded(monkeypatch, plan, "plan_memory", lambda: run("plan", copy))
    flags = ("--model", copy, "--no-compile", "--input", tmp_path / "prompts.jsonl")
    completed = recorded(monkeypatch, command, "fitting_engine", lambda: run("generate", *flags))
    accelerated: Any = accelerate(load_checkpoint(copy), compile=False)
    of_server = engine_process._load(served(run, monkeypatch, copy)).engine
    configs: dict[str, FittedConfig] = {
        "plan": planned.config,
        "mla-compile generate": completed.config,
        "serve": of_server.config,
        "Engine": Engine(load_model(copy), compile=False).config,
        "generate": fitting_engine(Checkpoint.load(copy), [[1]] * 8, compile=False).config,
        "accelerate": accelerated.mla._engine.config,
    }
    assert {each.drafter.name for each in configs.values()} == {"mtp"}
    found = {name: {each: getattr(config, each) for each in NAMES} for name, config in configs.items()}
    pages = 1 + 8 * -(-expected // 16)
    expected_settings = dict(zip(NAMES, (3, 8, expected, 16, pages, 4096), strict=True))
    assert found == dict.fromkeys(configs, expected_settings)
    models = (of_server.model, completed.model, load_model(copy))
    assert {spec.dtype for model in models for spec in model.cache_specs()} == {torch.float32}


def test_defaults_on_a_gpu(checkpoint: Path) -> None:
    settings = ServerSettings(model=checkpoint)
    assert settings.of_checkpoint()["dtype"] is None, "the device decides"
    model = load_model(checkpoint)
    fitted = EngineConfig().fitted_to(model, device_type="cuda", left=10 * 2**30)
    assert (fitted.page_size, fitted.max_model_len, fitted.num_pages) == (64, 256, 33)
    room = plan_memory(model, EngineConfig(), device_type="cuda", usable=10 * 2**30).config
    assert room == fitted
    assert mla_compile.defaults.default_dtype("cuda:1") == torch.bfloat16


@pytest.mark.parametrize(
    ("positions", "affordable", "expected"),
    [
        (None, 10**9, 2048),
        (512, 0, 512),
        (4096, 0, 2048),
        (163840, 163840, 163840),
        (163840, 163839, 131072),
        (163840, 131072, 131072),
        (163840, 131071, 65536),
        (3000, 2999, 2048),
        (3000, 3000, 3000),
    ],
)
def test_max_model_len_is_that_of_the_model_or_a_power_of_two(
    positions: int | None, affordable: int, expected: int
) -> None:
    assert default_max_model_len(positions, affordable) == expected


def with_generation_config(path: Path, **content: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps(content))
    return path


SAMPLED = {"do_sample": True, "temperature": 1.5, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.1}
PARAMS = {name: value for name, value in SAMPLED.items() if name != "do_sample"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, {}),
        (SAMPLED, PARAMS),
        (PARAMS, PARAMS),
        (SAMPLED | {"do_sample": False}, PARAMS | {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": None, "temperature": None, "min_p": 0.1}, {"min_p": 0.1}),
        ({"top_k": -1, "temperature": 1, "num_beams": 4, "_from_model_config": True}, {"top_k": 0, "temperature": 1}),
    ],
)  # fmt: skip
def test_load_model_reads_sampling_parameters(
    copy: Path, content: dict[str, Any], expected: dict[str, Any]
) -> None:
    model = load_model(with_generation_config(copy, **content))
    assert (model.default_sampling, model.stop_ids) == (expected, [256])
    ignoring = load_model(with_generation_config(copy, eos_token_id=7, **content), generation_config="none")
    assert (ignoring.default_sampling, ignoring.stop_ids) == ({}, [256])
    assert load_model(with_generation_config(copy, eos_token_id=[7, 8])).stop_ids == [7, 8]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("temperature", "NaN", "got the number nan for 'temperature'"),
        ("temperature", "1e999", "got the number inf for 'temperature'"),
        ("top_p", "[-Infinity]", "got the number -inf for 'top_p'"),
        ("temperature", '"hot"', "temperature: expected a finite number >= 0, got hot"),
        ("temperature", "true", "temperature: expected a finite number >= 0, got True"),
        ("temperature", "-1", "temperature: expected a finite number >= 0, got -1"),
        ("top_p", "7", "top_p: expected a number in (0, 1], got 7"),
        ("top_p", "[0.5]", "top_p: expected a number in (0, 1], got [0.5]"),
        ("top_k", "1.5", "top_k: expected an integer in [0, 2**31), got 1.5"),
        ("top_k", "1" + 400 * "0", "top_k: expected an integer in [0, 2**31), got 1000"),
        ("min_p", "2", "min_p: expected a number in [0, 1], got 2"),
        ("repetition_penalty", "0", "repetition_penalty: expected a number > 0"),
        ("do_sample", "1", "do_sample: expected true or false, or null, got 1"),
        ("eos_token_id", "-1", "eos_token_id: expected a token id"),
    ],
)
def test_a_bad_value_is_refused_by_file_and_key(
    run: Run, copy: Path, key: str, value: str, expected: str
) -> None:
    file = copy / "generation_config.json"
    file.write_text(f'{{"{key}": {value}}}')
    for name in copy.glob("*.safetensors"):
        name.write_bytes(b"")  # no weight is read before
    with pytest.raises(MLAError) as raised:
        load_model(copy)
    assert str(raised.value).startswith(f"{file}: ") and expected in str(raised.value)
    assert len(str(raised.value)) < len(str(file)) + 300
    result = run("generate", "--no-compile", "--model", copy, "--prompt", "a")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert expected in result.stderr


def test_a_call_without_sampling_has_that_of_the_checkpoint(copy: Path) -> None:
    prompts = [[3, 4, 5], [6]]
    own = load_model(with_generation_config(copy, **SAMPLED))

    def tokens(*sampling: SamplingParams, **settings: Any) -> list[list[int]]:
        engine = Engine(own, compile=False)
        return [each.token_ids for each in engine.generate(prompts, *sampling, max_new_tokens=8, **settings)]

    sampled, greedy = tokens(SamplingParams(**PARAMS)), tokens(SamplingParams())
    assert tokens() == sampled != greedy
    request = Engine(own, compile=False).add(prompts[0], max_new_tokens=1)
    assert request.params == SamplingParams(**PARAMS) and request.stop_ids == {256}
    again = mla_compile.generate(prompts, model=copy, max_new_tokens=8, compile=False)
    assert [each.token_ids for each in again] == sampled
    ignored = mla_compile.generate(
        prompts, model=copy, max_new_tokens=8, compile=False, generation_config="none"
    )
    assert [each.token_ids for each in ignored] == greedy


def test_a_text_ends_at_the_checkpoints_ids_unless_a_call_names_others(copy: Path) -> None:
    engine = Engine(load_model(copy), compile=False)
    (free,) = engine.generate([[3, 4, 5]], max_new_tokens=8)
    last = free.token_ids[2]
    engine = Engine(load_model(with_generation_config(copy, eos_token_id=[9, last])), compile=False)

    def ends(**settings: Any) -> int:
        (found,) = engine.generate([[3, 4, 5]], max_new_tokens=8, **settings)
        return len(found.token_ids)

    assert ends() == 1 + free.token_ids.index(last)
    assert ends(stop_ids=()) == ends(stop_ids=[9]) == ends(sampling=SamplingParams(ignore_eos=True)) == 8


@pytest.mark.long
def test_flags_and_lines_override_single_parameters(
    copy: Path, complete: Callable[..., list[dict[str, Any]]]
) -> None:
    def tokens(*flags: object, **line: Any) -> list[int]:
        (found,) = complete([{"prompt": "hello", **line}], "--model", copy, *flags)
        ids: list[int] = found["token_ids"]
        return ids

    flags = [f"--{name.replace('_', '-')}={value}" for name, value in PARAMS.items()]
    with_generation_config(copy)
    greedy, sampled, cold = tokens(), tokens(*flags), tokens(*flags, "--temperature", 0.8)
    with_generation_config(copy, **SAMPLED)
    assert tokens() == sampled != greedy
    assert tokens("--temperature", 0.8) == tokens("--temperature", 3, temperature=0.8) == cold != sampled
    assert tokens("--generation-config", "none") == greedy


def test_a_request_to_the_server_overrides_single_parameters(
    run: Run, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = served(run, monkeypatch, with_generation_config(copy, **SAMPLED))
    ours, theirs = Pipe()

    def work() -> None:
        with suppress(EOFError):
            engine_process.serve(theirs, settings)

    thread = threading.Thread(target=work)
    thread.start()
    limits = ours.recv().limits
    ours.close()
    thread.join(60)
    tokenizer = mla_compile.load_tokenizer(copy)

    def params(**fields: Any) -> SamplingParams:
        body = json.dumps({"model": "copy", "prompt": "a", "seed": 1, **fields}).encode()
        return replace(parse_completion(body, tokenizer=tokenizer, limits=limits).params, max_tokens=None)

    assert params() == params(temperature=None) == SamplingParams(**PARAMS, seed=1)
    assert params(temperature=0.5) == SamplingParams(**PARAMS | {"temperature": 0.5}, seed=1)
    assert params(top_k=-1, top_p=1.0) == SamplingParams(**PARAMS | {"top_k": 0, "top_p": 1.0}, seed=1)
    limits = replace(limits, default_sampling={})
    assert params() == SamplingParams(temperature=1.0, seed=1), "OpenAI's default"
