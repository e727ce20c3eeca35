"""Orders of rank 0 to the processes that share a model, and heartbeats, which detect a process that has exited.

Messages travel between CPUs, through gloo. So they wait for no GPU, and no GPU waits for them.
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
"""Seconds between two heartbeats."""
PATIENCE = 14.0
"""Seconds without a heartbeat after which rank 0 considers a rank gone. The others wait longer for rank 0, which may be
waiting for another rank."""

_LENGTH, _FRAME = 8, 8192
"""Bytes of a message's length field, and of the first broadcast; a longer message takes a second one."""
_MAX_GATHERED = 4096
"""Bytes of each rank's text in `all_gather`."""
_FOREVER = timedelta(days=3650)
"""Rank 0 may send no message for long. Heartbeats detect ranks that are gone."""

_HERE, _LEAVES, _FIRST_GONE = range(3)
"""Values of a heartbeat: the rank runs; it leaves, as its program ends; `_FIRST_GONE + r`: rank r is gone."""


class Ranks:
    """This process's link to the others of torch.distributed's default group; each process creates one.

    A daemon thread in each process sends a heartbeat every second; it makes no CUDA call, since a collective that waits
    for a dead peer holds the GPU forever. If a peer is gone, the process ends at once with a line on stderr that names
    the peer, and exit status 1. A process shuts down cleanly when its program ends.

    rank, size: of the group.
    follows: whether the main thread runs rank 0's orders: it must finish soon after rank 0 has left.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Separate groups: a program may destroy torch.distributed's before it ends.
        self._messages = gloo_group("mla_compile/messages", _FOREVER)
        # A group for each pair: after a timeout a group is unusable for all of its processes.
        others = range(1, self.size) if self.rank == 0 else [0]
        self._heartbeats = {
            other: gloo_group(
                f"mla_compile/heartbeats of {max(self.rank, other)}", _FOREVER, sorted([self.rank, other])
            )
            for other in others
        }
        self._rank_0_has_left = self.follows = False
        self._state, self._wakes = _HERE, threading.Event()
        self._unreachable: int | None = None
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()
        atexit.register(self.leave)

    # --- messages

    def broadcast(self, content: Any) -> None:
        """Send rank 0's content, any JSON value except None, to the others.

        Raises:
            MLAError: one of them has exited.
        """
        text = json.dumps(content).encode()
        frame = (len(text).to_bytes(_LENGTH, "little") + text).ljust(_FRAME, b"\0")
        message = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        try:
            for part in (message[:_FRAME], message[_FRAME:]) if len(message) > _FRAME else (message,):
                self._messages.broadcast(part, 0).wait()
        except RuntimeError as error:
            self._wait_for_watcher()
            raise MLAError("ranks", "", "one of them exited") from error

    def receive(self) -> Any:
        """Rank 0's next broadcast; None if rank 0 has shut down cleanly."""
        frame = torch.empty(_FRAME, dtype=torch.uint8, device="cpu")
        try:
            self._messages.broadcast(frame, 0).wait()
            end = _LENGTH + int(frame[:_LENGTH].view(torch.int64))
            rest = torch.empty(max(0, end - _FRAME), dtype=torch.uint8, device="cpu")
            if len(rest):
                self._messages.broadcast(rest, 0).wait()
        except RuntimeError:
            self._wait_for_watcher()
            return None
        return json.loads(torch.cat([frame, rest])[_LENGTH:end].numpy().tobytes())

    def agree(self, content: Any) -> Any:
        """Rank 0's content, on every rank; all ranks call this at the same point of their work.

        Raises:
            MLAError: a rank has exited.
        """
        if self.rank == 0:
            self.broadcast(content)
            return content
        received = self.receive()
        if received is None:
            raise MLAError("rank 0", "", "exited")
        return received

    def all_gather(self, text: str) -> list[str]:
        """The text of each rank, cut to 4,096 bytes; all ranks call this at the same point of their work.

        Raises:
            MLAError: one of them has exited.
        """
        padded = text.encode()[:_MAX_GATHERED].ljust(_MAX_GATHERED, b"\0")
        mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        received = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            self._messages.allgather([received], [mine]).wait()
        except RuntimeError as error:
            self._wait_for_watcher()
            raise MLAError("ranks", "", "one of them exited") from error
        return [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in received]

    # --- heartbeats

    def _wait_for_watcher(self) -> None:
        """After an error that a peer's exit would explain: let the watchers detect it and end their processes."""
        time.sleep(2 * BEAT)

    def leave(self) -> None:
        """Announce that this process leaves, as its program ends; the others continue or end by themselves."""
        self._end_watch(_LEAVES)

    def fail(self) -> None:
        """End the other ranks, after an error that perhaps only this rank has.

        If rank 0 has the same error, it ends all of them first.
        """
        if self.rank and self._watcher.is_alive():
            self._wait_for_watcher()
        self._end_watch(_FIRST_GONE + self.rank)

    @property
    def has_failed(self) -> bool:
        """Whether `fail` was called here."""
        return self._state >= _FIRST_GONE

    def _end_watch(self, state: int) -> None:
        atexit.unregister(self.leave)
        self._state = state
        self._wakes.set()
        self._watcher.join()  # each of its waits ends by itself

    def _watch(self) -> None:
        """Exchange heartbeats once a second, until this process or rank 0 leaves."""
        goes_on, here = True, set(range(1, self.size))
        while goes_on:
            self._wakes.wait(BEAT)
            state = self._state
            if self.rank and state >= _FIRST_GONE:
                return  # rank 0 detects the missing heartbeat, and informs the others
            goes_on = self._watch_others(here, state) if self.rank == 0 else self._watch_rank_0(state)
            goes_on = goes_on and state == _HERE
        if self._rank_0_has_left and self.follows:
            self._wakes.wait(PATIENCE)
            if self.follows:  # it waits for a collective that rank 0 is not in
                self._end(0)

    def _watch_others(self, here: set[int], state: int) -> bool:
        """Rank 0's part of a round: receive from all ranks in `here`, then answer. Returns whether any remain."""
        received: dict[int, int | None] = {}
        gone = self._unreachable
        for rank in sorted(here - {gone}):
            received[rank] = self._receive_heartbeat(rank, BEAT if gone else PATIENCE)
            if received[rank] is None and gone is None:
                gone = rank
        for rank in received:
            if gone is not None:
                self._send_heartbeat(_FIRST_GONE + gone, rank, BEAT)
            elif not self._send_heartbeat(state, rank, PATIENCE):
                self._unreachable = rank  # the next round informs the others
        if gone is not None:
            self._end(gone)
        here -= {rank for rank, its_state in received.items() if its_state == _LEAVES}
        return bool(here)

    def _watch_rank_0(self, state: int) -> bool:
        """The other ranks' part of a round. Returns whether rank 0 stays."""
        self._send_heartbeat(state, 0, 2 * PATIENCE)
        answer = self._receive_heartbeat(0, 2 * PATIENCE)
        if answer is None or answer >= _FIRST_GONE:
            self._end(0 if answer is None else answer - _FIRST_GONE)
        self._rank_0_has_left = answer == _LEAVES
        return not self._rank_0_has_left

    def _send_heartbeat(self, state: int, rank: int, seconds: float) -> bool:
        """Whether a rank received the heartbeat within `seconds`: gloo waits for the receiver.

        After a timeout the pair's group is unusable. So timeouts are long: an interpreter that compiles may run no
        other thread for some seconds.
        """
        try:
            tensors = [torch.tensor([state], device="cpu")]
            self._heartbeats[rank].send(tensors, int(self.rank == 0), 0).wait(timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True

    def _receive_heartbeat(self, rank: int, seconds: float) -> int | None:
        """A rank's heartbeat; None without one within `seconds`."""
        state = torch.empty(1, dtype=torch.int64, device="cpu")
        try:
            self._heartbeats[rank].recv([state], int(self.rank == 0), 0).wait(timedelta(seconds=seconds))
        except RuntimeError:
            return None
        return int(state)

    def _end(self, gone: int) -> NoReturn:
        if self.rank == 0:
            self._wait_for_watcher()  # the others, perhaps its children, name the rank before they are killed
        # The main thread may wait for the GPU, which waits for the rank that is gone.
        end_now(f"rank {gone} of {self.size} is gone; rank {self.rank} ends with it", 1)
