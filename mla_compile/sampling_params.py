"""The sampling parameters of a request. The module imports no torch, so that the command checks flags at once."""

import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TypeGuard

from mla_compile.defaults import setting
from mla_compile.errors import MLAError

_ID = re.compile("0|[1-9][0-9]{0,18}")

MAX_LOGPROBS = 20
"""The maximum of `SamplingParams.logprobs`, vLLM's default `max_logprobs`."""

MAX_STOP_IDS = 64
"""Stop ids of a request, the model's end-of-sequence ids included: a captured step has as many places."""

MAX_N = 16_384
"""The maximum number of completions of a prompt, as in vLLM: each one is a request."""

MAX_LOGIT_BIAS = 300
"""The maximum number of ids in `SamplingParams.logit_bias`, as in OpenAI's API: the decode state has their places."""


OF_GENERATION_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The parameters that a checkpoint's generation_config.json may have; vLLM reads the same."""

_OR = "that of generation_config.json, else "


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen, and which log-probabilities are returned. They apply in this order:

    logprobs: None returns none; n >= 0 returns the log-probability, by the model's own logits, of each chosen token and
        of the n most likely ones (`Completion.logprobs`).
    min_tokens: the first `min_tokens` new tokens are no stop ids, and a stop string has to end after them; at most
        `max_tokens`. Where a grammar allows nothing but the end, the text ends.
    logit_bias: is added to the logits of these ids: `{id: bias}`, at most 300 ids, each bias in [-100, 100]. An id may
        be text, as in JSON.
    repetition_penalty: divides positive logits of ids in the prompt or the text so far, and multiplies the others; 1
        changes nothing. frequency_penalty: is subtracted from an id's logit once per occurrence in the text so far,
        without the prompt. presence_penalty: is subtracted once if the text so far has the id. The text before the
        position of a draft includes the drafts before it. These and the two fields above apply to greedy rows too.
    temperature: 0 is greedy, and the parameters below have no effect.
    min_p: keep ids at least this probable, relative to the most likely one; 0 keeps all.
    top_k: of those, keep the k most likely ids; 0 keeps all.
    top_p: of those, keep the smallest set of most likely ids with at least this share of their probability; 1 keeps
        all.
    seed: any integer in [-2**63, 2**63).

    They end a completion:

    max_tokens: maximum number of new tokens; None uses the call's `max_new_tokens`.
    stop: strings; the first occurrence of one ends the text. `Completion.text` ends before it, `token_ids` with the
        token that completes it. Needs an engine with a tokenizer. include_stop_str_in_output: the text ends after
        the string, or after the stop id.
    stop_token_ids: ids that end the text, besides the call's `stop_ids`, which are the model's end-of-sequence ids;
        ignore_eos ignores the latter. At most 64 together.
    n: completions of the prompt, at most 16,384, with the seeds `seed`, `seed + 1`, ....
    skip_special_tokens: leaves special tokens out of the text, so no stop string is found in them.

    A call that gets none has those of the checkpoint's `generation_config.json`; one that gets some has no others.
    `SamplingParams(**model.default_sampling | {"temperature": 0.5})` changes one of the checkpoint's.
    """

    temperature: float = setting(
        0.0,
        "generate",
        "0 is greedy; top-k, top-p, min-p and seed apply above 0.",
        metavar="T",
        show_default=f"{_OR}0",
    )
    top_k: int = setting(
        0,
        "generate",
        "Sample from the N most likely tokens; 0: from all.",
        metavar="N",
        show_default=f"{_OR}0",
    )
    top_p: float = setting(
        1.0,
        "generate",
        "Sample from the likeliest tokens that sum to probability P.",
        metavar="P",
        show_default=f"{_OR}1",
    )
    seed: int = setting(0, "generate", "The same seed gives the same tokens.", metavar="N")
    min_p: float = setting(
        0.0,
        "generate",
        "Sample from tokens at least P times as likely as the likeliest.",
        metavar="P",
        show_default=f"{_OR}0",
    )
    repetition_penalty: float = setting(
        1.0,
        "generate",
        "Divide logits above 0 of tokens in prompt or completion by R, multiply the others.",
        metavar="R",
        show_default=f"{_OR}1",
    )
    presence_penalty: float = setting(
        0.0, "generate", "Subtract X from logits of tokens in the completion.", metavar="X"
    )
    frequency_penalty: float = setting(
        0.0, "generate", "Subtract X as often as the completion has the token.", metavar="X"
    )
    logprobs: int | None = setting(
        None,
        "generate",
        "Write logprobs of the chosen and the N likeliest tokens to JSON lines; --prompt needs --output.",
        metavar="N",
    )
    max_tokens: int | None = None
    stop: str | Sequence[str] = setting(
        (),
        "generate",
        "End a completion before this text; may be given several times.",
        kind=list[str],
        metavar="TEXT",
        show_default=False,
    )
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = setting(
        1, "generate", "Completions per prompt, with the seeds SEED, SEED + 1, ....", metavar="N"
    )
    min_tokens: int = setting(
        0, "generate", "No end-of-sequence id and no --stop before N tokens of a completion.", metavar="N"
    )
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    include_stop_str_in_output: bool = setting(
        False, "generate", "End a completion after the --stop text, not before it."
    )
    skip_special_tokens: bool = setting(True, "generate", "Leave special tokens out of the text.")

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= _as_float(self.temperature) < math.inf:
            raise MLAError("temperature", "a finite number >= 0", self.temperature, "0 is greedy")
        if not _is_int(self.top_k) or not 0 <= self.top_k < 2**31:
            raise MLAError("top_k", "an integer in [0, 2**31)", repr(self.top_k), "0 keeps every token")
        # Converted, as a positive fraction may be 0 as a float.
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1 or not float(self.top_p):
            raise MLAError("top_p", "a number in (0, 1]", self.top_p, "1 keeps every token")
        if not _is_int(self.seed) or not -(2**63) <= self.seed < 2**63:
            raise MLAError("seed", "an integer in [-2**63, 2**63)", repr(self.seed))
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise MLAError("min_p", "a number in [0, 1]", self.min_p, "0 keeps every token")
        # vLLM accepts any number above 0; beyond these bounds float32 logits overflow.
        if not _is_number(self.repetition_penalty) or not 1e-30 <= self.repetition_penalty <= 1e30:
            expected = "a number > 0, in [1e-30, 1e30]"
            raise MLAError("repetition_penalty", expected, self.repetition_penalty, "1 is no penalty")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not _is_number(value) or not -2 <= value <= 2:
                raise MLAError(name, "a number in [-2, 2]", value, "0 is no penalty")
        if self.logprobs is not None and (
            not _is_int(self.logprobs) or not 0 <= self.logprobs <= MAX_LOGPROBS
        ):
            expected = f"None or an integer in [0, {MAX_LOGPROBS}]"
            raise MLAError(
                "logprobs", expected, repr(self.logprobs), "0 returns that of the chosen token only"
            )
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        self._check_end()

    def _check_end(self) -> None:
        if self.max_tokens is not None and (not _is_int(self.max_tokens) or self.max_tokens < 1):
            raise MLAError("max_tokens", "None or an integer >= 1", repr(self.max_tokens))
        if not _is_int(self.min_tokens) or self.min_tokens < 0:
            raise MLAError("min_tokens", "an integer >= 0", repr(self.min_tokens))
        check_min_tokens(self.min_tokens, self.max_tokens)
        stops: object = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, Sequence | Set) or not all(isinstance(stop, str) and stop for stop in stops):
            raise MLAError("stop", "strings that are not empty", repr(self.stop))
        if not isinstance(self.stop, str):  # a copy, which the caller's later changes do not reach
            object.__setattr__(self, "stop", tuple(self.stop))
        check_token_ids("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise MLAError(name, "True or False", repr(getattr(self, name)))
        most = min(MAX_N, 2**63 - self.seed)
        if not _is_int(self.n) or not 1 <= self.n <= most:
            why = "" if most == MAX_N else ", as each completion has a seed below 2**63"
            raise MLAError("n", f"an integer in [1, {most}]{why}", repr(self.n))

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def copies(self, first_seed: int | None = None) -> list["SamplingParams"]:
        """The parameters of each of the n completions, with `n=1`.

        first_seed: replaces `seed` for the first one.
        """
        first = self.seed if first_seed is None else first_seed
        return [replace(self, n=1, seed=first + i) for i in range(self.n)]

    @property
    def is_argmax(self) -> bool:
        """Whether each token is the argmax of the model's own logits."""
        return self.temperature == 0 and not (self.penalised or self.logit_bias or self.min_tokens)

    @property
    def penalised(self) -> bool:
        """Whether any penalty changes logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def check_min_tokens(min_tokens: int, max_tokens: int | None) -> None:
    """Raises `MLAError` if a completion has no room for `min_tokens`."""
    if max_tokens is not None and min_tokens > max_tokens:
        raise MLAError("min_tokens", f"at most {max_tokens}, the maximum of new tokens", min_tokens)


def _checked_bias(given: object) -> dict[int, float]:
    """`SamplingParams.logit_bias` by numbers; a copy, so that the caller's later changes have no effect."""
    if not isinstance(given, Mapping):
        raise MLAError("logit_bias", "{token id: bias}", type(given).__name__)
    if len(given) > MAX_LOGIT_BIAS:
        raise MLAError("logit_bias", f"at most {MAX_LOGIT_BIAS} ids", len(given))
    found: dict[int, float] = {}
    for key, bias in given.items():
        token = int(key) if isinstance(key, str) and _ID.fullmatch(key) else key
        check_token_ids("logit_bias", [token])
        if token in found:
            raise MLAError("logit_bias", "each id once", f"{token} as a number and as text")
        if not _is_number(bias) or not -100 <= bias <= 100:
            raise MLAError("logit_bias", f"a bias in [-100, 100] for {token}", repr(bias))
        found[token] = bias
    return found


def check_token_ids(name: str, ids: object, vocab_size: int | None = None) -> None:
    """Raises `MLAError` unless `ids` is a list or set of token ids, of the vocabulary if one is given."""
    if not isinstance(ids, Sequence | Set):
        raise MLAError(name, "a list of token ids", type(ids).__name__)
    for token in ids:
        if not _is_int(token) or not 0 <= token < (vocab_size or 2**63):
            raise MLAError(name, f"token ids in [0, {vocab_size or '2**63'})", repr(token))


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_float(value: float) -> float:
    """As a float, with which a NumPy float32 compares without overflow; inf for an integer beyond floats."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
