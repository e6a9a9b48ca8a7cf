"""What a replay has seen: every request's life and every step, in virtual time."""

import enum
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from tidegate_engine.core.plan import StepPlan
from tidegate_engine.core.request import FinishReason, Rejection


class Outcome(enum.StrEnum):
    """How a request's life ended."""

    STOP = "stop"
    LENGTH = "length"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    QUEUE_TIMEOUT = "queue_timeout"
    REQUEST_TIMEOUT = "request_timeout"
    TENANT_STOPPED = "tenant_stopped"


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """The life of one request; times are the clock's, in seconds.

    Attributes:
        arrived_at: When it came, which may be in the middle of a step.
        admitted_at: When it was first taken into the batch; None = never.
        token_times: When each output token was known, in order.
        token_ids: The output tokens.
        ended_at: None while it lives.
        rejection: Why it was refused, when it was.
        preemptions: How often it was taken out of the batch.
    """

    request_id: str
    tenant: str
    prompt_tokens: int
    arrived_at: float
    admitted_at: float | None = None
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    ended_at: float | None = None
    outcome: Outcome | None = None
    rejection: Rejection | None = None
    preemptions: int = 0

    @property
    def is_finished(self) -> bool:
        """Whether it got its whole output."""
        return self.outcome is Outcome.STOP or self.outcome is Outcome.LENGTH

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason that its client is told; None when it did not finish."""
        return FinishReason(self.outcome) if self.outcome and self.is_finished else None

    @property
    def ttft_seconds(self) -> float | None:
        """Time from its arrival to its first token; None without one."""
        return self.token_times[0] - self.arrived_at if self.token_times else None

    @property
    def itl_seconds(self) -> list[float]:
        """Times between its tokens, in order; a preemption shows as a long one."""
        return [after - before for before, after in pairwise(self.token_times)]


class StepTrace(NamedTuple):
    """One executed step.

    Attributes:
        began_at: When it was planned.
        seconds: What the executor took for it.
        decodes: Rows that compute a request's newest token.
        prefill_tokens: Tokens of prompt chunks, or of a context that is computed again.
        padding_tokens: Tokens computed and thrown away, in prompts and beside decodes.
    """

    step: int
    began_at: float
    seconds: float
    decodes: int
    prefill_tokens: int
    padding_tokens: int

    @classmethod
    def of(cls, plan: StepPlan, *, began_at: float, seconds: float) -> "StepTrace":
        """Count the rows of a plan."""
        decodes = prefill = padding = 0
        for row in plan.rows:
            if row.is_padding:
                padding += len(row.token_ids)
            elif row.is_decode:
                decodes += 1
            else:
                prefill += len(row.token_ids)
        return cls(plan.step, began_at, seconds, decodes, prefill, padding)


@dataclass(slots=True)
class ReplayLog:
    """Everything that happened, in order.

    Attributes:
        requests: By id, in order of arrival.
        steps: The executed ones.
    """

    requests: dict[str, RequestTrace] = field(default_factory=dict)
    steps: list[StepTrace] = field(default_factory=list)

    @property
    def output_tokens(self) -> int:
        """Tokens that requests were given."""
        return sum(len(trace.token_ids) for trace in self.requests.values())

    @property
    def busy_until(self) -> float:
        """When the last executed step was over; 0 before the first."""
        return self.steps[-1].began_at + self.steps[-1].seconds if self.steps else 0.0
