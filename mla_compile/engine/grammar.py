"""Tokens that follow a grammar: JSON schema, regex or EBNF, matched by llguidance on the host.

The mask of a verify step's position j follows from the row's own emitted tokens and its own first j drafts. So it is
the mask that plain decoding would have there, and speculation changes no token.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mla_compile.engine.completion import Completion
from mla_compile.engine.reports import RowReport
from mla_compile.errors import MLAError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase


class Grammar:
    """What a completion may say, compiled for one tokenizer; any number of rows and streams may share it.

    A row that ends with finish_reason "stop" has said, before its stop id, exactly a text of the grammar; one that ends
    with "length" has said the beginning of one. "error" is a dead end: the grammar wants what no token can spell.

    Args:
        source: a grammar in llguidance's JSON or Lark form; usually made by one of the `from_` methods.
        tokenizer: a fast tokenizer of transformers with an end-of-sequence token, as `load_tokenizer` returns.
        name: what errors call the grammar.

    Raises:
        MLAError: a malformed grammar, with llguidance's message; one that allows nothing that the tokenizer can spell;
            a tokenizer that cannot be used; llguidance is not installed.
    """

    def __init__(self, source: str, tokenizer: "PreTrainedTokenizerBase", name: str = "grammar") -> None:
        known = _known_tokenizer(tokenizer)
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        self._matcher: LLMatcher = LLMatcher(known, source, log_level=0, limits=limits)
        self._matcher.compute_bitmask()  # the first mask tells whether there is anything to say
        if self._matcher.is_error():
            raise MLAError(name, "a grammar that llguidance takes", _message(self._matcher))
        self.vocab_size: int = known.vocab_size
        self.eos_id: int = known.eos_token

    @classmethod
    def from_json_schema(
        cls, schema: str | bool | dict[str, Any], tokenizer: "PreTrainedTokenizerBase"
    ) -> "Grammar":
        """Of JSON values that a schema allows; the schema as JSON text or as what `json.loads` makes of it.

        One space at most stands between its words, as small models go on with spaces for ever; a schema's own
        "x-guidance" (llguidance's options) decides otherwise.
        """
        _require_llguidance()
        from llguidance import LLMatcher

        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            if isinstance(parsed, dict):
                parsed = {"x-guidance": {"whitespace_pattern": " ?"}, **parsed}
            source = LLMatcher.grammar_from_json_schema(json.dumps(parsed))
        except (TypeError, ValueError, RecursionError) as error:
            raise MLAError("json_schema", "a JSON schema", error) from error
        return cls(source, tokenizer, "json_schema")

    @classmethod
    def from_regex(cls, regex: str, tokenizer: "PreTrainedTokenizerBase") -> "Grammar":
        """Of texts that a regular expression matches as a whole, in the syntax of Rust's regex crate."""
        _require_llguidance()
        from llguidance import LLMatcher

        return cls(LLMatcher.grammar_from_regex(regex), tokenizer, "regex")

    @classmethod
    def from_ebnf(cls, rules: str, tokenizer: "PreTrainedTokenizerBase") -> "Grammar":
        """Of texts that `start` derives, in llguidance's dialect of Lark: `start: "yes" | "no" ("!")*`."""
        _require_llguidance()
        from llguidance import LLMatcher

        return cls(LLMatcher.grammar_from_lark(rules), tokenizer, "ebnf")

    def matcher(self, token_ids: Sequence[int] = ()) -> "LLMatcher":
        """A matcher of a row's own that has read these tokens."""
        matcher = self._matcher.deep_copy()
        matcher.consume_tokens(list(token_ids))
        return matcher


def grammar_per_prompt(
    grammars: Grammar | Sequence[Grammar | None] | None,
    *,
    count: int,
    vocab_size: int,
    stop_ids: Sequence[int],
) -> list[Grammar | None]:
    """What was asked for, one entry a prompt.

    Raises:
        MLAError: another number of entries than prompts, what is no grammar, one for a larger vocabulary than the
            model's, no stop id to end a row with.
    """
    if grammars is None or isinstance(grammars, Grammar):
        grammars = [grammars] * count
    if len(grammars) != count:
        raise MLAError("grammars", f"one entry per prompt ({count})", len(grammars))
    for i, grammar in enumerate(grammars):
        if grammar is None:
            continue
        if not isinstance(grammar, Grammar):
            raise MLAError(f"grammars[{i}]", "a Grammar or None", type(grammar).__name__)
        if grammar.vocab_size > vocab_size:
            expected = f"one for a tokenizer of at most the model's {vocab_size} ids"
            raise MLAError(f"grammars[{i}]", expected, grammar.vocab_size, "use the model's own tokenizer")
        if not any(0 <= token < vocab_size for token in stop_ids):
            expected = "an id of the model's to end a row with, where there are grammars"
            raise MLAError("stop_ids", expected, list(stop_ids), "give the end-of-sequence id")
    return list(grammars)


@dataclass(eq=False)
class _Row:
    """A row with a grammar: its place in the batch, and a matcher that has read `num_read` of its emitted tokens."""

    index: int
    grammar: Grammar
    matcher: "LLMatcher"
    num_read: int = 0

    def read(self, emitted: Sequence[int]) -> None:
        """Take in what was emitted since the last time. No stop id comes here: it ends the row."""
        self.matcher.consume_tokens(list(emitted[self.num_read :]))
        self.num_read = len(emitted)

    def read_draft(self, token: int) -> bool:
        """Take in a draft if the grammar allows it. Ids that it does not know would put the matcher in an error."""
        return token < self.grammar.vocab_size and self.matcher.try_consume_tokens([token]) == 1


@dataclass(frozen=True)
class _DeadEnd:
    """Where a grammar allows no token, or llguidance gives up: after so many of a row's drafts. The row comes there
    only if they are accepted, as plain decoding would."""

    num_drafts: int
    message: str


class GrammarMasks:
    """What the rows of a batch may say at each position of a step.

    Args:
        grammars: of each row; None for a row that is free.
        completions: what each row has emitted; they grow.
        stop_ids: allowed where a grammar's text may end, and only there. Other end-of-sequence ids are not.
        vocab_size: of the model.
        first: the number of the first row among the stream's prompts, for errors.
    """

    def __init__(
        self,
        grammars: Sequence[Grammar | None],
        completions: Sequence[Completion],
        stop_ids: Sequence[int],
        *,
        vocab_size: int,
        first: int = 0,
    ) -> None:
        self._rows = [_Row(i, g, g.matcher()) for i, g in enumerate(grammars) if g is not None]
        self._completions = completions
        self._stop_ids = stop_ids
        self._vocab_size = vocab_size
        self._first = first
        self._dead_ends: dict[int, _DeadEnd] = {}

    def allowed(self, drafts: Tensor) -> Tensor:
        """What the next step may say, bool `[rows, n, vocab_size]`: position j follows a row's first j drafts.

        drafts: int64 `[rows, n - 1]`, of all rows of the state. Those that are free, finished or padding may say
            anything.

        At a dead end the stop ids are allowed, which end the row; `settle` then tells it from a complete text.
        """
        rows = [row for row in self._rows if self._completions[row.index].finish_reason is None]
        shape = drafts.shape[0], drafts.shape[1] + 1, self._vocab_size
        allowed = torch.ones(shape, dtype=torch.bool, device=drafts.device)
        self._dead_ends = {}
        if rows:
            index = torch.tensor([row.index for row in rows], device=drafts.device)
            allowed[index] = self._unpacked(self._masks(rows, drafts).to(drafts.device), rows)
        return allowed

    def settle(self, reports: Sequence[RowReport]) -> list[RowReport]:
        """The reports of the step that `allowed` was asked for. Where a row came to a dead end, the stop id that ended
        it is taken back, and the error says why."""
        settled = list(reports)
        for row, end in self._dead_ends.items():
            report, n = settled[row], end.num_drafts
            if len(report.tokens) > n:
                error = MLAError(f"grammars[{self._first + row}]", "a grammar that goes on here", end.message)
                logprobs = None if report.logprobs is None else report.logprobs[:n]
                settled[row] = RowReport(report.tokens[:n], False, logprobs, str(error))
        return settled

    def _masks(self, rows: list[_Row], drafts: Tensor) -> Tensor:
        """A bit for each id that a row may say at each position, int32 `[len(rows), n, words]`; none at a dead end.

        All bits are set after a draft that the grammar refuses or that ends the row: nothing is emitted there.
        """
        from llguidance.numpy import fill_next_token_bitmask_par

        n, words = drafts.shape[1] + 1, _num_words(self._vocab_size)
        masks = torch.full((len(rows), n, words), -1, dtype=torch.int32)
        guesses = drafts.tolist()
        for row in rows:
            row.read(self._completions[row.index].token_ids)
        ahead, j = dict(enumerate(rows)), 0  # those whose grammars have taken their first j drafts
        while ahead:
            # llguidance takes masks of its tokenizer's size only, and the model's vocabulary may be larger.
            for width in {_num_words(row.grammar.vocab_size) for row in ahead.values()}:
                mine = [i for i, row in ahead.items() if _num_words(row.grammar.vocab_size) == width]
                filled = torch.zeros(len(mine), width, dtype=torch.int32)
                asked = [(rows[i].matcher, place) for place, i in enumerate(mine)]
                fill_next_token_bitmask_par(_executor(), asked, filled.numpy())
                masks[mine, j] = torch.nn.functional.pad(filled, (0, words - width))
            for i, row in list(ahead.items()):
                guess = guesses[row.index]
                if row.matcher.is_error():
                    masks[i, j] = 0
                    self._dead_ends[row.index] = _DeadEnd(j, _message(row.matcher))
                    row.matcher = row.grammar.matcher(self._completions[row.index].token_ids)
                    del ahead[i]
                elif j == n - 1 or guess[j] in self._stop_ids or not row.read_draft(guess[j]):
                    row.matcher.rollback(j)
                    del ahead[i]
            j += 1
        return masks

    def _unpacked(self, masks: Tensor, rows: list[_Row]) -> Tensor:
        """Bits as bool `[len(rows), n, vocab_size]`, with our stop ids in place of llguidance's."""
        bits = masks[..., None] >> torch.arange(32, dtype=torch.int32, device=masks.device)
        allowed = (bits & 1).bool().flatten(2)[..., : self._vocab_size]
        eos = torch.tensor([row.grammar.eos_id for row in rows], device=masks.device)
        eos = eos[:, None, None].expand(-1, masks.shape[1], 1)
        may_end = allowed.gather(2, eos) | (masks == 0).all(dim=2, keepdim=True)
        allowed = allowed.scatter(2, eos, False)
        allowed[..., [token for token in self._stop_ids if 0 <= token < self._vocab_size]] = may_end
        return allowed


def _num_words(vocab_size: int) -> int:
    """Of 32 bits, for a bit an id."""
    return -(-vocab_size // 32)


_tokenizers: WeakKeyDictionary["PreTrainedTokenizerBase", "LLTokenizer"] = WeakKeyDictionary()


def _known_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> "LLTokenizer":
    """llguidance's view of a tokenizer, made once: it takes some 0.02 s for 3,000 ids, a second for 100,000."""
    _require_llguidance()
    from llguidance.hf import from_tokenizer

    if getattr(tokenizer, "eos_token_id", None) is None:
        got = "one without" if hasattr(tokenizer, "eos_token_id") else type(tokenizer).__name__
        raise MLAError("tokenizer", "a tokenizer with an end-of-sequence token", got)
    if tokenizer not in _tokenizers:
        try:
            _tokenizers[tokenizer] = from_tokenizer(tokenizer)
        except Exception as error:  # whatever the Rust side says
            raise MLAError("tokenizer", "a fast tokenizer that llguidance can read", error) from error
    return _tokenizers[tokenizer]


def _require_llguidance() -> None:
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        mend = "pip install 'mla-compile[grammar]'"
        raise MLAError("llguidance", "the package, which matches grammars", "none", mend) from error


@functools.cache
def _executor() -> "LLExecutor":
    """The threads that fill masks."""
    from llguidance import LLExecutor

    return LLExecutor()


def _message(matcher: "LLMatcher") -> str:
    """llguidance's error, on one line."""
    return " ".join(matcher.get_error().split())
