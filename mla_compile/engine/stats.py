"""Counters and gauges of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from mla_compile.engine.reports import RowReport
from mla_compile.engine.scheduler import Plan


@dataclass
class EngineStats:
    """Counters since the engine was built, and gauges.

    num_steps: launched steps; num_mixed_steps: those in which rows decode and prompts prefill.
    num_tokens: tokens that requests have received, including those after a stop string.
    num_prompt_tokens: tokens of prompts that began to run, and emitted tokens of preempted requests that run again;
        num_reused_tokens: those of them that were in the cache already.
    num_verified, num_verified_tokens: rows verified, summed over steps, and the tokens that they emitted.
    num_drafts: the drafts of these rows.
    num_preemptions: times that a request lost its pages and had to run again.
    step_seconds: of the last call of `Engine.step` that launched something; total_step_seconds: of all of them.

    rows_in_use, max_rows: running requests, and the maximum.
    num_waiting: requests in the queue.
    pages_in_use, num_pages: pages that requests hold, and the total. Pages kept for later prompts are not in use.
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
        """Count a launched step."""
        self.num_steps += 1
        self.num_mixed_steps += bool(plan.decodes and plan.chunks)
        self.num_preemptions += sum(not request.has_ended for request in plan.removed)
        for request in plan.admitted:
            self.num_prompt_tokens += request.num_tokens
            self.num_reused_tokens += request.num_reused_tokens

    def count_reports(self, plan: Plan, reports: Sequence[RowReport]) -> None:
        """Count a step's reports, before they are applied; requests that have ended by now receive nothing."""
        received = [report for r, report in zip(plan.sampled, reports, strict=True) if not r.has_ended]
        self.num_tokens += sum(len(report.tokens) for report in received)
        decoded = zip(plan.decodes, reports[: len(plan.decodes)], strict=True)
        verified = [report for r, report in decoded if not r.has_ended]
        self.num_verified += len(verified)
        self.num_drafts += sum(report.num_verified for report in verified)
        self.num_verified_tokens += sum(len(report.tokens) for report in verified)

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens emitted per row and verify step, 1..k+1; None before the first."""
        return self.num_verified_tokens / self.num_verified if self.num_verified else None
