"""Token masks of grammars (JSON schema, regex or EBNF), which llguidance computes on the host.

The mask at position j of a verify step follows from the row's own emitted tokens and its own first j drafts. So it is
the mask that plain decoding would have there, and speculation changes no token.
"""

import functools
import json
import re
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mla_compile.engine.completion import Completion
from mla_compile.engine.reports import RowReport
from mla_compile.errors import MLAError, RequestError, is_request_error, request_error
from mla_compile.models.files import without_repeats

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase


MAX_SOURCE = 2**20
"""Maximum number of characters of a grammar."""
_LIMITS = {"max_grammar_size": 20_000, "initial_lexer_fuel": 500_000}
"""llguidance's limits, so that compiling takes a second or two at most. Larger grammars hardly ever work: its parser
gives up if thousands of alternatives begin at one place."""
_KINDS = {
    "json_schema": "a JSON schema",
    "regex": "a regular expression",
    "ebnf": "rules in Lark's form (`start: ...`)",
}
_TOO_LARGE = re.compile(r"too (big|large|many)|fuel exhausted|row has \d+ items|symbols\.len", re.IGNORECASE)


class Grammar:
    """The texts that a completion may have, compiled for one tokenizer; rows and streams may share a grammar.

    The output of a row that ends with finish_reason "stop" is, before its stop id, a complete text of the grammar; with
    "length" it is the beginning of one. "error" is a dead end: no token produces what the grammar requires next.

    Args:
        source: a grammar in llguidance's JSON or Lark form; usually made by one of the `from_` methods.
        tokenizer: a fast tokenizer of transformers with an end-of-sequence token, as `load_tokenizer` returns.
        name: the grammar's name in errors.

    Raises:
        MLAError: a malformed grammar, with llguidance's message; one that is too large, or allows nothing that the
            tokenizer can produce; an unsupported tokenizer; llguidance is not installed.
    """

    def __init__(self, source: str, tokenizer: "PreTrainedTokenizerBase", name: str = "grammar") -> None:
        known, lib = _known_tokenizer(tokenizer), _llguidance()
        if len(source) > MAX_SOURCE:
            raise MLAError(name, f"at most {MAX_SOURCE} characters", len(source))
        limits = lib.LLParserLimits(verbose_errors=False, **_LIMITS)
        self._matcher: LLMatcher = lib.LLMatcher(known, source, log_level=0, limits=limits)
        self._matcher.compute_bitmask()  # fails if the grammar allows no token
        if self._matcher.is_error():
            kind = _KINDS.get(name, "a grammar")
            raise MLAError(name, f"{kind} that llguidance accepts", _message(self._matcher))
        self.vocab_size: int = known.vocab_size
        self.eos_id: int = known.eos_token

    @classmethod
    def from_json_schema(
        cls, schema: str | bool | dict[str, Any], tokenizer: "PreTrainedTokenizerBase"
    ) -> "Grammar":
        """Allows the JSON values of a schema, given as JSON text without repeated keys or as its `json.loads` result.

        Whitespace is at most one space, as small models may emit spaces for ever; a schema's own "x-guidance"
        (llguidance's options) overrides this.
        """
        lib = _llguidance()
        try:
            parsed = (
                json.loads(schema, object_pairs_hook=without_repeats) if isinstance(schema, str) else schema
            )
            if isinstance(parsed, dict):
                parsed = {"x-guidance": {"whitespace_pattern": " ?"}, **parsed}
            source = lib.LLMatcher.grammar_from_json_schema(json.dumps(parsed))
        except (TypeError, ValueError, RecursionError) as error:
            raise MLAError("json_schema", "a JSON schema", error) from error
        return cls(source, tokenizer, "json_schema")

    @classmethod
    def from_regex(cls, regex: str, tokenizer: "PreTrainedTokenizerBase") -> "Grammar":
        """Allows the texts that a regular expression matches as a whole, in the syntax of Rust's regex crate."""
        source = _llguidance().LLMatcher.grammar_from_regex(_checked_text("regex", regex))
        return cls(source, tokenizer, "regex")

    @classmethod
    def from_ebnf(cls, rules: str, tokenizer: "PreTrainedTokenizerBase") -> "Grammar":
        """Allows the texts that `start` derives, in llguidance's dialect of Lark: `start: "yes" | "no" ("!")*`."""
        source = _llguidance().LLMatcher.grammar_from_lark(_checked_text("ebnf", rules))
        return cls(source, tokenizer, "ebnf")

    def matcher(self, token_ids: Sequence[int] = ()) -> "LLMatcher":
        """A new matcher that has consumed these tokens."""
        matcher = self._matcher.deep_copy()
        matcher.consume_tokens(list(token_ids))
        return matcher


