"""The `mla-compile` command: signatures in `commands`; each command's code in its own file, imported when it runs.

Only those files import torch, so help, the version and errors in flags appear at once.
"""

import signal

from mla_compile.ending import ending_at_ctrl_c, interrupted


def main() -> None:
    """The `mla-compile` command."""
    signal.signal(signal.SIGINT, interrupted)  # first, as the imports take a while too
    with ending_at_ctrl_c(lambda: signal.getsignal(signal.SIGINT) is interrupted):
        from mla_compile.cli.app import run

        run()


__all__ = ["main"]
