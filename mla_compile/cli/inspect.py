"""`mla-compile inspect`: what the passes make of a checkpoint's graph."""

from pathlib import Path

import torch
import typer

from mla_compile.errors import MLAError
from mla_compile.explanation.inspect import inspect_forward, inspect_step
from mla_compile.models import load_model
from mla_compile.models.checkpoint import open_checkpoint


def explain_checkpoint(
    model: Path,
    *,
    num_speculative_tokens: int,
    rows: int,
    prefill_tokens: int | None,
    step: bool,
    output: Path | None,
) -> None:
    """Print the graph before and after the passes, and save a picture where `output` names a file."""
    if step:  # which computes rotary frequencies, and takes no tensors without values
        explanation = inspect_step(
            load_model(model), num_speculative_tokens=num_speculative_tokens, rows=rows
        )
    else:
        explanation = inspect_forward(
            open_checkpoint(model, dtype=torch.float32)[0],
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
