"""Messages between the server's process and the engine's, pickled, as both processes are trusted."""

from dataclasses import dataclass, field
from typing import Any, Literal

from mla_compile.engine.reports import Logprob
from mla_compile.engine.stats import EngineStats
from mla_compile.errors import MLAError
from mla_compile.sampling_params import SamplingParams
from mla_compile.serving.settings import ServerSettings

MAX_CHOICES = 128
"""Maximum choices of a request, if the server can hold as many."""


@dataclass(frozen=True)
class GrammarSource:
    """A client's grammar: JSON text of a schema, a regular expression, or Lark rules."""

    kind: Literal["json_schema", "regex", "ebnf"]
    text: str


@dataclass(frozen=True)
class Asked:
    """One completion to request from the engine.

    prompt: token ids. params: of one completion (`n` is 1), with `max_tokens`.
    priority, max_drafts: see `Engine.add`.
    """

    prompt: list[int]
    params: SamplingParams
    grammar: GrammarSource | None = None
    priority: int = 0
    max_drafts: int | None = None


@dataclass(frozen=True)
class Add:
    """To the engine: a request. key: identifies it in updates and `Abort`. client: see `Engine.add`."""

    key: int
    asked: Asked
    client: str | None = None


@dataclass(frozen=True)
class Abort:
    """To the engine: abort a request."""

    key: int


@dataclass
class Update:
    """The growth of a completion, or its end.

    token_ids, draft_positions, logprobs: the new ones, as in `Completion`.
    finish_reason, error: as in `Completion`; None while it runs.
    text: all of the text, where a stop string cut it.
    is_refused: whether the request itself was invalid, for the reason in `error`.
    """

    token_ids: list[int] = field(default_factory=list)
    draft_positions: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    text: str | None = None
    error: str | None = None
    is_refused: bool = False

    def extend(self, later: "Update") -> None:
        """Append a later update."""
        self.token_ids += later.token_ids
        self.draft_positions += later.draft_positions
        if self.logprobs is not None:
            self.logprobs += later.logprobs or []
        self.finish_reason, self.text = later.finish_reason, later.text
        self.error, self.is_refused = later.error, later.is_refused


@dataclass(frozen=True)
class ModelLimits:
    """The limits of a request, and the model's description.

    max_model_len: tokens of a request, prompt included.
    max_choices: completions of a request, over all its prompts.
    max_stop_token_ids: `MAX_STOP_IDS`, less the model's own stop ids.
    default_sampling: fields of `SamplingParams`, from the checkpoint, for requests without them.
    drafter, num_speculative_tokens: the drafter's name and drafts per step, for /v1/models.
    """

    model_name: str
    vocab_size: int
    max_model_len: int
    max_choices: int = MAX_CHOICES
    max_stop_token_ids: int = 7
    default_sampling: dict[str, Any] = field(default_factory=dict)
    drafter: str = "mtp"
    num_speculative_tokens: int = 0


@dataclass(frozen=True)
class Ready:
    """From the engine: it is warm. stats: before the first request."""

    limits: ModelLimits
    stats: EngineStats


@dataclass(frozen=True)
class Progress:
    """From the engine, after a step, or as a sign that it is there: updates by key, and stats.

    updates: keys, each with the fields of an `Update`, as plain tuples are pickled in a fifth of the time.
    read_at: when the step's report was read, by `time.monotonic`, which all processes of a machine share.
    """

    updates: list[tuple[int, tuple[Any, ...]]]
    stats: EngineStats
    read_at: float


@dataclass(frozen=True)
class Failed:
    """From the engine, its last message: the reason. mistake: the error, if a setting caused it."""

    message: str
    mistake: MLAError | None = None


ToEngine = ServerSettings | Add | Abort
"""The settings come once, first."""
FromEngine = Ready | Progress | Failed
