"""Ray Data: engines on any number of machines complete a dataset of prompts.

Ray restarts a worker that is killed, and runs its blocks again; their earlier results are dropped. The completion of a
record depends only on its own columns, including its seed, so the second run gives the same result.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, Unpack

import pyarrow as pa
import torch

from mla_compile.defaults import DEFAULT_MAX_TOKENS, SHIPPED_MODEL
from mla_compile.engine import Checkpoint, Completion, Engine
from mla_compile.engine.config import config_of
from mla_compile.engine.intake import checked_sampling
from mla_compile.engine_settings import EngineSettings
from mla_compile.errors import MLAError, check_integer
from mla_compile.sampling_params import SamplingParams
from mla_compile.speculate.drafter import loads_mtp

_PROMPTS: dict[str, type] = {"prompt": str, "prompt_token_ids": list}
_SETTINGS = [field.name for field in fields(SamplingParams)]
_LOGPROB = pa.struct([("token_id", pa.int64()), ("logprob", pa.float64()), ("rank", pa.int64())])
_RESULTS = pa.schema(
    [
        ("index", pa.int64()),
        ("token_ids", pa.list_(pa.int64())),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("error", pa.string()),
        ("acceptance_length", pa.float64()),
        ("token_logprobs", pa.list_(pa.list_(_LOGPROB))),
    ]
)
"""The columns that a completion adds: fields of `Completion`, besides the first and the last."""


class EngineActor:
    """An engine for `Dataset.map_batches`.

        prompts = ray.data.read_json("prompts.jsonl", lines=True)
        completed = prompts.map_batches(
            EngineActor,
            fn_constructor_kwargs={"model": "/models/GLM-4.7-Flash", "dtype": "bfloat16", "max_rows": 64},
            batch_format="pyarrow",
            batch_size=1024,
            compute=ray.data.ActorPoolStrategy(size=8),
            num_gpus=1,
        )
        completed.write_parquet("completed")

    A record has a text `prompt` or `prompt_token_ids`. Columns named like fields of `SamplingParams` override
    `sampling` where they are not null. All columns are kept, and these are added:

    index: the index among the prompt's `n` completions; each completion is a record.
    token_ids, text, finish_reason, error, acceptance_length: see `Completion`. A record that cannot be completed, such
        as one with too long a prompt, has the `finish_reason` "error"; the others continue.
    token_logprobs: a list for each token, the chosen one first; null without `logprobs`.

    An engine is partly idle while a batch's last completions end: make `batch_size` many times `max_rows`. For
    different samples of equal prompts, give each record its own `seed`, or use one record with `n`. For a rerun with
    the same bits in any batch, as sampling in low precision needs, set `batch_invariant`.
    """

    def __init__(
        self,
        model: str | Path = SHIPPED_MODEL,
        *,
        tokenizer: str | Path | None = None,
        dtype: str | None = None,
        device: str | None = None,
        quantize: Literal["fp8"] | None = None,
        dequantize: bool = False,
        sampling: SamplingParams | None = None,
        max_new_tokens: int = DEFAULT_MAX_TOKENS,
        **settings: Unpack[EngineSettings],
    ) -> None:
        """Load a checkpoint; each actor has its own.

        Args:
            model, tokenizer: as for `generate`.
            dtype: of weights and caches, torch's name; by default bfloat16 on a GPU, else float32. device: by default
                the actor's first GPU, else the CPU.
            quantize, dequantize: as for `load_model`.
            sampling: for records without their own settings; by default what the checkpoint's `generation_config.json`
                says, else greedy.
            max_new_tokens: limit for records without `max_tokens`.
            settings: of `EngineConfig`; `max_model_len` is at most the model's `max_position_embeddings`.

        Raises:
            MLAError: a bad argument or checkpoint.
        """
        if sampling is not None:
            checked_sampling("sampling", sampling)
        check_integer("max_new_tokens", max_new_tokens, 1)
        self._max_new_tokens = max_new_tokens
        config_of(None, settings)  # checks settings before the checkpoint is read
        self._checkpoint = Checkpoint.load(
            model,
            dtype=None if dtype is None else _dtype(dtype),
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
            mtp=loads_mtp(settings),
            quantize=quantize,
            dequantize=dequantize,
            tokenizer=tokenizer,
            text=False,
        )
        served = self._checkpoint.model
        self._sampling = sampling or SamplingParams(**served.default_sampling)
        if (longest := settings.get("max_model_len")) is not None:
            settings["max_model_len"] = min(longest, served.max_position_embeddings)
        self._engine = Engine(served, tokenizer=self._checkpoint.tokenizer, **settings)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Complete a batch.

        Raises:
            MLAError: the batch is not an Arrow table, has no prompts, or has a column that would be overwritten.
            Exception: from the model.
        """
        _check_columns(batch)
        columns = [name for name in (*_PROMPTS, *_SETTINGS) if name in batch.column_names]
        completions = [
            (record, index, completion)
            for record, given in enumerate(batch.select(columns).to_pylist())
            for index, completion in enumerate(self._ask(given))
        ]
        while self._engine.has_work():
            self._engine.step()
        completed = batch.take(pa.array([record for record, _, _ in completions], pa.int64()))
        results = [_result(index, completion) for _, index, completion in completions]
        for field in _RESULTS:
            values = pa.array([result[field.name] for result in results], field.type)
            completed = completed.append_column(field, values)
        return completed

    def _ask(self, record: dict[str, Any]) -> list[Completion]:
        """The running completions of a record; if it is invalid, one that has ended with an error."""
        try:
            given = {name: value for name, value in record.items() if value is not None}
            if "logit_bias" in given:
                given["logit_bias"] = _biases(given["logit_bias"])
            prompt = self._encode({name: given.pop(name) for name in _PROMPTS if name in given})
            return [
                self._engine.add(prompt, params, max_new_tokens=self._max_new_tokens).completion
                for params in replace(self._sampling, **given).copies()
            ]
        except MLAError as error:
            return [Completion(finish_reason="error", error=str(error))]

    def _encode(self, prompts: dict[str, Any]) -> list[int]:
        if len(prompts) != 1:
            raise MLAError(", ".join(_PROMPTS), "one of them", "both" if prompts else "neither")
        ((name, prompt),) = prompts.items()
        kind = type(prompt)
        if kind is not _PROMPTS[name]:
            raise MLAError(name, f"a {_PROMPTS[name].__name__}", kind.__name__)
        return self._checkpoint.encode(prompt, name)


