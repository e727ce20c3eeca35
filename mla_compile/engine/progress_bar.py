"""A bar for whoever waits for a list of prompts."""

from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mla_compile.engine.completion import Completion


def with_progress_bar(stream: Iterator[list[Completion]]) -> Iterator[list[Completion]]:
    """The same stream, of which a bar on stderr shows how many completions have ended, of how many."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None, tokens=0)
        for completions in stream:
            ended = sum(completion.finish_reason is not None for completion in completions)
            tokens = sum(len(completion.token_ids) for completion in completions)
            bar.update(task, total=len(completions), completed=ended, tokens=tokens)
            yield completions
