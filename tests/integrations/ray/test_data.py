"""Engines in Ray Data: the completions of `generate`, one record each, whatever happens to the workers."""

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
ray = pytest.importorskip("ray")

from mla_compile import MLAError, SamplingParams, generate  # noqa: E402
from mla_compile.defaults import SHIPPED_MODEL  # noqa: E402
from mla_compile.integrations.ray.data import EngineActor  # noqa: E402
from tests.examples.pages import blocks_of  # noqa: E402

ROOT = Path(__file__).parents[3]
WORDS = ["In", "the", "beginning", "was", "a", "word", "and", "what", "said", "to", "them", "night", "sea"]


@pytest.fixture(scope="module")
def actor() -> EngineActor:
    return EngineActor(compile=False, max_new_tokens=6, max_rows=4)


def drawn_records(seed: int, count: int) -> list[dict[str, Any]]:
    """Records with all kinds of settings; an absent setting is null."""
    rng = random.Random(seed)
    return [
        {
            "id": i,
            "prompt": " ".join(rng.choices(WORDS, k=rng.randint(1, 9))),
            "prompt_token_ids": None,
            "temperature": rng.choice([None, 0.0, 0.7, 1.0]),
            "seed": rng.choice([None, i, 2**62 + i]),
            "n": rng.choice([None, 1, 3]),
            "max_tokens": rng.choice([None, 1, 5, 12]),
            "logprobs": rng.choice([None, 0, 2]),
            "stop": rng.choice([None, ["a"], [" the", "."]]),
            "top_k": rng.choice([None, 4]),
            "min_tokens": rng.choice([None, 1]),
            "logit_bias": rng.choice([None, {str(i): 1.5, "7": -100.0}]),
            "skip_special_tokens": rng.choice([None, False]),
        }
        for i in range(count)
    ]


def params_of(record: dict[str, Any]) -> SamplingParams:
    given = {
        name: value for name, value in record.items() if name not in ("id", "prompt", "prompt_token_ids")
    }
    if given["logit_bias"] is not None:
        given["logit_bias"] = {token: bias for token, bias in given["logit_bias"].items() if bias is not None}
    return replace(SamplingParams(), **{name: value for name, value in given.items() if value is not None})


@pytest.mark.long
def test_a_batch_has_the_completions_of_generate_beside_its_own_columns(actor: EngineActor) -> None:
    records = drawn_records(seed=0, count=24)
    given = pa.Table.from_pylist(records)
    completed, table = actor(given).to_pylist(), given.to_pylist()
    prompts, sampling = [record["prompt"] for record in records], [params_of(record) for record in records]
    expected = generate(prompts, sampling=sampling, max_new_tokens=6, compile=False)
    assert len(completed) == len(expected) > len(records)
    for got, completion in zip(completed, expected):
        assert {name: got[name] for name in records[0]} == table[completion.prompt_index]
        assert (got["index"], got["token_ids"]) == (completion.index, completion.token_ids)
        assert (got["text"], got["finish_reason"]) == (completion.text, completion.finish_reason)
        assert got["error"] is None
        assert got["acceptance_length"] == completion.acceptance_length
        if completion.logprobs is None:
            assert got["token_logprobs"] is None
            continue
        for place, known in zip(got["token_logprobs"], completion.logprobs, strict=True):
            ranks = [(each["token_id"], each["rank"]) for each in place]
            assert ranks == [(token, logprob.rank) for token, logprob in known.items()]
            compared = [each["logprob"] for each in place]
            assert compared == pytest.approx([each.logprob for each in known.values()], abs=1e-4)


def test_biases_may_be_a_map_of_arrow(actor: EngineActor) -> None:
    column = pa.array([[(71, 100.0)], [], None], pa.map_(pa.int64(), pa.float64()))
    prompts = ["In the beginning"] * 3
    biased, *plain = actor(pa.table({"prompt": prompts, "logit_bias": column})).to_pylist()
    assert set(biased["token_ids"]) == {71} and plain[0]["token_ids"] == plain[1]["token_ids"] != [71]


def test_token_ids_are_prompts_too(actor: EngineActor) -> None:
    text = actor(pa.table({"prompt": ["In the beginning"]})).to_pylist()
    token_ids = actor._checkpoint.encode("In the beginning")  # an actor's tokenizer is private
    again = actor(pa.table({"prompt_token_ids": [token_ids]})).to_pylist()
    assert again[0]["token_ids"] == text[0]["token_ids"]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"prompt": ""}, "prompt: expected at least one token"),
        ({"prompt": None}, "prompt, prompt_token_ids: expected one of them, got neither"),
        ({"prompt_token_ids": [1]}, "prompt, prompt_token_ids: expected one of them, got both"),
        ({"prompt": None, "prompt_token_ids": [10**6]}, "prompt_token_ids: expected token ids in"),
        ({"prompt": "a " * 5000}, "prompt: expected fewer tokens than"),
        ({"temperature": -1.0}, "temperature: expected a finite number >= 0"),
        ({"n": 0}, "n: expected an integer in"),
        ({"stop": [""]}, "stop: expected strings that are not empty"),
        ({"logit_bias": [5]}, "logit_bias: expected {token id: bias}, got list"),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else ",".join(value),
)
def test_a_record_that_cannot_be_completed_has_an_error_and_the_others_go_on(
    actor: EngineActor, wrong: dict[str, Any], what: str
) -> None:
    record = {"prompt": "In the", "prompt_token_ids": None, "temperature": None, "n": None, "stop": None}
    columns = {"prompt_token_ids": pa.list_(pa.int64()), "temperature": pa.float64(), "n": pa.int64()}
    columns |= {"prompt": pa.string(), "stop": pa.list_(pa.string()), "logit_bias": pa.list_(pa.int64())}
    completed = actor(pa.Table.from_pylist([record, record | wrong, record], pa.schema(columns))).to_pylist()
    good, bad, same = completed
    assert (bad["finish_reason"], bad["token_ids"], bad["text"]) == ("error", [], None)
    assert what in bad["error"]
    assert good == same and good["error"] is None and len(good["token_ids"]) == 6