def _biases(given: Any) -> Any:
    """A map of Arrow, which comes as pairs, or a struct, which has the keys of all records; else what is given."""
    if isinstance(given, list) and all(isinstance(pair, tuple) for pair in given):
        return dict(given)
    return {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given


def _check_columns(batch: object) -> None:
    if not isinstance(batch, pa.Table):
        hint = 'call map_batches(..., batch_format="pyarrow")'
        raise MLAError("batch_format", "Arrow tables", type(batch).__name__, hint)
    if not any(name in batch.column_names for name in _PROMPTS):
        raise MLAError("batch", f"a column {' or '.join(_PROMPTS)}", ", ".join(batch.column_names) or "none")
    reserved = [name for name in _RESULTS.names if name in batch.column_names]
    if reserved:
        hint = "rename them with Dataset.rename_columns"
        raise MLAError("batch", "no column named like a result", ", ".join(reserved), hint)


def _result(index: int, completion: Completion) -> dict[str, Any]:
    own = {"index": index, "token_logprobs": _logprobs(completion)}
    return {name: getattr(completion, name) for name in _RESULTS.names if name not in own} | own


def _logprobs(completion: Completion) -> list[list[dict[str, Any]]] | None:
    if completion.logprobs is None:
        return None
    return [
        [{"token_id": token, "logprob": found.logprob, "rank": found.rank} for token, found in place.items()]
        for place in completion.logprobs
    ]


def _dtype(name: object) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise MLAError("dtype", "the name of a torch dtype", repr(name), 'such as "bfloat16"')
    return found
