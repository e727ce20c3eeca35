"""A fake server for the page, without an engine: a test gives the answers to the byte."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mla_compile.serving

PAGE = Path(mla_compile.serving.__file__).parent / "page.html"
DONE = b"data: [DONE]\n\n"


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def chunk(
    text: str,
    tokens: Sequence[str] = (),
    drafts: Sequence[int] = (),
    reason: str | None = None,
    first_id: int = 0,
) -> dict[str, Any]:
    """A chunk of `/v1/completions` whose tokens have the ids from `first_id` on."""
    choice = {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": reason,
        "token_ids": [*range(first_id, first_id + len(tokens))],
        "token_texts": list(tokens),
        "draft_positions": list(drafts),
    }
    return {"id": "cmpl-1", "object": "text_completion", "model": "small", "choices": [choice], "usage": None}


def plain(tokens: Sequence[str]) -> bytes:
    """A whole answer, each token in a step of its own."""
    chunks = [chunk(token, [token], [0], first_id=at) for at, token in enumerate(tokens)]
    return b"".join(map(event, [*chunks, chunk("", reason="length")])) + DONE


@dataclass
class Answer:
    """pieces: of the body, `pause` seconds between two. held: behind them it stays open until the client goes away."""

    pieces: Sequence[bytes]
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    held: bool = False
    pause: float = 0.0


class PretendedServer(ThreadingHTTPServer):
    """answer: what a completion's body gets. models: what `/v1/models` gets. asked: bodies and headers so far.

    num_vanished: clients that went away from answers that were held.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.reset()

    def reset(self) -> None:
        self.answer: Callable[[dict[str, Any]], Answer] = lambda body: Answer([plain([" a", " b"])])
        self.models = Answer([json.dumps({"object": "list", "data": [{"id": "small"}]}).encode()])
        self.key: str | None = None
        self.asked: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.num_vanished = threading.Semaphore(0)


class _Handler(BaseHTTPRequestHandler):
    server: PretendedServer

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/":
            self._send(Answer([PAGE.read_bytes()], headers={"Content-Type": "text/html; charset=utf-8"}))
        elif self.path == "/v1/models":
            self._send(self._unless_refused(lambda: self.server.models))
        else:
            self._send(Answer([b"{}"], status=404))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((body, dict(self.headers)))
        self._send(self._unless_refused(lambda: self.server.answer(body)))

    def _unless_refused(self, answer: Callable[[], Answer]) -> Answer:
        if self.server.key is None or self.headers["Authorization"] == f"Bearer {self.server.key}":
            return answer()
        return Answer([json.dumps({"error": {"message": "wrong key"}}).encode()], status=401)

    def _send(self, answer: Answer) -> None:
        num_vanished = self.server.num_vanished  # this test's
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(ConnectionError):
            for at, piece in enumerate(answer.pieces):
                time.sleep(answer.pause if at else 0)
                self.wfile.write(piece)
            if answer.held:
                self.connection.recv(1)  # nothing more comes but the end of the connection
        if answer.held:
            num_vanished.release()


@contextmanager
def pretended_server() -> Iterator[PretendedServer]:
    with PretendedServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
