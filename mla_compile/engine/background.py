"""Compiles steps in a thread while the engine runs them eagerly."""

import contextvars
import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable

from mla_compile.torch_internals import tracing_this_thread

log = logging.getLogger(__name__)

SWITCH_INTERVAL = 1e-4
"""Seconds that a thread may hold Python's interpreter lock while another one waits for it. A step waits for the lock
after each of its ops, so with Python's 5 ms an eager step of 40 ms takes 2.6 s beside a compilation; with this 0.2 to
0.7 s (the shipped model, 2 cores)."""

PATIENCE = 3.0
"""Seconds that the program's end waits for a job to stop. A job that waits longer waits for the C++ compiler."""

_RUNS = threading.Lock()


def run_in_background(what: str, job: Callable[[], None]) -> threading.Thread | None:
    """Run a job in a thread, after those before it. The end of the program stops it.

    what: its name in the warning if it fails. Returns the thread; None if the program is ending.
    """
    # With the caller's context, which has its settings of torch.
    arguments = _run, what, job
    thread = threading.Thread(
        target=contextvars.copy_context().run, args=arguments, name="mla-compile", daemon=True
    )
    try:
        # Before any handler of `atexit`: they end what the job uses.
        threading._register_atexit(_stop, thread)  # type: ignore[attr-defined]
        thread.start()
    except RuntimeError as error:  # the program is ending
        log.warning("%s was not started; it runs eagerly: %s", what, error)
        return None
    return thread


def _run(what: str, job: Callable[[], None]) -> None:
    with _RUNS:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(min(interval, SWITCH_INTERVAL))
        try:
            with tracing_this_thread():
                job()
        except Exception as error:
            log.warning("%s failed; it runs eagerly: %s", what, error)
        finally:
            sys.setswitchinterval(interval)


def _stop(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread. The interpreter would kill it, and the process too if C++ code is on its stack."""
    deadline = time.monotonic() + PATIENCE
    while thread.is_alive() and time.monotonic() < deadline:
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        thread.join(0.1)
