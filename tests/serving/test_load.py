"""A server under load: see `load.py`. LOAD_SECONDS: how long; a minute by default."""

import asyncio
import os

import pytest

from tests.serving.load import ENGINE_THREADS, FLAGS, Load, problems, run
from tests.serving.servers import served

SECONDS = float(os.environ.get("LOAD_SECONDS", "60"))


@pytest.mark.load
@pytest.mark.timeout(1200 + 2 * SECONDS)
def test_200_streams_get_what_each_gets_alone_while_others_vanish_and_stall() -> None:
    load = Load(SECONDS)
    with served(*FLAGS, **ENGINE_THREADS) as server:
        seen = asyncio.run(run(server, load))
    print(seen.summary())
    assert not problems(seen, load)
