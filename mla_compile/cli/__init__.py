"""The `mla-compile` command: signatures in `commands`, what each one does in a file of its own, imported when it runs.

So that help, the version and mistakes in flags come at once, nothing but those files imports torch.
"""

from mla_compile.ending import end_at_ctrl_c


def main() -> None:
    """The `mla-compile` command."""
    end_at_ctrl_c()  # before anything else: the imports take a while too
    from mla_compile.cli.app import run

    run()


__all__ = ["main"]
