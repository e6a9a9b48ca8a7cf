"""What enters and leaves the scheduler: requests, refusals, tokens, counters."""

import enum
from dataclasses import dataclass

from tidegate_engine.core.plan import SampledToken
from tidegate_engine.core.sampling import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a request ended by itself, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


class RejectionCode(enum.StrEnum):
    """Why a request was refused at arrival."""

    PROMPT_TOO_LONG = "prompt_too_long"
    EMPTY_PROMPT = "empty_prompt"
    QUEUE_FULL = "queue_full"
    UNKNOWN_TENANT = "unknown_tenant"
    NO_POLICY = "no_policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue.

    Attributes:
        tenant: As the identity check found it; `unknown` for undeclared ones.
        prompt_ids: Token ids, at least one.
        max_output_tokens: Generation ends after so many output tokens, at the latest.
        stop_token_ids: Generation ends with the first of these; empty to ignore end-of-sequence.
    """

    request_id: str
    tenant: str
    prompt_ids: tuple[int, ...]
    max_output_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A request that was not queued.

    Attributes:
        message: For the client: names the limit.
        retry_after_seconds: When a retry may succeed; None = never.
    """

    code: RejectionCode
    message: str
    retry_after_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """What a step gave to one request.

    Attributes:
        token: None when the request ended without a further token.
        finish_reason: Set with the last output of a request.
    """

    request_id: str
    token: SampledToken | None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStats:
    """One tenant in this engine; totals grow since the scheduler's start.

    Attributes:
        prompt_tokens: Computed prompt tokens, each counted once.
        recomputed_tokens: Tokens computed again after a preemption; not charged.
        service: Charged service, in cost units.
        virtual_counter: Service divided by weight, lifted when the tenant (re)joined.
    """

    running: int = 0
    waiting: int = 0
    kv_used_blocks: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    service: float = 0.0
    virtual_counter: float = 0.0
    preempted: int = 0
    cancelled: int = 0
    finished: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """The scheduler at a step boundary."""

    step: int
    revision: int
    running: int
    waiting: int
    kv_blocks: int
    kv_used_blocks: int
    watermark: str
    tenants: dict[str, TenantStats]
