"""Buckets: the captured shapes, and the report of how each was compiled and captured."""

from dataclasses import dataclass

MIB = 2**20


def row_sizes(max_rows: int) -> list[int]:
    """The row counts of buckets, ascending: the powers of two below `max_rows`, and `max_rows`."""
    return [*(1 << i for i in range((max_rows - 1).bit_length())), max_rows]


@dataclass
class Bucket:
    """One shape of one step, of `rows * q_len + prompt_tokens` tokens, and how it was captured.

    step: "greedy" or "sampled"; "mixed, greedy" with prompts; "verify", "mixed, verify", "advance, greedy", ... for a
        step's parts.
    prompt_tokens, prompt_chunks, prompt_keys: of a mixed step, padding included; if it is too long for a graph, its
        tokens and keys rounded up, so that few buckets serve for many sizes.
    is_captured: whether a CUDA graph is recorded.
    num_bytes: growth of the graphs' memory pool and of the driver's own memory while it was recorded. A bucket fits in
        the pool of a larger one that was recorded before it. The driver reports the memory use of the whole device,
        so allocations of other processes at that moment are included.
    compile_seconds: time in Dynamo and Inductor during its first call; 0 if an earlier bucket had compiled its parts.
    capture_seconds: the rest of the host's time in the calls that warmed it up and recorded it.
    why_not: why it is not captured.
    """

    step: str
    rows: int
    q_len: int
    prompt_tokens: int = 0
    prompt_chunks: int = 0
    prompt_keys: int = 0
    is_captured: bool = False
    num_bytes: int = 0
    compile_seconds: float = 0.0
    capture_seconds: float = 0.0
    why_not: str | None = None

    @property
    def outcome(self) -> str:
        if self.is_captured:
            return "captured"
        return f"uncaptured: {self.why_not or 'it is recorded on its next call'}"


@dataclass(frozen=True)
class CaptureReport:
    """What an engine compiled and captured; as text a table.

    buckets: the buckets used, in the order of their first use.
    budget: bytes, see `Engine`; None for no limit.
    why_not: why nothing can be captured; None if capturing is possible.
    """

    buckets: list[Bucket]
    budget: int | None
    why_not: str | None

    @property
    def compile_seconds(self) -> float:
        return sum(bucket.compile_seconds for bucket in self.buckets)

    @property
    def capture_seconds(self) -> float:
        return sum(bucket.capture_seconds for bucket in self.buckets)

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    def __str__(self) -> str:
        width = max(18, *(len(bucket.step) + 1 for bucket in self.buckets), 0)
        form = f"{{:<{width}}}" + "{:>5}{:>7}{:>8}{:>8}{:>8}{:>11}{:>11}{:>10}  {}"
        names = [
            "step",
            "rows",
            "q_len",
            "prompt",
            "chunks",
            "keys",
            "compile s",
            "capture s",
            "MiB",
            "outcome",
        ]
        lines = [form.format(*names)]
        for bucket in self.buckets:
            shape = bucket.step, bucket.rows, bucket.q_len
            prompts = bucket.prompt_tokens, bucket.prompt_chunks, bucket.prompt_keys
            lines.append(form.format(*shape, *prompts, *_costs(bucket), bucket.outcome))
        captured = sum(bucket.is_captured for bucket in self.buckets)
        limit = "" if self.budget is None else f", budget {self.budget / MIB:.1f} MiB"
        outcome = self.why_not or f"{captured} of {len(self.buckets)} captured{limit}"
        return "\n".join([*lines, form.format("total", *[""] * 5, *_costs(self), outcome)])


def _costs(of: Bucket | CaptureReport) -> tuple[str, str, str]:
    return f"{of.compile_seconds:.2f}", f"{of.capture_seconds:.3f}", f"{of.num_bytes / MIB:.1f}"
