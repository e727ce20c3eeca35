"""`mla-compile generate`: complete prompts with a checkpoint."""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from typer import Option

from mla_compile.cli.machine import cannot_compile, pick_device
from mla_compile.cli.progress import progress
from mla_compile.cli.requests import Request, check_text, read_requests, result_line, whole_file
from mla_compile.engine import Checkpoint, Completion, Grammar, TextStream, fitting_engine
from mla_compile.engine.text import DEFAULT_DRAFTS, SHIPPED_MODEL
from mla_compile.errors import MLAError
from mla_compile.speculate import SamplingParams
from mla_compile.speculate.drafter import DrafterName
from mla_compile.speculate.step import MAX_DRAFTS


def generate(
    *,
    model: Annotated[
        Path,
        Option(metavar="DIR", help="Checkpoint in Hugging Face format.", show_default="the shipped model"),
    ] = SHIPPED_MODEL,
    tokenizer: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Where to take the tokenizer from, if the checkpoint's own is code, which is never run.",
            show_default="the checkpoint's",
        ),
    ] = None,
    prompt: Annotated[
        str | None, Option(metavar="TEXT", help="A prompt; its completion is streamed.")
    ] = None,
    input_file: Annotated[
        Path | None,
        Option(
            "--input",
            metavar="FILE",
            help='Prompts, one a line: {"prompt": TEXT} or {"prompt_token_ids": [ID, ...]}.',
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        Option("--output", metavar="FILE", help="Where the JSON lines go.", show_default="stdout"),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        Option(
            metavar="K",
            min=0,
            max=MAX_DRAFTS,
            help="Tokens drafted per step; the completions are the same whatever K is.",
            show_default=f"{DEFAULT_DRAFTS} if the checkpoint has an MTP layer or --drafter is given, else 0",
        ),
    ] = None,
    drafter: Annotated[
        DrafterName | None,
        Option(
            help="What drafts: the MTP layer, or a look-up in the text so far.",
            show_default="mtp if the checkpoint has an MTP layer; else ngram if K is given; else nothing drafts",
        ),
    ] = None,
    adaptive_draft_length: Annotated[
        bool,
        Option(
            "--adaptive-draft-length",
            help="Draft 0 to K tokens per step, whatever gives the most tokens a second; compiles K + 1 steps.",
        ),
    ] = False,
    max_new_tokens: Annotated[int, Option(metavar="N", min=1, help="Tokens per completion at most.")] = 128,
    temperature: Annotated[
        float, Option(metavar="T", help="0 is greedy; the next four apply above 0.")
    ] = 0.0,
    top_k: Annotated[int, Option(metavar="N", help="Sample from the N most likely tokens; 0: from all.")] = 0,
    top_p: Annotated[
        float, Option(metavar="P", help="Sample from the likeliest tokens that sum to probability P.")
    ] = 1.0,
    min_p: Annotated[
        float, Option(metavar="P", help="Sample from tokens at least P times as likely as the likeliest.")
    ] = 0.0,
    seed: Annotated[int, Option(metavar="N", help="The same seed gives the same tokens.")] = 0,
    repetition_penalty: Annotated[
        float, Option(metavar="R", help="Divide logits of tokens in prompt or completion by R; 1: do not.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, Option(metavar="X", help="Subtract X from logits of tokens in the completion.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, Option(metavar="X", help="Subtract X as often as the completion has the token.")
    ] = 0.0,
    stop: Annotated[
        list[str] | None,
        Option(metavar="TEXT", help="End a completion before this text; may be given several times."),
    ] = None,
    logprobs: Annotated[
        int | None,
        Option(metavar="N", help="Write logprobs of the chosen and the N likeliest tokens to JSON lines."),
    ] = None,
    json_schema: Annotated[
        Path | None,
        Option(metavar="FILE", help="Completions are JSON that this schema allows; needs llguidance."),
    ] = None,
    regex: Annotated[
        str | None, Option(metavar="R", help="Completions match this; needs llguidance.")
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], Option(help="Of weights and cache.")] = "float32",
    device: Annotated[
        str | None,
        Option(metavar="NAME", help="cpu, cuda or cuda:N.", show_default="cuda if there is one, else cpu"),
    ] = None,
    compile: Annotated[bool, Option("--compile/--no-compile", help="Compile the decode step.")] = True,
) -> None:
    """Complete prompts with a checkpoint.

    The completion of a --prompt is streamed to stdout. The prompts of --input are completed together and give one JSON
    line each, in order: token_ids, text, finish_reason ("stop" or "length"), acceptance_length and, with --logprobs,
    logprobs: for each token, {ID: {"logprob": ..., "rank": ...}, ...}. Where --json-schema or --regex comes to a dead
    end, finish_reason is "error", and error says why.
    """
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logprobs=logprobs,
        stop=stop or (),
    )
    requests = _requests(prompt, input_file, output_file)
    place = pick_device(device)
    compile = compile and _can_compile(place)
    with _writer(output_file, streamed=prompt is not None) as write:
        mtp = False if num_speculative_tokens == 0 or drafter == "ngram" else None
        text = any(isinstance(request.prompt, str) for request in requests)
        text = text or bool(stop or json_schema or regex)
        checkpoint = Checkpoint.load(
            model, dtype=getattr(torch, dtype), device=place, mtp=mtp, tokenizer=tokenizer, text=text
        )
        prompts = [checkpoint.encode(request.prompt, request.name) for request in requests]
        grammar = _grammar(json_schema, regex, checkpoint)
        engine = fitting_engine(
            checkpoint,
            prompts,
            num_speculative_tokens=num_speculative_tokens,
            drafter=drafter,
            adaptive_draft_length=adaptive_draft_length,
            max_new_tokens=max_new_tokens,
            compile=compile,
        )
        if compile and grammar is None:  # with one, steps run in halves, compiled when they are first met
            with _on_terminal("compiling the step"):
                engine.warm_up(sampling=sampling, stop_ids=checkpoint.stop_ids)
        updates = engine.stream(
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_ids=checkpoint.stop_ids,
            grammars=grammar,
        )
        if prompt is not None:
            completions = _show(prompt, updates, checkpoint, sampling.stop_strings)
        else:
            with _on_terminal(f"completing {len(prompts)} prompts"):
                *_, completions = updates
        write(result_line(completion) for completion in completions)


