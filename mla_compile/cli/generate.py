"""`mla-compile generate`: complete prompts with a checkpoint."""

import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import torch
import typer

from mla_compile.cli.machine import cannot_compile, pick_device
from mla_compile.cli.prompts import GivenPrompt, Write, result_line
from mla_compile.cli.streams import quiet_libraries
from mla_compile.engine import Checkpoint, Completion, Grammar, TextStream, fitting_engine
from mla_compile.engine.intake import Intake
from mla_compile.engine_settings import CheckpointSettings, EngineSettings
from mla_compile.errors import MLAError
from mla_compile.progress import announce_if_slow
from mla_compile.speculate.drafter import loads_mtp

_GRAMMARS = {
    "--json-schema": Grammar.from_json_schema,
    "--regex": Grammar.from_regex,
    "--grammar": Grammar.from_ebnf,
}


def complete(
    given: list[GivenPrompt],
    write: Write,
    *,
    model: Path,
    checkpoint_settings: CheckpointSettings,
    max_new_tokens: int,
    grammar: tuple[str, str] | None,
    **settings: Unpack[EngineSettings],
) -> None:
    """Complete the prompts, and `write` a line for each; the completion of --prompt is printed as it grows.

    grammar: its flag and its text. settings: of the engine. The others: see the command.
    """
    place = pick_device(checkpoint_settings.device)
    if settings["compile"] is not False and not _can_compile(place, must=settings["batch_invariant"]):
        settings["compile"] = False
    text = grammar is not None or any(
        isinstance(each.prompt, str) or each.sampling({}).stop_strings for each in given
    )
    checkpoint = Checkpoint.load(
        model,
        mtp=loads_mtp(settings),
        text=text,
        **{**checkpoint_settings.of_checkpoint(), "device": place},
    )
    with quiet_libraries():
        prompts = [checkpoint.encode(each.prompt, each.name) for each in given]
    sampling = [each.sampling(checkpoint.model.default_sampling) for each in given]
    intake = Intake(checkpoint.model, checkpoint.model.max_position_embeddings, checkpoint.tokenizer)
    for each, prompt, params in zip(given, prompts, sampling, strict=True):
        if each.line is not None:  # else the engine's error becomes the flag's
            with each.named_in_errors():
                intake.request(prompt, replace(params, n=1), max_new_tokens, None, None)
    rules = None if grammar is None else _grammar(*grammar, checkpoint)
    engine = fitting_engine(checkpoint, prompts, max_new_tokens=max_new_tokens, sampling=sampling, **settings)
    # Steps of other requests than the first, and those with grammars, are compiled on first use.
    if grammar is None and engine.compiles_first:
        waits = len(prompts) > engine.config.max_rows  # else all prompts start together
        engine.warm_up(sampling=sampling[0], prompts=waits)
    updates = engine.stream(prompts, sampling, max_new_tokens=max_new_tokens, grammars=rules)
    if given[0].line is None:  # it is --prompt
        completions = _show(given[0], updates, checkpoint)
    else:
        with announce_if_slow(f"completing {len(prompts)} prompt{'s' * (len(prompts) > 1)}"):
            *_, completions = updates
    by_prompt: defaultdict[int, list[Completion]] = defaultdict(list)
    for completion in completions:
        by_prompt[completion.prompt_index].append(completion)
    write(result_line(each, by_prompt[i]) for i, each in enumerate(given))


def _grammar(flag: str, text: str, checkpoint: Checkpoint) -> Grammar:
    if checkpoint.tokenizer is None:
        raise MLAError(flag, "a checkpoint with a tokenizer", "one without")
    return _GRAMMARS[flag](text, checkpoint.tokenizer)


def _can_compile(device: torch.device, *, must: bool) -> bool:
    why_not = cannot_compile() if device.type == "cpu" else None
    if why_not is not None:
        if must:
            raise MLAError("--batch-invariant", "a machine that can compile steps", why_not)
        typer.echo(f"mla-compile: {why_not}; running without compilation, slowly", err=True)
    return why_not is None


def _show(
    given: GivenPrompt, updates: Iterable[list[Completion]], checkpoint: Checkpoint
) -> list[Completion]:
    """Print a prompt's completions one after another; the first that has not ended is printed as it grows.

    On a terminal, the prompt precedes each.
    """
    assert checkpoint.tokenizer is not None  # encoding the prompt needed it
    completions: list[Completion] = []
    stream, shown = None, 0
    for completions in updates:
        while shown < len(completions):
            completion = completions[shown]
            if stream is None:
                stream = TextStream(checkpoint.tokenizer, given.sampling({}))
                if sys.stdout.isatty():
                    typer.secho(given.prompt, nl=False, dim=True)
            typer.echo(stream.feed(completion), nl=False)
            if completion.finish_reason is None:
                break
            typer.echo()
            if completion.error is not None:
                typer.echo(f"mla-compile: {completion.error}", err=True)
            stream, shown = None, shown + 1
    return completions
