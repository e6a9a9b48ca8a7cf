"""What is decided about a request when it arrives: let it queue, or say why not."""

from tidegate_engine.core.request import Rejection, RejectionCode, Request
from tidegate_engine.core.tenants import Tenant

RETRY_SECONDS = 1.0
"""Advice to a client that came too early or met a full queue."""


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


def refuse_for_queue(*, num_waiting: int, max_waiting: int) -> Rejection | None:
    """Tell whether the engine's queue is full."""
    if num_waiting < max_waiting:
        return None
    return Rejection(
        code=RejectionCode.QUEUE_FULL,
        message=f"{max_waiting} requests are waiting already",
        retry_after_seconds=RETRY_SECONDS,
    )


def output_limit(request: Request, tenant: Tenant, *, cap_tokens: int) -> int:
    """Return the most output tokens that the request can get, at least 1."""
    # The last output token is never cached, hence one more than the context has room for.
    room = cap_tokens - len(request.prompt_ids) + 1
    limits = (request.max_output_tokens, room, tenant.rule.max_output_tokens or room)
    return max(1, min(limits))
