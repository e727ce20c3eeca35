"""The processes that share a model, beside the collectives of their steps: what rank 0 tells the others, who is there.

Bytes travel between CPUs, through gloo. So they wait for no GPU, and no GPU waits for them.
"""

import atexit
import json
import threading
import time
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from mla_compile.ending import end_now
from mla_compile.errors import MLAError
from mla_compile.torch_internals import gloo_group

BEAT = 1.0
"""Seconds between two signs of life."""
PATIENCE = 14.0
"""A rank that rank 0 has not heard for so many seconds is gone. The others wait longer for rank 0, which may be waiting
for another."""

_LENGTH, _FRAME = 8, 8192
"""Bytes of a message's length, and of it with what travels beside it; a longer message takes a second broadcast."""
_MOST_SAID = 4096
"""Bytes of what each rank says to all."""
_FOREVER = timedelta(days=3650)
"""Rank 0 may have nothing to say for long. Who is gone is found by the signs of life."""

_HERE, _LEAVES, _FIRST_GONE = range(3)
"""What a sign of life says: the rank is there; it leaves, as its program ends; from the last number on, which rank is
gone."""


class Ranks:
    """This process among those of torch.distributed's default group, all of which make one.

    A daemon thread of each says every second that its process is there; it makes no CUDA call, since a collective that
    waits for a peer which is gone holds the GPU forever. Where a peer is gone, the process ends at once with a line on
    stderr that names it, and exit status 1. A process leaves in peace when its program ends.

    rank, size: of the group.
    follows: whether the main thread runs what rank 0 says: it must be done soon after rank 0 has left.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Groups of their own: a program may destroy torch.distributed's before it ends.
        self._told = gloo_group("mla_compile/told", _FOREVER)
        # A group for each pair: after a timeout no two processes of one hear each other any more.
        others = range(1, self.size) if self.rank == 0 else [0]
        self._signs = {
            other: gloo_group(
                f"mla_compile/signs of {max(self.rank, other)}", _FOREVER, sorted([self.rank, other])
            )
            for other in others
        }
        self._rank_0_has_left = self.follows = False
        self._sign, self._wakes = _HERE, threading.Event()
        self._deaf: int | None = None
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()
        atexit.register(self.leave)

    # --- what rank 0 tells

    def say(self, content: Any) -> None:
        """Rank 0 tells the others what JSON can hold, but for None.

        Raises:
            MLAError: one of them has ended.
        """
        text = json.dumps(content).encode()
        frame = (len(text).to_bytes(_LENGTH, "little") + text).ljust(_FRAME, b"\0")
        told = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        try:
            for part in (told[:_FRAME], told[_FRAME:]) if len(told) > _FRAME else (told,):
                self._told.broadcast(part, 0).wait()
        except RuntimeError as error:
            self._wait_for_verdict()
            raise MLAError("ranks", "processes that hear rank 0", "one that has ended") from error

    def hear(self) -> Any:
        """What rank 0 says next; None where its program has ended in peace."""
        frame = torch.empty(_FRAME, dtype=torch.uint8, device="cpu")
        try:
            self._told.broadcast(frame, 0).wait()
            end = _LENGTH + int(frame[:_LENGTH].view(torch.int64))
            rest = torch.empty(max(0, end - _FRAME), dtype=torch.uint8, device="cpu")
            if len(rest):
                self._told.broadcast(rest, 0).wait()
        except RuntimeError:
            self._wait_for_verdict()
            return None
        return json.loads(torch.cat([frame, rest])[_LENGTH:end].numpy().tobytes())

    def agree(self, content: Any) -> Any:
        """What rank 0 gives here, on every rank, which all call this at the same point of their work.

        Raises:
            MLAError: a rank has ended.
        """
        if self.rank == 0:
            self.say(content)
            return content
        heard = self.hear()
        if heard is None:
            raise MLAError("rank 0", "a process that goes on", "one that has ended")
        return heard

    def of_all(self, text: str) -> list[str]:
        """What each rank says here, cut to 4,096 bytes; all call this at the same point of their work.

        Raises:
            MLAError: one of them has ended.
        """
        said = text.encode()[:_MOST_SAID].ljust(_MOST_SAID, b"\0")
        mine = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        heard = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            self._told.allgather([heard], [mine]).wait()
        except RuntimeError as error:
            self._wait_for_verdict()
            raise MLAError("ranks", "processes that hear one another", "one that has ended") from error
        return [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in heard]

    # --- who is there

    def _wait_for_verdict(self) -> None:
        """After an error that a peer's end would explain: time for threads to notice it, and to end their processes."""
        time.sleep(2 * BEAT)

    def leave(self) -> None:
        """Tell the others that this process leaves, as its program ends; they go on or end by themselves."""
        self._end_watch(_LEAVES)

    def fail(self) -> None:
        """After an error of this rank, perhaps of it alone: the others end.

        Where rank 0 has the same error as another, it is rank 0 who ends all.
        """
        if self.rank and self._watcher.is_alive():
            self._wait_for_verdict()
        self._end_watch(_FIRST_GONE + self.rank)

    @property
    def has_failed(self) -> bool:
        """Whether `fail` was called here."""
        return self._sign >= _FIRST_GONE

    def _end_watch(self, sign: int) -> None:
        atexit.unregister(self.leave)
        self._sign = sign
        self._wakes.set()
        self._watcher.join(2 * PATIENCE)

    def _watch(self) -> None:
        """A round of signs a second, until this process leaves or rank 0 does."""
        goes_on, here = True, set(range(1, self.size))
        while goes_on:
            self._wakes.wait(BEAT)
            sign = self._sign
            if self.rank and sign >= _FIRST_GONE:
                return  # rank 0 misses it, and tells the others
            goes_on = self._look_after(here, sign) if self.rank == 0 else self._look_to_rank_0(sign)
            goes_on = goes_on and sign == _HERE
        if self._rank_0_has_left and self.follows:
            self._wakes.wait(PATIENCE)
            if self.follows:  # it waits for a collective that rank 0 is not in
                self._end(0)

    def _look_after(self, here: set[int], sign: int) -> bool:
        """Rank 0's part of a round: hear all that are `here`, then answer. True: there will be another."""
        heard: dict[int, int | None] = {}
        gone = self._deaf
        for rank in sorted(here - {gone}):
            heard[rank] = self._hear_of(rank, BEAT if gone else PATIENCE)
            if heard[rank] is None and gone is None:
                gone = rank
        for rank in heard:
            if gone is not None:
                self._send(_FIRST_GONE + gone, rank, BEAT)
            elif not self._send(sign, rank, PATIENCE):
                self._deaf = rank  # the others hear of it in the next round
        if gone is not None:
            self._end(gone)
        here -= {rank for rank, its_sign in heard.items() if its_sign == _LEAVES}
        return bool(here)

    def _look_to_rank_0(self, sign: int) -> bool:
        """The others' part of it."""
        self._send(sign, 0, 2 * PATIENCE)
        answer = self._hear_of(0, 2 * PATIENCE)
        if answer is None or answer >= _FIRST_GONE:
            self._end(0 if answer is None else answer - _FIRST_GONE)
        self._rank_0_has_left = answer == _LEAVES
        return not self._rank_0_has_left

    def _send(self, sign: int, rank: int, seconds: float) -> bool:
        """Whether a rank has asked for this sign in so many seconds: gloo waits for that.

        After a timeout the two do not hear each other any more. So who is there gets time: an interpreter that compiles
        may have none for its threads for some seconds.
        """
        try:
            told = [torch.tensor([sign], device="cpu")]
            self._signs[rank].send(told, int(self.rank == 0), 0).wait(timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True

    def _hear_of(self, rank: int, seconds: float) -> int | None:
        """The sign of a rank; None where there is none in so many seconds."""
        sign = torch.empty(1, dtype=torch.int64, device="cpu")
        try:
            self._signs[rank].recv([sign], int(self.rank == 0), 0).wait(timedelta(seconds=seconds))
        except RuntimeError:
            return None
        return int(sign)

    def _end(self, gone: int) -> NoReturn:
        if self.rank == 0:
            self._wait_for_verdict()  # as the others, which may be its children, name the rank before they are killed
        # The main thread may wait for the GPU, which waits for the rank that is gone.
        end_now(f"rank {gone} of {self.size} is gone; rank {self.rank} ends with it", 1)