def _requests(prompt: str | None, input_file: Path | None, output_file: Path | None) -> list[Request]:
    if (prompt is None) == (input_file is None):
        got = "neither" if prompt is None else "both"
        raise MLAError("--prompt, --input", "one of them", got)
    if prompt is not None:
        check_text(prompt, "--prompt")
        return [Request(prompt, "--prompt")]
    assert input_file is not None
    if output_file is not None and input_file.resolve() == output_file.resolve():
        raise MLAError("--output", "another file than --input", output_file)
    return read_requests(input_file)


def _grammar(json_schema: Path | None, regex: str | None, checkpoint: Checkpoint) -> Grammar | None:
    if json_schema is None and regex is None:
        return None
    if json_schema is not None and regex is not None:
        raise MLAError("--json-schema, --regex", "one of them", "both")
    if checkpoint.tokenizer is None:
        raise MLAError("--json-schema, --regex", "a checkpoint with a tokenizer", "one without")
    if regex is not None:
        return Grammar.from_regex(regex, checkpoint.tokenizer)
    assert json_schema is not None
    try:
        schema = json_schema.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise MLAError(f"--json-schema {json_schema}", "a readable file in UTF-8", error) from error
    return Grammar.from_json_schema(schema, checkpoint.tokenizer)


def _can_compile(device: torch.device) -> bool:
    why_not = cannot_compile() if device.type == "cpu" else None
    if why_not is not None:
        typer.echo(f"mla-compile: {why_not}; running without compilation, slowly", err=True)
    return why_not is None


def _writer(
    output_file: Path | None, *, streamed: bool
) -> AbstractContextManager[Callable[[Iterable[str]], None]]:
    """Where the JSON lines go: to the file, else to stdout unless the text itself went there."""
    if output_file is not None:
        return whole_file(output_file)
    return nullcontext(lambda lines: None if streamed else typer.echo("\n".join(lines)))


def _on_terminal(what: str) -> AbstractContextManager[None]:
    """A progress line for a person; scripts see on stderr nothing but errors."""
    console = Console(stderr=True)
    return progress(what, console) if console.is_terminal else nullcontext()


def _show(
    prompt: str, updates: Iterable[list[Completion]], checkpoint: Checkpoint, stop: Sequence[str]
) -> list[Completion]:
    """Print the text of the only completion while it grows; a terminal shows the prompt before it."""
    assert checkpoint.tokenizer is not None  # or the prompt could not have been encoded
    stream = TextStream(checkpoint.tokenizer, stop)
    if sys.stdout.isatty():
        typer.secho(prompt, nl=False, dim=True)
    completions: list[Completion] = []
    for completions in updates:
        typer.echo(stream.feed(completions[0]), nl=False)
    typer.echo()
    if completions[0].error is not None:
        typer.echo(f"mla-compile: {completions[0].error}", err=True)
    return completions
