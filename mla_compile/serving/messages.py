"""What goes between the server's process and the engine's."""

from dataclasses import dataclass, field
from typing import Literal

from mla_compile.engine.reports import Logprob
from mla_compile.sampling_params import SamplingParams


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


@dataclass
class Update:
    """What a completion has grown by, or how it ended.

    token_ids, draft_positions, logprobs: the new ones, as in `Completion`.
    finish_reason, error: as in `Completion`; None while it runs.
    text: all of the text, where a stop string cut it.
    """

    token_ids: list[int] = field(default_factory=list)
    draft_positions: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    text: str | None = None
    error: str | None = None
