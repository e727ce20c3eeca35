"""The engine's process: receives requests over a connection, and sends updates after every step.

Run by `engine_client.py` as `python -m mla_compile.serving.engine_process FD`. It exits when the connection closes.
"""

import gc
import logging
import sys
import time
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from mla_compile.engine import Checkpoint, Engine, Grammar
from mla_compile.engine.request import Request
from mla_compile.errors import MLAError, is_request_error, request_error
from mla_compile.sampling_params import MAX_STOP_IDS
from mla_compile.serving import processes
from mla_compile.serving.grammars import GrammarThread, compiled
from mla_compile.serving.messages import (
    MAX_CHOICES,
    Abort,
    Add,
    Failed,
    ModelLimits,
    Progress,
    Ready,
    Update,
)
from mla_compile.serving.settings import ServerSettings
from mla_compile.speculate.drafter import loads_mtp

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_KEPT_GRAMMARS = 64
_BEAT = 1.0
"""Seconds after which `Progress` without news shows that the process does not hang."""


class _Served:
    """The requests of an engine by key."""

    def __init__(self, engine: Engine, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.engine = engine
        self._tokenizer, self._grammars = tokenizer, GrammarThread[Grammar](_KEPT_GRAMMARS)
        self._requests: dict[int, tuple[Request, int]] = {}  # with the number of tokens sent
        self._compiling: dict[int, tuple[Add, Future[Grammar]]] = {}
        self._failed: list[tuple[int, tuple[Any, ...]]] = []

    def is_compiling(self) -> bool:
        """Whether a request waits for its grammar."""
        return bool(self._compiling)

    def take(self, message: Add | Abort) -> None:
        key = message.key
        if isinstance(message, Add):
            self._begin(message)
        elif key in self._requests:
            self.engine.abort(self._requests[key][0])
        else:
            self._compiling.pop(key, None)

    def add_compiled(self) -> None:
        """Start the requests whose grammars are compiled."""
        for key, (message, grammar) in list(self._compiling.items()):
            if grammar.done():
                del self._compiling[key]
                self._begin(message, grammar)

    def _begin(self, message: Add, grammar: Future[Grammar] | None = None) -> None:
        key, asked = message.key, message.asked
        try:
            if asked.grammar is not None and grammar is None:
                work = self._grammars.get(asked.grammar, lambda source: compiled(source, self._tokenizer))
                self._compiling[key] = message, work
                return
            request = self.engine.add(
                asked.prompt,
                asked.params,
                grammar=None if grammar is None else grammar.result(),
                priority=asked.priority,
                max_drafts=asked.max_drafts,
                client=message.client,
            )
            self._requests[key] = request, 0
        except BaseException as error:
            self._fail(key, error)

    def _fail(self, key: int, error: BaseException) -> None:
        """End one request with an error."""
        is_refused = isinstance(error, MLAError)
        why = str(request_error("the request failed", error))
        if not is_refused:
            log.error("a request failed", exc_info=error)
        update = Update(finish_reason="error", error=why, is_refused=is_refused)
        self._failed.append((key, tuple(vars(update).values())))
        if key in self._requests:
            self.engine.abort(self._requests.pop(key)[0])

    def news(self) -> list[tuple[int, tuple[Any, ...]]]:
        """Updates not sent yet, as in `Progress`; forgets requests that have ended."""
        found = []
        for key, (request, num_sent) in list(self._requests.items()):
            num_tokens = len(request.completion.token_ids)
            try:
                if num_tokens > num_sent or request.has_ended:
                    found.append((key, _fields_of_update(request, num_sent)))
                    self._requests[key] = request, num_tokens
            except BaseException as error:
                self._fail(key, error)
                continue
            if request.has_ended:
                del self._requests[key]
        failed, self._failed = self._failed, []
        return found + failed


def _fields_of_update(request: Request, num_sent: int) -> tuple[Any, ...]:
    completion = request.completion
    if completion.text is not None and type(completion.text) is not str:
        raise TypeError(f"the text is of type {type(completion.text).__name__}")
    return (
        completion.token_ids[num_sent:],
        completion.draft_positions[num_sent:],
        None if completion.logprobs is None else completion.logprobs[num_sent:],
        completion.finish_reason,
        completion.text if request.params.stop_strings else None,
        completion.error,
        request.grammar is not None and request.grammar.has_failed,
    )


def serve(connection: Connection, settings: ServerSettings) -> None:
    """Load, warm up, and serve until the connection ends.

    Raises:
        MLAError: a bad setting. Others: from the model.
    """
    served = _load(settings)
    engine = served.engine
    config, stop_ids = engine.config, getattr(engine.model, "stop_ids", [])
    gc.collect()
    gc.freeze()  # compilation leaves millions of objects, which garbage collection in steps should skip
    limits = ModelLimits(
        settings.served_model_name,
        engine.model.vocab_size,
        config.max_model_len,
        max_choices=min(MAX_CHOICES, config.max_rows + settings.max_waiting),
        max_stop_token_ids=MAX_STOP_IDS - len(stop_ids),
        default_sampling=getattr(engine.model, "default_sampling", {}),
        drafter=config.drafter.name,
        num_speculative_tokens=config.num_speculative_tokens,
    )
    connection.send(Ready(limits, engine.stats))
    run(connection, served)


def run(connection: Connection, served: _Served) -> None:
    """Serve until the connection ends."""
    engine, sent_at = served.engine, 0.0
    while True:
        # Waits for a message if idle; polls while another thread compiles a grammar.
        wait = 0.0 if engine.has_work() else 0.002 if served.is_compiling() else _BEAT
        while connection.poll(wait):
            served.take(connection.recv())
            wait = 0.0
        served.add_compiled()
        if engine.has_work():
            engine.step()
        read_at = time.monotonic()
        if (news := served.news()) or read_at - sent_at >= _BEAT:
            connection.send(Progress(news, engine.stats, read_at))
            sent_at = read_at


def _load(settings: ServerSettings) -> _Served:
    config = settings.engine
    checkpoint = Checkpoint.load(
        settings.model,
        mtp=loads_mtp(vars(config)),
        **settings.of_checkpoint(),
    )
    engine = Engine(checkpoint.model, config, tokenizer=checkpoint.tokenizer)
    if engine.compiles_first:
        engine.warm_up()
    else:
        engine.generate([[0]], max_new_tokens=2)
    assert checkpoint.tokenizer is not None, "the server checks this"
    return _Served(engine, checkpoint.tokenizer)


def main(fd: int) -> None:
    """Run the process; the connection's first message is its settings."""
    processes.leave_signals()
    with Connection(fd) as connection:
        try:
            serve(connection, connection.recv())
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # the server has exited
        except MLAError as error:
            connection.send(Failed(str(error), error))
        except BaseException as error:
            if not is_request_error(error):
                raise
            log.exception("the engine failed")
            connection.send(Failed(f"{type(error).__name__}: {error}"))
    sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
