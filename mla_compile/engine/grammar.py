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
from mla_compile.errors import MLAError
from mla_compile.speculate import SamplingParams
from mla_compile.speculate.sampling import sample

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase


class Grammar:
    """What a completion may say, compiled for one tokenizer; any number of rows and streams may share it.

    A row that ends with finish_reason "stop" has said, before its stop id, exactly a text of the grammar; one that ends
    with "length" has said the beginning of one.

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
    """Where a grammar allows no token, or llguidance gives up. After a draft this is an error only if the draft is
    accepted: plain decoding would not come here."""

    row: int
    drafts: list[int]
    message: str


class GrammarChoice:
    """Tokens chosen as the step chooses them, among those that each row's grammar allows; a `TokenChooser`.

    Args:
        grammars: of each row; None for a row that is free.
        prompts: of each row; noise depends on positions.
        sampling: of each row.
        stop_ids: allowed where a grammar's text may end, and only there. Other end-of-sequence ids are not.
        first: the number of the first row among the stream's prompts, for errors.
    """

    def __init__(
        self,
        grammars: Sequence[Grammar | None],
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        stop_ids: Sequence[int],
        *,
        first: int = 0,
    ) -> None:
        self._rows = [_Row(i, g, g.matcher()) for i, g in enumerate(grammars) if g is not None]
        self._prompt_lens = [len(prompt) for prompt in prompts]
        self._sampling = sampling
        self._stop_ids = stop_ids
        self._first = first

    def __call__(self, logits: Tensor, drafts: Tensor, completions: Sequence[Completion]) -> Tensor:
        rows = [row for row in self._rows if completions[row.index].finish_reason is None]
        dead_ends: list[_DeadEnd] = []
        if rows:
            masks, dead_ends = self._masks(rows, drafts, completions, -(-logits.shape[2] // 32))
            index = torch.tensor([row.index for row in rows], device=logits.device)
            allowed = self._allowed(masks.to(logits.device), rows, logits.shape[2])
            logits = logits.index_copy(0, index, logits[index].masked_fill(~allowed, -torch.inf))
        tokens = self._choose(logits, completions)
        for end in dead_ends:
            if tokens[end.row, : len(end.drafts)].tolist() == end.drafts:
                name = f"grammars[{self._first + end.row}]"
                raise MLAError(name, "a grammar that goes on here", end.message)
        return tokens

    def _masks(
        self, rows: list[_Row], drafts: Tensor, completions: Sequence[Completion], words: int
    ) -> tuple[Tensor, list[_DeadEnd]]:
        """A bit for each id that a row may say at each position, int32 `[len(rows), n, words]`.

        All bits are set after a draft that the grammar refuses or that ends the row: nothing is emitted there.
        """
        from llguidance.numpy import fill_next_token_bitmask_par

        n = drafts.shape[1] + 1
        masks = torch.full((len(rows), n, words), -1, dtype=torch.int32)
        guesses = drafts.tolist()
        dead_ends = []
        for row in rows:
            row.read(completions[row.index].token_ids)
        ahead, j = dict(enumerate(rows)), 0  # those whose grammars have taken their first j drafts
        while ahead:
            asked = [(row.matcher, i * n + j) for i, row in ahead.items()]
            fill_next_token_bitmask_par(_executor(), asked, masks.flatten(0, 1).numpy())
            for i, row in list(ahead.items()):
                guess = guesses[row.index]
                if row.matcher.is_error():
                    dead_ends.append(_DeadEnd(row.index, guess[:j], _message(row.matcher)))
                    row.matcher = row.grammar.matcher(completions[row.index].token_ids)
                    del ahead[i]
                elif j == n - 1 or guess[j] in self._stop_ids or not row.read_draft(guess[j]):
                    row.matcher.rollback(j)
                    del ahead[i]
            j += 1
        return masks, dead_ends

    def _allowed(self, masks: Tensor, rows: list[_Row], vocab_size: int) -> Tensor:
        """Bits as bool `[rows, n, vocab_size]`, with our stop ids in place of llguidance's."""
        bits = masks[..., None] >> torch.arange(32, dtype=torch.int32, device=masks.device)
        allowed = (bits & 1).bool().flatten(2)[..., :vocab_size]
        eos = torch.tensor([row.grammar.eos_id for row in rows], device=masks.device)
        eos = eos[:, None, None].expand(-1, masks.shape[1], 1)
        may_end = allowed.gather(2, eos)
        allowed = allowed.scatter(2, eos, False)
        allowed[..., [token for token in self._stop_ids if 0 <= token < vocab_size]] = may_end
        return allowed

    def _choose(self, logits: Tensor, completions: Sequence[Completion]) -> Tensor:
        """What the compiled step would choose: the tokens do not depend on where that is done."""
        if all(params.temperature == 0 for params in self._sampling):
            return logits.argmax(dim=-1)

        def tensor(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=logits.device)

        starts = [n + len(c.token_ids) for n, c in zip(self._prompt_lens, completions)]
        index = torch.arange(logits.shape[1], device=logits.device)
        return sample(
            logits,
            tensor(starts, torch.int64)[:, None] + index,
            tensor([params.seed for params in self._sampling], torch.int64),
            tensor([params.temperature for params in self._sampling], torch.float32),
            tensor([params.top_k for params in self._sampling], torch.int32),
            tensor([params.top_p for params in self._sampling], torch.float32),
        )


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
