"""What goes between the server's process and the engine's, pickled: both are ours."""

from dataclasses import dataclass, field
from typing import Any, Literal

from mla_compile.engine.reports import Logprob
from mla_compile.engine.stats import EngineStats
from mla_compile.errors import MLAError
from mla_compile.sampling_params import SamplingParams
from mla_compile.serving.settings import ServerSettings

MAX_CHOICES = 128
"""The most choices of a request, where the server takes as many at once."""


@dataclass(frozen=True)
class GrammarSource:
    """A grammar as a client gave it: JSON text of a schema, a regular expression, or Lark rules."""

    kind: Literal["json_schema", "regex", "ebnf"]
    text: str


@dataclass(frozen=True)
class Asked:
    """One completion that the engine is asked for.

    prompt: token ids. params: of one completion (`n` is 1), with `max_tokens`.
    max_drafts: see `Engine.add`.
    """

    prompt: list[int]
    params: SamplingParams
    grammar: GrammarSource | None = None
    max_drafts: int | None = None


@dataclass(frozen=True)
class Add:
    """To the engine: a request. key: by which updates and `Abort` name it. client: see `Engine.add`."""

    key: int
    asked: Asked
    client: str | None = None


@dataclass(frozen=True)
class Abort:
    """To the engine: nobody waits for a request any more."""

    key: int


@dataclass
class Update:
    """What a completion has grown by, or how it ended.

    token_ids, draft_positions, logprobs: the new ones, as in `Completion`.
    finish_reason, error: as in `Completion`; None while it runs.
    text: all of the text, where a stop string cut it.
    is_refused: whether the request itself was wrong, as `error` says.
    """

    token_ids: list[int] = field(default_factory=list)
    draft_positions: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    text: str | None = None
    error: str | None = None
    is_refused: bool = False

    def extend(self, later: "Update") -> None:
        """Add what came after this one."""
        self.token_ids += later.token_ids
        self.draft_positions += later.draft_positions
        if self.logprobs is not None:
            self.logprobs += later.logprobs or []
        self.finish_reason, self.text = later.finish_reason, later.text
        self.error, self.is_refused = later.error, later.is_refused


@dataclass(frozen=True)
class ModelLimits:
    """What a request is held to.

    max_model_len: its tokens, prompt included.
    max_choices: its completions, of all prompts together.
    max_stop_token_ids: more places than the step was compiled with (see `stop_id_places`, less the model's own stop
        ids) would have it compiled anew, and all requests wait.
    drafter, num_speculative_tokens: what drafts, and how much; which /v1/models tells.
    """

    model_name: str
    vocab_size: int
    max_model_len: int
    max_choices: int = MAX_CHOICES
    max_stop_token_ids: int = 7
    drafter: str = "mtp"
    num_speculative_tokens: int = 0


@dataclass(frozen=True)
class Ready:
    """From the engine: it is warm. stats: how things stand before the first request."""

    limits: ModelLimits
    stats: EngineStats


@dataclass(frozen=True)
class Progress:
    """From the engine, after a step: updates by key, and how things stand.

    updates: keys, each with the fields of an `Update`: plain tuples are pickled in a fifth of the time.
    read_at: when the step's report was read, by `time.monotonic`, one clock for all processes of a machine.
    """

    updates: list[tuple[int, tuple[Any, ...]]]
    stats: EngineStats
    read_at: float


@dataclass(frozen=True)
class Failed:
    """From the engine, and its last: why. mistake: of whoever set it up."""

    message: str
    mistake: MLAError | None = None


ToEngine = ServerSettings | Add | Abort
"""The settings come first, and once."""
FromEngine = Ready | Progress | Failed