def check_grammar(grammar: object, name: str, *, vocab_size: int, stop_ids: Collection[int]) -> None:
    """Check the grammar of one request, called `name` in errors.

    Raises:
        MLAError: not a grammar, a larger vocabulary than the model's, no stop id to end a row with.
    """
    if not isinstance(grammar, Grammar):
        raise MLAError(name, "a Grammar or None", type(grammar).__name__)
    if grammar.vocab_size > vocab_size:
        expected = f"one for a tokenizer of at most the model's {vocab_size} ids"
        raise MLAError(name, expected, grammar.vocab_size, "use the model's own tokenizer")
    if not any(0 <= token < vocab_size for token in stop_ids):
        expected = "with grammars, an id of the model's vocabulary to end a row with"
        raise MLAError("stop_ids", expected, list(stop_ids), "pass the end-of-sequence id")


class GrammarRow:
    """The grammar state of one row: a matcher that has consumed the emitted tokens, and the dead end of its last masks.

    Args:
        grammar: may be shared by rows.
        completion: what the row has emitted; it grows.
        stop_ids: allowed only after a complete text. Other end-of-sequence ids are never allowed.
        name: the grammar's name in errors.
    """

    def __init__(
        self, grammar: Grammar, completion: Completion, stop_ids: Collection[int], name: str = "grammar"
    ) -> None:
        self.grammar = grammar
        self.stop_ids = stop_ids
        self._matcher: LLMatcher | None = None
        self._completion = completion
        self._name = name
        self._num_read = 0
        self._dead_end: tuple[int, str] | None = None
        """The number of the row's drafts after which the grammar allows no token, or llguidance gives up, and why. The
        row gets there only if they are accepted, as plain decoding would."""
        self.has_failed = False
        """Whether the row has ended at a dead end of its grammar."""
        self.error: RequestError | None = None
        """The error of matching; it ends the row with the step's report."""

    @property
    def matcher(self) -> "LLMatcher":
        """The row's own matcher; created here, as an error here ends this row alone."""
        if self._matcher is None:
            self._matcher = self.grammar.matcher()
        return self._matcher

    def read(self) -> None:
        """Consume the tokens emitted since the last call. They include no stop id, as one ends the row."""
        emitted = self._completion.token_ids
        self.matcher.consume_tokens(list(emitted[self._num_read :]))
        self._num_read = len(emitted)
        self._dead_end = None

    def read_draft(self, token: int) -> bool:
        """Consume a draft if the grammar allows it. Ids outside its vocabulary would put the matcher in an error."""
        if token in self.stop_ids or token >= self.grammar.vocab_size:
            return False
        taken: int = self.matcher.try_consume_tokens([token])
        return taken == 1

    def gets_lost(self, token: int, mask: Tensor) -> bool:
        """Whether `read_draft` refused a token that the mask allows; the matcher is then in an error.

        This happens where the tokenizer drops a character of what the grammar requires: llguidance allows the next one.
        """
        if (
            token in self.stop_ids
            or token == self.grammar.eos_id
            or not int(mask[token // 32]) >> token % 32 & 1
        ):
            return False
        self.matcher.consume_tokens([token])
        return True

    def give_up(self, num_drafts: int) -> None:
        """Record that no token can follow `num_drafts` drafts, and restart from the emitted tokens."""
        is_error = self.matcher.is_error()
        message = _message(self.matcher) if is_error else "one that requires a special token's text"
        self._dead_end = num_drafts, message
        self._matcher = self.grammar.matcher(self._completion.token_ids)

    def fail(self, error: BaseException) -> None:
        """Record the error of matching."""
        self.error = request_error(f"{self._name}: matching failed", error)

    def settle(self, report: RowReport) -> RowReport:
        """The row's report of the step that had these masks. At a dead end it is without the stop id that ended the
        row, and with an error that says why.

        Raises:
            RequestError: making the masks failed.
        """
        if self.error is not None:
            raise self.error
        end, self._dead_end = self._dead_end, None
        if end is None or len(report.tokens) <= end[0]:
            return report
        self.has_failed = True
        n, message = end
        error = MLAError(self._name, "a grammar that can continue here", message)
        logprobs = None if report.logprobs is None else report.logprobs[:n]
        return RowReport(report.tokens[:n], False, report.num_verified, logprobs, str(error))


def allowed_tokens(
    rows: Mapping[int, GrammarRow], drafts: Tensor, *, vocab_size: int, first: Container[int] = ()
) -> Tensor:
    """The tokens that a step may emit, bool `[rows, n, vocab_size]`: position j follows a row's first j drafts.

    Args:
        rows: those with grammars, by their index in the state. All tokens are allowed in other rows.
        drafts: int64 `[rows, n - 1]`, of all rows of the state.
        vocab_size: of the model.
        first: the rows whose first token is to be chosen: it follows no draft.

    At a dead end the stop ids are allowed, which end the row; `GrammarRow.settle` distinguishes it from a complete
    text. All tokens are allowed in a row whose matcher fails: `GrammarRow.settle` ends it.
    """
    guesses = drafts.tolist()
    mine = {row: [] if row in first else guesses[row] for row in rows}
    words = _masks(list(rows.values()), list(mine.values()), drafts.shape[1] + 1, _num_words(vocab_size))
    shape, device = (drafts.shape[0], drafts.shape[1] + 1, vocab_size), drafts.device
    allowed = torch.ones(shape, dtype=torch.bool, device=device)
    allowed[list(rows)] = _unpacked(words.to(device), list(rows.values()), vocab_size)
    return allowed


def _masks(rows: list[GrammarRow], guesses: list[list[int]], n: int, words: int) -> Tensor:
    """Bitmasks of the ids allowed in each row at each position, int32 `[len(rows), n, words]`; 0 at a dead end.

    All bits are set after a draft that the grammar rejects or that ends the row: nothing is emitted there.
    """
    masks = torch.full((len(rows), n, words), -1, dtype=torch.int32, device="cpu")
    ahead, j = {}, 0  # those whose grammars accept their first j drafts
    for i, row in enumerate(rows):
        with _failing_alone(row):
            row.read()
            ahead[i] = row
    while ahead:
        # llguidance fills masks of its tokenizer's size only, and the model's vocabulary may be larger.
        for width in {_num_words(row.grammar.vocab_size) for row in ahead.values()}:
            mine = {i: row for i, row in ahead.items() if _num_words(row.grammar.vocab_size) == width}
            masks[list(mine), j] = torch.nn.functional.pad(
                _filled(list(mine.values()), width), (0, words - width)
            )
        for i, row in list(ahead.items()):
            del ahead[i]
            if row.error is not None:
                continue
            with _failing_alone(row):
                if row.matcher.is_error() or not _keep_end(row, masks[i, j]).any():
                    masks[i, j] = 0
                    row.give_up(j)
                elif j < len(guesses[i]) and row.read_draft(guesses[i][j]):
                    ahead[i] = row
                elif j < len(guesses[i]) and row.gets_lost(guesses[i][j], masks[i, j]):
                    masks[i, j + 1] = 0
                    row.give_up(j + 1)
                else:
                    row.matcher.rollback(j)
        j += 1
    return masks


def _keep_end(row: GrammarRow, words: Tensor) -> Tensor:
    """A mask with the end-of-sequence id only after a complete text. llguidance also allows it where the text of the id
    is a part of what the grammar requires."""
    word, bit = divmod(row.grammar.eos_id, 32)
    if int(words[word]) >> bit & 1 and not row.matcher.is_accepting():
        words[word] ^= 1 << bit if bit < 31 else -(1 << 31)
    return words


def _filled(rows: list[GrammarRow], width: int) -> Tensor:
    """Each row's mask for the next token, int32 `[len(rows), width]`; all bits are set if a row's matcher fails."""
    from llguidance.numpy import fill_next_token_bitmask_par

    masks = torch.zeros(len(rows), width, dtype=torch.int32, device="cpu")
    try:
        asked = [(row.matcher, place) for place, row in enumerate(rows)]
        fill_next_token_bitmask_par(_executor(), asked, masks.numpy())
    except BaseException as error:
        if len(rows) == 1:
            rows[0].fail(error)
            return masks.fill_(-1)
        if not is_request_error(error):
            raise
        return torch.cat([_filled([row], width) for row in rows])  # to find which of them failed
    return masks


@contextmanager
def _failing_alone(row: GrammarRow) -> Iterator[None]:
    """An error inside ends this row alone."""
    try:
        yield
    except BaseException as error:
        row.fail(error)


def _unpacked(masks: Tensor, rows: list[GrammarRow], vocab_size: int) -> Tensor:
    """Masks as bool `[len(rows), n, vocab_size]`, with the rows' stop ids in place of llguidance's."""
    bits = masks[..., None] >> torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (bits & 1).bool().flatten(2)[..., :vocab_size]
    for row, mine, words in zip(rows, allowed, masks, strict=True):
        may_end = mine[:, row.grammar.eos_id] | (words == 0).all(dim=1)
        mine[:, row.grammar.eos_id] = False
        mine[:, [token for token in row.stop_ids if 0 <= token < vocab_size]] = may_end[:, None]
    return allowed


def _num_words(vocab_size: int) -> int:
    """The number of 32-bit words that have a bit for each id."""
    return -(-vocab_size // 32)


_tokenizers: WeakKeyDictionary["PreTrainedTokenizerBase", "LLTokenizer"] = WeakKeyDictionary()


def _known_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> "LLTokenizer":
    """llguidance's form of a tokenizer, built once: that takes some 0.02 s for 3,000 ids, a second for 100,000."""
    _llguidance()
    from llguidance.hf import from_tokenizer

    if getattr(tokenizer, "eos_token_id", None) is None:
        got = "one without it" if hasattr(tokenizer, "eos_token_id") else type(tokenizer).__name__
        raise MLAError("tokenizer", "a tokenizer with an end-of-sequence token", got)
    if tokenizer not in _tokenizers:
        try:
            _tokenizers[tokenizer] = from_tokenizer(tokenizer)
        except Exception as error:  # of whatever type the Rust side raises
            raise MLAError("tokenizer", "a fast tokenizer that llguidance can read", error) from error
    return _tokenizers[tokenizer]


def _checked_text(name: str, given: object) -> str:
    if not isinstance(given, str):
        raise MLAError(name, "a str", repr(given))
    return given


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        hint = "pip install '.[grammar]' in the clone"
        raise MLAError("llguidance", "the package, which matches grammars", "none", hint) from error
    return llguidance


@functools.cache
def _executor() -> "LLExecutor":
    """The threads that fill masks."""
    return cast("LLExecutor", _llguidance().LLExecutor())


def _message(matcher: "LLMatcher") -> str:
    """llguidance's error on one line, or a plainer one for known errors."""
    text = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    text = re.sub(r"^at \d+\(\d+\): ", "", text)  # a place in text that llguidance wrote
    if text.startswith("NoExtension"):
        return "one that allows no token of the tokenizer"
    if _TOO_LARGE.search(text):
        return (
            "one that is too large; use fewer properties, alternatives and repetitions, or require properties"
        )
    return text[:400]
