"""What a dashboard would read of an engine, in one place."""

from collections.abc import Sequence
from dataclasses import dataclass

from mla_compile.engine.reports import RowReport
from mla_compile.engine.scheduler import Plan


@dataclass
class EngineStats:
    """Counters since the engine was made, and how things stand now.

    num_steps: launched; num_mixed_steps: of these, the ones in which rows decode and prompts prefill.
    num_tokens: that requests have received, those behind a stop string included.
    num_prompt_tokens: of the prompts that began to run, and of what preempted ones had emitted; num_reused_tokens: of
        these, the ones that were in the cache already.
    num_verified, num_verified_tokens: rows that verification ran for, and the tokens that they emitted.
    num_drafts: that these rows had.
    num_preemptions: requests that lost their pages and run again.
    step_seconds: of the last call of `Engine.step` that launched something; total_step_seconds: of all of them.

    rows_in_use, max_rows: requests that run, of how many.
    num_waiting: requests in the queue.
    pages_in_use, num_pages: held by requests, of how many. Pages that are kept for later prompts are not in use.
    """

    num_steps: int = 0
    num_mixed_steps: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    num_verified: int = 0
    num_verified_tokens: int = 0
    num_drafts: int = 0
    num_preemptions: int = 0
    step_seconds: float = 0.0
    total_step_seconds: float = 0.0
    rows_in_use: int = 0
    max_rows: int = 0
    num_waiting: int = 0
    pages_in_use: int = 0
    num_pages: int = 0

    def count_launch(self, plan: Plan) -> None:
        """A step was launched."""
        self.num_steps += 1
        self.num_mixed_steps += bool(plan.decodes and plan.chunks)
        self.num_preemptions += sum(not request.has_ended for request in plan.removed)
        for request in plan.admitted:
            self.num_prompt_tokens += request.num_tokens
            self.num_reused_tokens += request.num_reused_tokens

    def count_reports(self, plan: Plan, reports: Sequence[RowReport]) -> None:
        """What came of a step, before its requests take it in: those that have ended by now get nothing."""
        told = [report for r, report in zip(plan.sampled, reports, strict=True) if not r.has_ended]
        self.num_tokens += sum(len(report.tokens) for report in told)
        decoded = zip(plan.decodes, reports[: len(plan.decodes)], strict=True)
        verified = [report for r, report in decoded if not r.has_ended]
        self.num_verified += len(verified)
        self.num_drafts += sum(report.num_verified for report in verified)
        self.num_verified_tokens += sum(len(report.tokens) for report in verified)

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens emitted per row and verify step, 1..k+1; None before the first."""
        return self.num_verified_tokens / self.num_verified if self.num_verified else None
