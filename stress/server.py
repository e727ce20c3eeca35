"""Two servers that live as long as the command: one under load, one that gets malformed requests.

A case is 45 seconds of 200 streams, beside clients that hang up and clients that stop reading, and 100 malformed
requests. Each answer is what its request gets alone, both servers are idle afterwards, and the memory of the loaded one
grows neither within a case nor after the first ones. 40 cases take more than half an hour.
"""

import argparse
import asyncio
import atexit
from contextlib import ExitStack
from functools import partial

from stress.runner import Case, Draw, command
from stress.soak import Flat
from tests.serving import test_abuse
from tests.serving.load import ENGINE_THREADS, FLAGS, Load, megabytes, problems, run
from tests.serving.servers import children, served

LOAD = Load(45)
MALFORMED = 100
MOST_MEGABYTES = 32


def make(_: argparse.Namespace) -> Case:
    stack = ExitStack()
    atexit.register(stack.close)
    loaded = stack.enter_context(served(*FLAGS, **ENGINE_THREADS))
    abused = stack.enter_context(
        served(*test_abuse.FLAGS, MLA_COMPILE_API_KEY=test_abuse.KEY, **ENGINE_THREADS)
    )
    loaded.url(), abused.url()  # both are ready
    pids = {"server": loaded.process.pid, "engine": children(loaded.process.pid)[0]}
    flat = Flat({name: (partial(megabytes, pid), MOST_MEGABYTES) for name, pid in pids.items()})

    def case(draw: Draw) -> str:
        load = Load(LOAD.seconds, seed=draw.randrange(2**31))
        seen = asyncio.run(run(loaded, load, say=lambda text: None))
        _, wrong = asyncio.run(test_abuse.abuse(abused, MALFORMED, draw.randrange(2**31)))
        assert not (found := problems(seen, load) + wrong), found
        assert "Traceback" not in "".join(loaded.log + abused.log), "a server's log has a traceback"
        flat.check()
        return f"{LOAD.seconds:.0f} seconds of {load.streams} streams, {MALFORMED} malformed requests"

    return case


def main() -> None:
    command("server", make)


if __name__ == "__main__":
    main()
