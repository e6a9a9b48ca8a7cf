"""What is decided about a request when it arrives: let it queue, or say why not."""

from tidegate_engine.core.books import Books
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.overload import Overload, ttft_target
from tidegate_engine.core.request import Rejection, RejectionCode, Request
from tidegate_engine.core.sampling import SamplingContext
from tidegate_engine.core.sequence import Sequence
from tidegate_engine.core.step_time import StepFeatures, StepTimeModel
from tidegate_engine.core.tenants import Tenant
from tidegate_policies.rules import StopPolicy

RETRY_SECONDS = 1.0
"""Advice to a client that came too early, or met an engine with a full queue: there are others."""

_STOPPED = (StopPolicy.DRAIN, StopPolicy.CANCEL)


class Arrivals:
    """Lets requests in to queue.

    Attributes:
        accepted: Requests that were let in.
        rejected: Requests that were not.
        ttft: When the first tokens of those that wait are expected.
    """

    def __init__(self, books: Books) -> None:
        """Work on the scheduler's own state."""
        self.accepted = 0
        self.rejected = 0
        self._memory = books.memory
        self._tenants = books.tenants
        self._step_times = books.step_times
        self._overload = Overload(books)
        self.ttft = self._overload.ttft

    def begin_step(self) -> None:
        """Judge anew: what runs and waits has changed."""
        self._overload.begin_step()

    def take(
        self,
        request: Request,
        *,
        revision: int,
        num_waiting: int,
        limits: EngineLimits,
        now: float,
    ) -> Sequence | Rejection:
        """Begin the life of a request, or say why it is refused.

        Args:
            request: The arrival.
            revision: Of the policy in force.
            num_waiting: Requests of all tenants that are not in the batch.
            limits: In force.
            now: On the scheduler's clock; the request may have come before.
        """
        own = self._tenants.declared(request.tenant)
        if own is None:
            self.rejected += 1
            return _unknown(request) if revision else _no_policy()
        tenant = self._tenants.in_tier(own, request.tier)
        if tenant is None:
            self.rejected += 1
            return _no_such_tier(own)
        cap_tokens = self._memory.cap_tokens_of(tenant)
        rejection = (
            refuse_stopped(tenant)
            or refuse_prompt(request, tenant, cap_tokens=cap_tokens)
            or self._refuse_for_own_queue(request, tenant, limits)
            or refuse_for_queue(
                tenant,
                num_tenants=self._tenants.num_declared,
                num_waiting=num_waiting,
                max_waiting=limits.max_waiting,
            )
            or self._overload.refuse(request, tenant, limits=limits, now=now)
        )
        if rejection is not None:
            self.rejected += 1
            return rejection
        self.accepted += 1
        return new_sequence(
            request,
            tenant,
            arrival=self.accepted,
            arrived_at=request.came_at(now),
            cap_tokens=cap_tokens,
            block_size=self._memory.pool.block_size,
            step_times=self._step_times,
        )

    def _refuse_for_own_queue(
        self, request: Request, tenant: Tenant, limits: EngineLimits
    ) -> Rejection | None:
        """Tell whether the tenant's own queue is full, and when it should have room."""
        rule, length = tenant.rule, len(request.prompt_ids)
        tokens = tenant.queued_tokens
        excess = excess_tokens = 0
        if rule.max_queued is not None:
            excess = sum(len(one.queue) for one in tenant.in_tiers) + 1 - rule.max_queued
        if rule.max_queued_tokens is not None:
            excess_tokens = tokens + length - rule.max_queued_tokens
        if excess > 0:
            full = f"{rule.max_queued} requests of tenant {tenant.name!r}"
        elif excess_tokens > 0:
            full = (
                f"{tokens} prompt tokens of tenant {tenant.name!r}, with {length} more than its"
                f" limit of {rule.max_queued_tokens},"
            )
        else:
            return None
        return Rejection(
            code=RejectionCode.TENANT_QUEUE_FULL,
            message=f"{full} are waiting already",
            retry_after_seconds=self.ttft.seconds_to_room(
                tenant, requests=max(1, excess), prompt_tokens=excess_tokens, limits=limits
            ),
        )


def refuse_stopped(tenant: Tenant) -> Rejection | None:
    """Tell whether the tenant's policy lets none of its requests in."""
    if tenant.rule.stop not in _STOPPED:
        return None
    return Rejection(
        code=RejectionCode.TENANT_STOPPED,
        message=f"tenant {tenant.name!r} is stopped by its policy",
    )


def refuse_prompt(request: Request, tenant: Tenant, *, cap_tokens: int) -> Rejection | None:
    """Tell why this prompt could never run, or None.

    Args:
        request: The arrival.
        tenant: Who sent it.
        cap_tokens: The longest context that the tenant could ever hold in KV memory.
    """
    length = len(request.prompt_ids)
    if not length:
        return Rejection(code=RejectionCode.EMPTY_PROMPT, message="the prompt has no tokens")
    limit = cap_tokens - 1  # room for at least one output token
    ruled = tenant.rule.max_prompt_tokens
    if length <= limit and (ruled is None or length <= ruled):
        return None
    if not cap_tokens:
        message = f"no prompt fits: tenant {tenant.name!r} may hold 0 KV blocks{_kv_fields(tenant)}"
    elif ruled is not None and ruled < limit:
        message = (
            f"the prompt has {length} tokens, the limit is {ruled}: limits.maxPromptTokens of"
            f" tenant {tenant.name!r}"
        )
    else:
        message = (
            f"the prompt has {length} tokens, the limit is {limit}: one less than tenant"
            f" {tenant.name!r} may hold in KV{_kv_fields(tenant)}"
        )
    return Rejection(code=RejectionCode.PROMPT_TOO_LONG, message=message)