def test_columns_of_wrong_types_are_errors_of_records(actor: EngineActor) -> None:
    for name, values in {
        "prompt": [[1, 2]],
        "prompt_token_ids": ["In the"],
        "seed": ["3"],
        "n": [1.0],
    }.items():
        table = pa.table({"prompt": ["In the"]} | {name: values})
        if name == "prompt_token_ids":
            table = table.drop_columns("prompt")
        (record,) = actor(table).to_pylist()
        assert record["finish_reason"] == "error" and record["error"].startswith(f"{name}: "), record


def test_an_empty_batch_has_the_same_columns(actor: EngineActor) -> None:
    full = actor(pa.table({"prompt": ["In the"]}))
    assert actor(pa.table({"prompt": pa.array([], pa.string())})).schema == full.schema


def test_mistakes_in_the_call_are_named(actor: EngineActor) -> None:
    with pytest.raises(MLAError, match=r'batch_format: .* call map_batches\(..., batch_format="pyarrow"\)'):
        actor({"prompt": ["In the"]})
    with pytest.raises(MLAError, match="batch: expected a column prompt or prompt_token_ids, got words"):
        actor(pa.table({"words": ["In the"]}))
    with pytest.raises(MLAError, match=r"^batch: .* got text; rename"):
        actor(pa.table({"prompt": ["In the"], "text": ["other"]}))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"model": "/no/such/checkpoint"}, "path"),
        ({"max_rows": 0}, "max_rows"),
        ({"dtype": "float33"}, "dtype"),
        ({"dtype": 3}, "dtype"),
        ({"sampling": {"seed": 3}}, "sampling"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
    ids=str,
)
def test_mistakes_in_settings_are_named_before_anything_runs(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(MLAError) as caught:
        EngineActor(**settings)
    assert caught.value.name == name or name == "path"


# --- on Ray itself


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ray.init(
        num_cpus=2,
        num_gpus=0,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        runtime_env={"env_vars": environment},
        logging_level="ERROR",
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


class Killed(EngineActor):
    """Its process dies once for each of some prompts, in the midst of a batch."""

    def __init__(self, deadly: list[str], deaths: Path, **settings: Any) -> None:
        super().__init__(**settings)
        self._deadly, self._deaths = deadly, deaths

    def _encode(self, prompts: dict[str, Any]) -> list[int]:  # the only hook between adding prompts
        if prompts["prompt"] in self._deadly:
            marker = self._deaths / str(self._deadly.index(prompts["prompt"]))
            if not marker.exists():
                marker.touch()
                for _ in range(3):
                    self._engine.step()
                os.kill(os.getpid(), signal.SIGKILL)
        return super()._encode(prompts)


@pytest.mark.slow
def test_blocks_of_killed_workers_run_again_and_no_record_is_lost_or_doubled(
    cluster: None, tmp_path: Path
) -> None:
    records = [
        record | {"prompt": f"{record['prompt']} {record['id']}"}
        for record in drawn_records(seed=1, count=32)
    ]
    deaths, out = tmp_path / "deaths", tmp_path / "out"
    deaths.mkdir()
    deadly = [records[i]["prompt"] for i in (5, 17, 26)]
    settings = {"compile": False, "max_new_tokens": 6, "max_rows": 4}
    table = pa.Table.from_pylist(records).drop_columns(["prompt_token_ids", "logprobs"])
    completed = (
        ray.data.from_arrow(table)
        .repartition(8)
        .map_batches(
            Killed,
            fn_constructor_kwargs={"deadly": deadly, "deaths": deaths} | settings,
            batch_format="pyarrow",
            batch_size=3,
            compute=ray.data.ActorPoolStrategy(size=2),
            num_cpus=0.5,
        )
    )
    completed.write_parquet(str(out))
    assert len(list(deaths.iterdir())) == len(deadly)
    written = pq.read_table(out).sort_by([("id", "ascending"), ("index", "ascending")])
    compared = [name for name in written.column_names if name != "acceptance_length"]
    assert written.select(compared).to_pylist() == EngineActor(**settings)(table).select(compared).to_pylist()


@pytest.mark.slow
def test_the_program_of_the_docs(cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [each for each in blocks_of(ROOT / "docs" / "server.md") if each.mark == "ray"]
    exec(block.code.replace("path/to/checkpoint", str(SHIPPED_MODEL)), {})
    assert "'finish_reason': 'length'" in capsys.readouterr().out
