"""Sampling whose noise depends only on (seed, position, vocabulary id), so that speculation changes no token.

A token is `argmax(logits / temperature + gumbel)` over the ids that min-p, top-k and top-p keep (the Gumbel-max trick:
the argmax is distributed as the softmax). Penalties change the logits before all that. Parameters mean what they mean
in vLLM's `SamplingParams`, and are applied in the order of its sampler (`vllm/v1/sample/sampler.py`).

Plain decoding, verification and drafting ask for the noise of the same position and get the same numbers; the draft
that agrees with the target's logits then agrees with its sample too.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from mla_compile.errors import MLAError

MAX_LOGPROBS = 20
"""As vLLM's `max_logprobs` by default: `SamplingParams.logprobs` at most."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen, and what is told of them. Things happen in this order:

    logprobs: None tells nothing; n >= 0 tells the log-probability, by the model's own logits, of each chosen token and
        of the n most likely ones (`Completion.logprobs`).
    repetition_penalty: the logits of ids in the prompt or the text so far are divided by it where positive, else
        multiplied; 1 changes nothing. frequency_penalty: is subtracted from an id's logit as often as the text so far,
        without the prompt, has it. presence_penalty: is subtracted once if the text so far has it. Greedy rows obey
        these three as well, and of a draft's position the drafts before it belong to the text.
    temperature: 0 is greedy, and what follows has no effect.
    min_p: keep ids at least this probable, relative to the most likely one; 0 keeps all.
    top_k: of those, keep the k most likely ids; 0 keeps all.
    top_p: of those, keep the smallest set of most likely ids with at least this share of their probability; 1 keeps
        all.
    seed: any integer in [0, 2**63).

    When it ends:

    max_tokens: at most so many; None leaves it to the call (`max_new_tokens`).
    stop: strings that end the text where one appears first. `Completion.text` ends before it, `token_ids` with the
        token that completes it. Needs an engine with a tokenizer.
    stop_token_ids: ids that end the text, besides the call's `stop_ids`, which are the model's end-of-sequence ids;
        ignore_eos leaves out those.
    n: completions of the prompt, with the seeds `seed`, `seed + 1`, ....
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    max_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < float("inf"):
            raise MLAError("temperature", "a finite number >= 0", self.temperature, "0 is greedy")
        if not _is_int(self.top_k) or not 0 <= self.top_k < 2**31:
            raise MLAError("top_k", "an integer in [0, 2**31)", self.top_k, "0 keeps every token")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise MLAError("top_p", "a number in (0, 1]", self.top_p, "1 keeps every token")
        if not _is_int(self.seed) or not 0 <= self.seed < 2**63:
            raise MLAError("seed", "an integer in [0, 2**63)", self.seed)
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise MLAError("min_p", "a number in [0, 1]", self.min_p, "0 keeps every token")
        # vLLM takes any number above 0; beyond these, float32 logits overflow.
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
            raise MLAError("logprobs", expected, self.logprobs, "0 tells of the chosen token only")
        self._check_end()

    def _check_end(self) -> None:
        if self.max_tokens is not None and (not _is_int(self.max_tokens) or self.max_tokens < 1):
            raise MLAError("max_tokens", "None or an integer >= 1", self.max_tokens)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if not _is_list_of(stops, lambda stop: isinstance(stop, str) and stop != ""):
            raise MLAError("stop", "strings that are not empty", repr(self.stop))
        if not _is_list_of(self.stop_token_ids, _is_int):
            raise MLAError("stop_token_ids", "integers", repr(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise MLAError("ignore_eos", "True or False", repr(self.ignore_eos))
        if not _is_int(self.n) or not 1 <= self.n <= 2**63 - self.seed:
            raise MLAError("n", "an integer >= 1 that leaves each completion a seed below 2**63", self.n)

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def copies(self) -> list["SamplingParams"]:
        """What each of the n completions is sampled with, alone."""
        return [replace(self, n=1, seed=self.seed + i) for i in range(self.n)]

    @property
    def penalised(self) -> bool:
        """Whether any penalty changes logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(values: object, check: Callable[[object], bool]) -> bool:
    return isinstance(values, Collection) and not isinstance(values, Tensor) and all(map(check, values))


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijective 32-bit hash in int64 arithmetic (xor-shift-multiply; the factors keep products below 2**63)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x31848BAB) & _MASK
    return x ^ (x >> 14)


def gumbel_noise(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 `[*position.shape, vocab_size]`.

    seed: int64, broadcastable to `position`; position: int64, of the token that is being sampled.
    """
    key = _mix(_mix(_mix(seed & _MASK) ^ (seed >> 32)) ^ position)
    ids = torch.arange(vocab_size, device=position.device)
    bits = _mix(key[..., None] ^ _mix(ids + 0x3C6EF372))
    # 23 bits and a half are exact in float32 and stay below 1: with 24, the largest would round to 1, noise +inf.
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _keep_top(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Scores `[..., vocab]` with -inf outside the top-k ids, and then the top-p ids of those; top_k, top_p `[...]`."""
    ordered, ids = scores.sort(dim=-1, descending=True)
    limit = torch.where(top_k > 0, top_k, scores.shape[-1])[..., None]
    rank = torch.arange(scores.shape[-1], device=scores.device)
    ordered = ordered.masked_fill(rank >= limit, -torch.inf)
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    ordered = ordered.masked_fill(before >= top_p[..., None], -torch.inf)
    # The most likely id always stays, however small top_p is.
    ordered = torch.where(rank == 0, scores.amax(dim=-1, keepdim=True), ordered)
    return torch.empty_like(scores).scatter(-1, ids, ordered)


def penalise(
    logits: Tensor,
    in_prompt: Tensor,
    num_emitted: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Logits after penalties, elementwise and broadcast: float64 for float64, else float32.

    Args:
        logits: float.
        in_prompt: bool, whether the id is in the prompt; num_emitted: int32, how often it is in the text after it.
        repetition, presence, frequency: float32 or float64. 1, 0 and 0 leave a logit's bits as they are.

    The repetition penalty is CTRL's (arXiv:1909.05858, section 4.1) with the rule for negative logits that
    transformers and vLLM have; the others are those of OpenAI's API.
    """
    emitted = num_emitted > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | emitted, repeated, logits)
    return logits - frequency * num_emitted - presence * emitted


def penalise_after(
    logits: Tensor,
    drafts: Tensor,
    in_prompt: Tensor,
    num_emitted: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """`penalise` where drafts stand between the emitted text and the logits: `[rows, n, vocab]`.

    Args:
        logits: `[rows, n, vocab]`; the last one follows all of `drafts`, each other one follows a draft fewer.
        drafts: int64 `[rows, m]`, m >= n - 1.
        in_prompt, num_emitted: `[rows, vocab]`, of the text before the drafts.
        repetition, presence, frequency: `[rows]`.
    """
    n, m = logits.shape[1], drafts.shape[1]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    by_row = [penalty.to(dtype)[:, None, None] for penalty in (repetition, presence, frequency)]
    penalised = penalise(logits, in_prompt[:, None], num_emitted[:, None], *by_row)
    if m == 0:
        return penalised
    # Only the drafts' ids have other counts than the text: theirs are done again, which spares counts per position.
    index = torch.arange(m, device=drafts.device)
    precedes = index < torch.arange(m - n + 1, m + 1, device=drafts.device)[:, None]
    same = drafts[:, :, None] == drafts[:, None]
    more = (precedes[:, :, None] & same[:, None]).sum(dim=2)  # [rows, n, m], of each draft's id
    ids = drafts[:, None].expand(-1, n, -1)
    again = penalise(
        logits.gather(2, ids),
        in_prompt.gather(1, drafts)[:, None],
        num_emitted.gather(1, drafts)[:, None] + more,
        *by_row,
    )
    # Drafts of one id write one value.
    return penalised.scatter(2, ids, again)


def sample(
    logits: Tensor,
    position: Tensor,
    seed: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """One token id for every logits row, int64 `[rows, n]`.

    Args:
        logits: `[rows, n, vocab]`, float.
        position: int64 `[rows, n]`, the positions that the sampled tokens will take.
        seed: int64 `[rows]`; temperature, top_p, min_p: float32 `[rows]`; top_k: int32 `[rows]`.
            A row of temperature 0 is greedy.
    """
    greedy = temperature == 0
    # As after penalties, so that a row's tokens do not depend on whether its batch has any.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # The largest is subtracted first, so that a tiny temperature makes no second infinity.
    scores = (logits - logits.amax(dim=-1, keepdim=True)).float()
    scores = scores / torch.where(greedy, 1.0, temperature)[:, None, None]
    # The largest score is 0, so these are probabilities relative to the largest.
    scores = scores.masked_fill(scores < min_p.log()[:, None, None], -torch.inf)
    n = logits.shape[1]
    scores = _keep_top(scores, top_k[:, None].expand(-1, n), top_p[:, None].expand(-1, n))
    noise = gumbel_noise(seed[:, None], position, logits.shape[-1])
    return torch.where(greedy[:, None], logits.argmax(dim=-1), (scores + noise).argmax(dim=-1))


def top_logprobs(logits: Tensor, tokens: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of chosen tokens and of the n most likely ones, by logits before penalties and temperature.

    Args:
        logits: `[rows, positions, vocab]`, float. tokens: int64 `[rows, positions]`. n: <= vocab.

    Returns:
        log-probabilities, float32 `[rows, positions, 1 + n]`: the chosen token's, then the largest ones in order;
        int64 of the same shape: the chosen token's rank, 1 + the number of more likely ids, then the ids.
    """
    logits = logits.float()
    chosen = logits.gather(2, tokens[..., None])
    rank = 1 + (logits > chosen).sum(dim=2, keepdim=True)
    largest, ids = logits.topk(n, dim=2)
    total = logits.logsumexp(dim=2, keepdim=True)
    return torch.cat([chosen, largest], dim=2) - total, torch.cat([rank, ids], dim=2)
