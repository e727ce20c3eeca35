"""`mla-compile demo`: the same text with and without compiling and speculation, side by side."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table

from mla_compile.cli.machine import cannot_compile
from mla_compile.defaults import DEFAULT_DRAFTS
from mla_compile.engine import Checkpoint, Engine, TextStream, fitting_engine

PROMPTS = ("Psalms 23\n\n", "def join(path, *paths):\n")


@dataclass
class Run:
    """One pass over the prompts. Times in seconds; `decoding` starts after each prompt's first token, which prefill
    gives, and `token_ids` has one list for each prompt."""

    compiling: float | None
    decoding: float
    num_steps: int
    token_ids: list[list[int]]

    @property
    def num_decoded(self) -> int:
        return sum(len(ids) - 1 for ids in self.token_ids)


def compare(model: Path, *, max_new_tokens: int, compile: bool) -> None:
    """Complete two prompts uncompiled, compiled, and with speculation; print the text and a table.

    Raises:
        typer.Exit: with exit code 1, the tokens differ.
    """
    # Measured on 2 cores, the shipped model decodes as fast on one thread (11.2 against 11.7 ms a step without drafts,
    # 20.6 against 19.6 ms with 3), and an OpenMP thread that waits for a core that something else uses slows every
    # small op: 1.2 tokens/s were seen. The number is compiled into a step, so it is set first.
    torch.set_num_threads(1)
    console = Console()
    if compile and (why_not := cannot_compile()):
        console.print(f"{why_not}; running without compilation, slowly", style="yellow", highlight=False)
        compile = False
    checkpoint = Checkpoint.load(model, mtp=True)
    size = sum(parameter.numel() for parameter in checkpoint.model.parameters()) / 1e6
    layers = f"{checkpoint.model.arch.num_layers} layers and an MTP layer"
    console.print(
        f"{model.resolve().name}: {layers}, {size:.1f} M parameters, float32, CPU, greedy", highlight=False
    )
    prompts = [checkpoint.encode(prompt) for prompt in PROMPTS]
    # A cold compile takes most of a minute; the uncompiled run shows text meanwhile, and what compiling brings.
    kinds = (
        [(0, False), (0, True), (DEFAULT_DRAFTS, True)] if compile else [(0, False), (DEFAULT_DRAFTS, False)]
    )
    runs = {}
    for k, compiled in kinds:
        title = f"{f'{k} drafts' if k else 'one token'} a step, {'compiled' if compiled else 'not compiled'}"
        console.print(f"\n{title}", style="bold", highlight=False)
        engine = fitting_engine(
            checkpoint, prompts, num_speculative_tokens=k, max_new_tokens=max_new_tokens, compile=compiled
        )
        runs[title] = _run(engine, checkpoint, prompts, max_new_tokens, console, compile=compiled)
    same = len({str(run.token_ids) for run in runs.values()}) == 1
    console.print(_table(runs), f"identical tokens: {'yes' if same else 'NO'}", highlight=False)
    if not same:
        raise typer.Exit(1)


def _run(
    engine: Engine,
    checkpoint: Checkpoint,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    console: Console,
    *,
    compile: bool,
) -> Run:
    """Complete the prompts one after another, the text shown as it comes."""
    assert checkpoint.tokenizer is not None  # `encode` made ids of the prompts
    run = Run(None, 0.0, 0, [])
    if compile:
        start = time.perf_counter()
        engine.warm_up(stop_ids=checkpoint.stop_ids, prompts=False)  # which come one after another
        run.compiling = time.perf_counter() - start
    for text, prompt in zip(PROMPTS, prompts):
        typer.secho(text, nl=False, bold=True)
        stream, start = TextStream(checkpoint.tokenizer), 0.0
        for (completion,) in engine.stream(
            [prompt], max_new_tokens=max_new_tokens, stop_ids=checkpoint.stop_ids
        ):
            start = start or time.perf_counter()
            typer.echo(stream.feed(completion), nl=False)
        run.decoding += time.perf_counter() - start
        run.num_steps += completion.num_steps
        run.token_ids.append(completion.token_ids)
        typer.echo("\n")
    return run


def _table(runs: dict[str, Run]) -> Table:
    table = Table("", *runs)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("tokens/s", *[f"{run.num_decoded / run.decoding:.1f}" for run in runs.values()])
    table.add_row("acceptance length", *[f"{run.num_decoded / run.num_steps:.2f}" for run in runs.values()])
    times = [run.compiling for run in runs.values()]
    table.add_row("time to compile", *["-" if t is None else f"{t:.1f} s" for t in times])
    return table
