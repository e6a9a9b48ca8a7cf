"""What enters and leaves the scheduler: requests, refusals, tokens, counters."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

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
    TENANT_QUEUE_FULL = "tenant_queue_full"
    TENANT_STOPPED = "tenant_stopped"
    TIER_NOT_ALLOWED = "tier_not_allowed"
    UNKNOWN_TENANT = "unknown_tenant"
    NO_POLICY = "no_policy"
    SHED = "shed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue.

    Attributes:
        tenant: As the identity check found it; `unknown` for undeclared ones.
        tier: A lower one that it asks for; None = its tenant's.
        prompt_ids: Token ids, at least one.
        max_output_tokens: Generation ends after so many output tokens, at the latest.
        stop_token_ids: Generation ends with the first of these; empty to ignore end-of-sequence.
        ttft_seconds: When the first token is wanted, counted from arrival; None = as its tenant's
            policy says.
        arrived_at: When its client's time began, on the scheduler's clock; None = when it is
            submitted.
        generation_id: What it is a choice of: once one is admitted, the others may wait for longer
            than their tenant's policy allows. None = it is alone.
    """

    request_id: str
    tenant: str
    prompt_ids: tuple[int, ...]
    max_output_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    ttft_seconds: float | None = None
    tier: str | None = None
    arrived_at: float | None = None
    generation_id: str | None = None

    def came_at(self, now: float) -> float:
        """Return when its client's time began, if it is submitted now.

        Raises:
            ValueError: It hasn't begun yet.
        """
        came_at = now if self.arrived_at is None else self.arrived_at
        if came_at > now:
            raise ValueError(f"request {self.request_id!r} came at {came_at:g}, it is {now:g}")
        return came_at


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


class TokenOutput(NamedTuple):
    """What a step gave to one request.

    Attributes:
        token: None when the request ended without a further token.
        finish_reason: Set with the last output of a request.
    """

    request_id: str
    token: SampledToken | None
    finish_reason: FinishReason | None = None


class PreemptionKey(NamedTuple):
    """What preemptions are counted by.

    Attributes:
        cause: `displaced`, `reclaimed` or `pressure`.
        mode: `swap` or `recompute`.
    """

    cause: str
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStats:
    """One tenant in this engine; totals grow since the scheduler's start.

    Attributes:
        waiting: Requests that are neither in the batch nor swapped out.
        swapped: Requests whose KV is on the host, or on its way to or from there.
        kv_borrowed_blocks: Blocks held above nominal.
        prompt_tokens: Computed prompt tokens, each counted once.
        cached_tokens: Prompt tokens found in the prefix cache; not charged.
        recomputed_tokens: Tokens computed again after a preemption; not charged.
        deferred_decodes: Output tokens that came a step later, for a higher tier's prompts or its
            inter-token latency target.
        kv_seconds: KV blocks times the seconds that they were held.
        service: Charged service, in cost units.
        virtual_counter: Service divided by weight, lifted when the tenant (re)joined.
        expired: Requests dropped for a time limit.
        stop_seconds: From the arrival of the policy that stops the tenant to its last KV block
            free; None while it isn't stopped, or has anything left.
        preemptions: By cause and mode; `preempted` is their sum.
    """

    running: int = 0
    waiting: int = 0
    swapped: int = 0
    kv_used_blocks: int = 0
    kv_borrowed_blocks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    deferred_decodes: int = 0
    kv_seconds: float = 0.0
    service: float = 0.0
    virtual_counter: float = 0.0
    preempted: int = 0
    cancelled: int = 0
    expired: int = 0
    finished: int = 0
    stop_seconds: float | None = None
    preemptions: Mapping[PreemptionKey, int] = field(default_factory=dict)


class AccountStats(NamedTuple):
    """A tenant in one tier of this engine: what fairness is about.

    Attributes:
        service: Charged service, in cost units.
        competes: Whether it is backlogged, and neither by its own limits nor by a hold.
    """

    service: float
    competes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """The scheduler at a step boundary.

    Attributes:
        kv_used_blocks: Blocks that requests hold or copies are reading or writing.
        kv_cached_blocks: Blocks nobody holds, kept for the prefix cache; they count as free.
        swap_out_blocks: Blocks moved to the host since the start.
        swap_in_blocks: Blocks moved back since the start.
        gone: Totals of tenants that are no longer known, and the blocks that copies hold of theirs.
        accounts: Each tenant in each of its tiers.
        arrivals: Requests that were let in to queue: at any time the sum of those waiting, running
            and swapped, finished, cancelled and expired, over all tenants and `gone`.
        rejected: Requests that were not.
        kv_seconds: The sum of the tenants' and that of `gone`, counted by itself. A block that
            several tenants share is held by each.
        block_size: Tokens in a block; 0 = not told.
        waiting_tokens: Prompt tokens of requests that were never admitted.
    """

    step: int
    revision: int
    running: int
    waiting: int
    swapped: int
    kv_blocks: int
    kv_used_blocks: int
    kv_cached_blocks: int
    host_blocks: int
    host_used_blocks: int
    swap_out_blocks: int
    swap_in_blocks: int
    watermark: str
    tenants: dict[str, TenantStats]
    gone: TenantStats = field(default_factory=TenantStats)
    accounts: Mapping[str, AccountStats] = field(default_factory=dict)
    arrivals: int = 0
    rejected: int = 0
    kv_seconds: float = 0.0
    block_size: int = 0
    waiting_tokens: int = 0
