"""`mla-compile inspect`: what the passes make of a checkpoint's graph."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from mla_compile.engine.text import DEFAULT_DRAFTS, SHIPPED_MODEL
from mla_compile.errors import MLAError
from mla_compile.explanation.inspect import inspect_forward, inspect_step
from mla_compile.models import load_model
from mla_compile.speculate.step import MAX_DRAFTS


def inspect(
    *,
    model: Annotated[
        Path,
        Option(metavar="DIR", help="Checkpoint in Hugging Face format.", show_default="the shipped model"),
    ] = SHIPPED_MODEL,
    num_speculative_tokens: Annotated[
        int, Option(metavar="K", min=0, max=MAX_DRAFTS, help="Drafts: a decode row has K + 1 tokens.")
    ] = DEFAULT_DRAFTS,
    rows: Annotated[int, Option(metavar="R", min=0, max=4096, help="Decode rows.")] = 4,
    prefill_tokens: Annotated[
        int | None,
        Option(
            metavar="N", min=0, max=65536, help="Tokens of a prompt chunk.", show_default="48; 0 in a step"
        ),
    ] = None,
    step: Annotated[
        bool, Option("--step", help="The whole decode step, drafts included, not a forward of a mixed batch.")
    ] = False,
    output: Annotated[
        Path | None, Option(metavar="FILE.svg", help="Save a picture too.", show_default=False)
    ] = None,
) -> None:
    """Show the graph before and after the passes, attention segment by segment; nothing runs."""
    if step and prefill_tokens:
        raise MLAError("--prefill-tokens", "0 with --step, which only decodes", prefill_tokens)
    if output is not None and output.suffix.lower() != ".svg":
        raise MLAError("--output", "a file name that ends in .svg", output)
    checkpoint = load_model(model)
    if step:
        explanation = inspect_step(checkpoint, num_speculative_tokens=num_speculative_tokens, rows=rows)
    else:
        explanation = inspect_forward(
            checkpoint,
            num_speculative_tokens=num_speculative_tokens,
            rows=rows,
            prefill_tokens=48 if prefill_tokens is None else prefill_tokens,
        )
    typer.echo(str(explanation), nl=False)
    if output is not None:
        try:
            explanation.save(output)
        except OSError as error:
            raise MLAError("--output", "a file that can be written", output, str(error)) from error
        typer.echo(f"\npicture: {output}")
