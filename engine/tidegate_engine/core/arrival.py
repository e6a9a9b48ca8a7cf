"""What is decided about a request when it arrives: let it queue, or say why not."""

from tidegate_engine.core.prefix_cache import BlockKeys
from tidegate_engine.core.request import Rejection, RejectionCode, Request
from tidegate_engine.core.sampling import SamplingContext
from tidegate_engine.core.sequence import Sequence
from tidegate_engine.core.step_time import StepFeatures, StepTimeModel
from tidegate_engine.core.tenants import Tenant
from tidegate_policies.snapshot import StopPolicy

RETRY_SECONDS = 1.0
"""Advice to a client that came too early or met a full queue."""

_STOPPED = (StopPolicy.DRAIN, StopPolicy.CANCEL)


def refuse_tenant(request: Request, tenant: Tenant | None, *, revision: int) -> Rejection | None:
    """Tell why nobody of this identity is let in, or None."""
    if not revision:
        return Rejection(
            code=RejectionCode.NO_POLICY,
            message="no policy is in force yet",
            retry_after_seconds=RETRY_SECONDS,
        )
    if tenant is None:
        return Rejection(
            code=RejectionCode.UNKNOWN_TENANT,
            message=f"tenant {request.tenant!r} is not declared in this pool",
        )
    if tenant.rule.stop in _STOPPED:
        return Rejection(
            code=RejectionCode.TENANT_STOPPED,
            message=f"tenant {request.tenant!r} is stopped by its policy",
        )
    return None


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
    if tenant.rule.max_prompt_tokens is not None:
        limit = min(limit, tenant.rule.max_prompt_tokens)
    if length > limit:
        return Rejection(
            code=RejectionCode.PROMPT_TOO_LONG,
            message=f"the prompt has {length} tokens, the limit is {limit}",
        )
    return None


def refuse_for_queue(
    request: Request, tenant: Tenant, *, num_waiting: int, max_waiting: int
) -> Rejection | None:
    """Tell whether the tenant's or the engine's queue is full."""
    rule, queue = tenant.rule, tenant.queue
    length = len(request.prompt_ids)
    if rule.max_queued is not None and len(queue) >= rule.max_queued:
        return _tenant_queue_full(f"{rule.max_queued} requests of tenant {tenant.name!r}")
    most_tokens = rule.max_queued_tokens
    if most_tokens is not None and queue.num_tokens + length > most_tokens:
        return _tenant_queue_full(
            f"{queue.num_tokens} prompt tokens of tenant {tenant.name!r}, with {length} more than"
            f" its limit of {most_tokens},"
        )
    if num_waiting < max_waiting:
        return None
    return Rejection(
        code=RejectionCode.QUEUE_FULL,
        message=f"{max_waiting} requests are waiting already",
        retry_after_seconds=RETRY_SECONDS,
    )


def new_sequence(
    request: Request,
    tenant: Tenant,
    *,
    arrival: int,
    now: float,
    cap_tokens: int,
    block_size: int,
    step_times: StepTimeModel,
) -> Sequence:
    """Begin the life of a request that is let in to queue.

    Args:
        request: The arrival.
        tenant: Who sent it.
        arrival: Its number.
        now: On the scheduler's clock.
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
        arrived_at=now,
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
        keys=BlockKeys(tenant.root, block_size),
    )
    own, ruled = request.ttft_seconds, tenant.rule.service.ttft_seconds
    ttft_seconds = ruled if own is None else own
    if ttft_seconds is not None:
        prefill = StepFeatures(length, 0, 0, length * (length + 1) // 2)
        seq.deadline = now + ttft_seconds
        seq.latest_start = seq.deadline - step_times.predict(prefill)
    return seq


def _output_limit(request: Request, tenant: Tenant, *, cap_tokens: int) -> int:
    """Return the most output tokens that the request can get, at least 1."""
    # The last output token is never cached, hence one more than the context has room for.
    room = cap_tokens - len(request.prompt_ids) + 1
    limits = (request.max_output_tokens, room, tenant.rule.max_output_tokens or room)
    return max(1, min(limits))


def _tenant_queue_full(what: str) -> Rejection:
    return Rejection(
        code=RejectionCode.TENANT_QUEUE_FULL,
        message=f"{what} are waiting already",
        retry_after_seconds=RETRY_SECONDS,
    )
