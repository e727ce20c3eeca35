"""`mla-compile demo`: compare the same text with and without compilation and speculation."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import typer

from mla_compile.cli.machine import cannot_compile
from mla_compile.defaults import DEFAULT_DRAFTS
from mla_compile.engine import Checkpoint, Engine, TextStream, fitting_engine
from mla_compile.hub import model_name
from mla_compile.sampling_params import SamplingParams

PROMPTS = ("Psalms 23\n\n", "def join(path, *paths):\n")


def compare(model: Path, *, max_new_tokens: int, compile: bool) -> None:
    """Complete two prompts uncompiled, compiled, and with speculation; print the text and the speed.

    Raises:
        typer.Exit: the tokens differ; exit code 1.
    """
    # Measured on 2 cores, the shipped model decodes as fast on one thread (11.2 against 11.7 ms a step without drafts,
    # 20.6 against 19.6 ms with 3), and an OpenMP thread that waits for a core that something else uses slows every
    # small op: 1.2 tokens/s were seen. The number is compiled into a step, so it is set first.
    torch.set_num_threads(1)
    if compile and (why_not := cannot_compile()):
        typer.secho(f"{why_not}; running without compilation, slowly", fg="yellow")
        compile = False
    checkpoint = Checkpoint.load(model, mtp=True)
    size = sum(parameter.numel() for parameter in checkpoint.model.parameters()) / 1e6
    layers = f"{checkpoint.model.arch.num_layers} layers and an MTP layer"
    typer.echo(f"{model_name(model)}: {layers}, {size:.1f} M parameters, float32, CPU, greedy")
    prompts = [checkpoint.encode(prompt) for prompt in PROMPTS]
    # A cold compile takes most of a minute; the uncompiled run before it shows text at once, and the speedup.
    kinds = (
        [(0, False), (0, True), (DEFAULT_DRAFTS, True)] if compile else [(0, False), (DEFAULT_DRAFTS, False)]
    )
    runs = []
    for k, compiled in kinds:
        title = f"{f'{k} drafts' if k else 'one token'} a step, {'compiled' if compiled else 'not compiled'}"
        typer.secho(f"\n{title}", bold=True)
        engine = fitting_engine(
            checkpoint, prompts, num_speculative_tokens=k, max_new_tokens=max_new_tokens, compile=compiled
        )
        if compiled:
            start = time.perf_counter()
            engine.warm_up(sampling=SamplingParams(), prompts=False)  # they run one at a time
            typer.echo(f"time to compile: {time.perf_counter() - start:.1f} s")
        runs.append(_run(engine, checkpoint, prompts, max_new_tokens))
    same = all(run == runs[0] for run in runs)
    typer.echo(f"\nidentical tokens: {'yes' if same else 'NO'}")
    if not same:
        raise typer.Exit(1)


def _run(
    engine: Engine, checkpoint: Checkpoint, prompts: Sequence[list[int]], max_new_tokens: int
) -> list[list[int]]:
    """Complete the prompts one after another; print the text as it grows, then the speed."""
    assert checkpoint.tokenizer is not None  # `encode` made ids of the prompts
    seconds, num_steps, token_ids = 0.0, 0, []
    for text, prompt in zip(PROMPTS, prompts):
        typer.secho(text, nl=False, bold=True)
        stream, start = TextStream(checkpoint.tokenizer), 0.0
        for (completion,) in engine.stream([prompt], SamplingParams(), max_new_tokens=max_new_tokens):
            start = start or time.perf_counter()  # when prefill gives the first token
            typer.echo(stream.feed(completion), nl=False)
        seconds += time.perf_counter() - start
        num_steps += completion.num_steps
        token_ids.append(completion.token_ids)
        typer.echo("\n")
    decoded = sum(len(ids) - 1 for ids in token_ids)
    typer.echo(f"{decoded / seconds:.1f} tokens/s, acceptance length {decoded / num_steps:.2f}")
    return token_ids
