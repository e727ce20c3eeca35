"""The `mla-compile` command: one file per subcommand."""

from mla_compile.cli.app import app, main

__all__ = ["app", "main"]
