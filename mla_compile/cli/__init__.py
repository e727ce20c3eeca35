"""The `mla-compile` command: signatures in `commands`, what each one does in a file of its own, imported when it runs.

So that help, the version and mistakes in flags come at once, nothing but those files imports torch.
"""

import signal

from mla_compile.ending import ending_at_ctrl_c, interrupted


def main() -> None:
    """The `mla-compile` command."""
    signal.signal(signal.SIGINT, interrupted)  # before anything else: the imports take a while too
    with ending_at_ctrl_c(lambda: signal.getsignal(signal.SIGINT) is interrupted):
        from mla_compile.cli.app import run

        run()


__all__ = ["main"]
