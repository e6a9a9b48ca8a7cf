"""What the engine's thread tells the others: steps, counts, policies in force."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.decisions import Decision
from tidegate_engine.core.plan import CachedPrompt, Expiry
from tidegate_engine.core.request import SchedulerStats, TokenOutput


class CancelCause(enum.StrEnum):
    """Why a request was taken out before its end."""

    DISCONNECT = "disconnect"
    DELETE = "delete"
    SLOW_READER = "slow_reader"
    SIBLING_REFUSED = "sibling_refused"
    DRAIN = "drain"
    ENGINE_FAILED = "engine_failed"
    QUEUE_TIMEOUT = "queue_timeout"
    REQUEST_TIMEOUT = "request_timeout"
    TENANT_STOPPED = "tenant_stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelKey:
    """What cancels are counted by.

    Attributes:
        state: `waiting`, `running` or `swapped` when the cancel took effect.
    """

    tenant: str
    cause: CancelCause
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine at a step boundary.

    Attributes:
        cancelled: Since the start.
        tokens_after_cancel: Tokens computed for requests whose cancel had taken effect before the
            step was planned; anything but 0 is a defect.
        step_costs: What a step and a copy cost, as fitted so far.
    """

    scheduler: SchedulerStats
    cancelled: Mapping[CancelKey, int]
    tokens_after_cancel: int
    step_costs: ExecutorCosts


class Reading(NamedTuple):
    """What a step read of a request's prompt, or of what it lost when it was taken out.

    Attributes:
        end: Tokens at the start of its context that are computed, or were found, by now.
    """

    request_id: str
    end: int


class Refused(NamedTuple):
    """A request that the scheduler did not queue.

    Attributes:
        reason: Code of the rejection.
        at: Clock when it came.
    """

    request_id: str
    tenant: str
    reason: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did, for those who wait and for the metrics.

    Attributes:
        revision: The policy it was planned under; 0 = none yet.
        watermark: State of the watermark gate, by its name.
        planned_at: Clock when planning began.
        committed_at: Clock when the tokens were there.
        step_seconds: Spent executing.
        scheduler_seconds: Spent planning and committing.
        batch_size: Rows in the forward pass; 0 = nothing but copies was done, or waited for.
        decode_tokens: Rows that computed a newest output token alone.
        reading: The other rows.
        decisions: Why requests were admitted, held, preempted or dropped.
        refused: Requests that came since the last report and were not queued.
        admitted: Requests that joined the batch.
        cached: What the prefix cache had of the prompts of requests that were admitted anew.
        expired: Requests that were dropped before this step, since they waited or ran too long.
        stopped: Requests that were dropped before this step, since their tenant was stopped.
        failed: Requests that were dropped because the step did not complete, or not for them.
        failure: Why; empty when none was.
    """

    step: int
    revision: int
    watermark: str
    planned_at: float
    committed_at: float
    step_seconds: float = 0.0
    scheduler_seconds: float = 0.0
    batch_size: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    reading: tuple[Reading, ...] = ()
    decisions: tuple[Decision, ...] = ()
    refused: tuple[Refused, ...] = ()
    admitted: tuple[str, ...] = ()
    cached: tuple[CachedPrompt, ...] = ()
    outputs: tuple[TokenOutput, ...] = ()
    expired: tuple[Expiry, ...] = ()
    stopped: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyApplied:
    """A policy took effect.

    Attributes:
        step: The first step that is planned under it.
        at: Clock when it did.
        seconds: Since it was handed to the loop.
    """

    revision: int
    step: int
    at: float
    seconds: float


class EngineListener(Protocol):
    """Hears of what happens in the engine's thread; called in that thread, so it must be brief."""

    def step_done(self, report: StepReport) -> None:
        """A step ended, or something was decided without one."""
        ...

    def policy_applied(self, applied: PolicyApplied) -> None:
        """A new policy is in force."""
        ...

    def engine_stopped(self) -> None:
        """The thread ends; nothing more will come."""
        ...