def refuse_for_queue(
    tenant: Tenant, *, num_tenants: int, num_waiting: int, max_waiting: int
) -> Rejection | None:
    """Tell whether the engine's queue is full for this tenant."""
    own_waiting = sum(one.waiting for one in tenant.in_tiers)
    if not is_queue_full(
        own_waiting, num_tenants=num_tenants, num_waiting=num_waiting, max_waiting=max_waiting
    ):
        return None
    return Rejection(
        code=RejectionCode.QUEUE_FULL,
        message=f"{num_waiting} requests are waiting already, the limit is {max_waiting}, of which"
        " a quarter is for tenants with few of them",
        retry_after_seconds=RETRY_SECONDS,
    )


def is_queue_full(
    own_waiting: int, *, num_tenants: int, num_waiting: int, max_waiting: int
) -> bool:
    """Tell whether the engine's queue has no room for a further request of a tenant.

    A quarter of it is divided among the tenants: a part for each that the others can't fill, and
    that is one place at least. Where these are more than the quarter has, or others came to fill
    the queue before the tenant was declared, whoever is below its part gets in beyond the limit;
    that ends a quarter above it.

    Args:
        own_waiting: Requests of the tenant that are not in the batch.
        num_tenants: Whose requests are let in, this one included.
        num_waiting: Requests of all tenants that are not in the batch.
        max_waiting: The limit.
    """
    quarter = max_waiting // 4
    own_part = max(1, quarter // num_tenants)
    others_parts = min(quarter, own_part * (num_tenants - 1))
    if num_waiting < max_waiting - others_parts:
        return False
    return own_waiting >= own_part or num_waiting >= max_waiting + quarter


def new_sequence(
    request: Request,
    tenant: Tenant,
    *,
    arrival: int,
    arrived_at: float,
    cap_tokens: int,
    block_size: int,
    step_times: StepTimeModel,
) -> Sequence:
    """Begin the life of a request that is let in to queue.

    Args:
        request: The arrival.
        tenant: Who sent it.
        arrival: Its number.
        arrived_at: When it came, on the scheduler's clock.
        cap_tokens: The longest context that the tenant could ever hold in KV memory.
        block_size: Tokens in a KV block.
        step_times: What reading its prompt will take, to tell by when it has to begin.
    """
    length = len(request.prompt_ids)
    max_output_tokens = _output_limit(request, tenant, cap_tokens=cap_tokens)
    token_ids = list(request.prompt_ids)
    seq = Sequence(
        request=request,
        request_id=request.request_id,
        tenant=tenant,
        arrival=arrival,
        arrived_at=arrived_at,
        max_output_tokens=max_output_tokens,
        max_tokens=length + max_output_tokens,
        most_blocks=-(-(length + max_output_tokens - 1) // block_size),
        token_ids=token_ids,
        num_tokens=length,
        stop_token_ids=request.stop_token_ids,
        sampling=SamplingContext(
            params=request.sampling,
            token_ids=token_ids,
            num_prompt_tokens=length,
            stop_token_ids=request.stop_token_ids,
        ),
        keys=tenant.block_keys(block_size),
    )
    ttft_seconds = ttft_target(request, tenant)
    if ttft_seconds is not None:
        prefill = StepFeatures(length, 0, 0, length * (length + 1) // 2)
        seq.deadline = arrived_at + ttft_seconds
        seq.latest_start = seq.deadline - step_times.predict(prefill)
    return seq


def _output_limit(request: Request, tenant: Tenant, *, cap_tokens: int) -> int:
    """Return the most output tokens that the request can get, at least 1."""
    # The last output token is never cached, hence one more than the context has room for.
    room = cap_tokens - len(request.prompt_ids) + 1
    limits = (request.max_output_tokens, room, tenant.rule.max_output_tokens or room)
    return max(1, min(limits))


def _kv_fields(tenant: Tenant) -> str:
    """Name the fields of a tenant's policy that limit its KV, in brackets; nothing if none does."""
    rule = tenant.rule
    if not tenant.is_preemptible:
        limit = "preemption.preemptible false"
    elif rule.kv_borrowing_limit_percent is not None:
        limit = f"kv.borrowingLimitPercent {rule.kv_borrowing_limit_percent}"
    else:
        return ""
    return f" (kv.nominalPercent {rule.kv_nominal_percent}, {limit})"


def _no_such_tier(own: Tenant) -> Rejection:
    allowed = ", ".join(repr(name) for name in (own.tier.name, *own.rule.allowed_tiers))
    return Rejection(
        code=RejectionCode.TIER_NOT_ALLOWED,
        message=f"the requests of tenant {own.name!r} may have the tiers {allowed}",
    )


def _unknown(request: Request) -> Rejection:
    return Rejection(
        code=RejectionCode.UNKNOWN_TENANT,
        message=f"tenant {request.tenant!r} is not declared in this pool",
    )


def _no_policy() -> Rejection:
    return Rejection(
        code=RejectionCode.NO_POLICY,
        message="no policy is in force yet",
        retry_after_seconds=RETRY_SECONDS,
    )
