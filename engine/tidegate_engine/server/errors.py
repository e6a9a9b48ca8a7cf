"""Errors of the HTTP API, in the shape and the words of the OpenAI API.

Codes are stable: clients may act on them. A refusal names its code in `x-tidegate-reason` too, for
proxies and access logs that don't read bodies.
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from tidegate_engine.core.request import Rejection, RejectionCode
from tidegate_engine.server.json_response import JsonResponse

REASON_HEADER = "x-tidegate-reason"

MAX_RETRY_SECONDS = 60
"""Nobody is told to wait for longer: by then all may have changed."""

UNKNOWN = "unknown_field"
"""Type of the pydantic error of a field that no body has."""

UNSUPPORTED = "unsupported_field"
"""Type of the pydantic error of a known OpenAI field that this engine can't honour."""

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_REJECTION_STATUS = {
    RejectionCode.PROMPT_TOO_LONG: 400,
    RejectionCode.EMPTY_PROMPT: 400,
    RejectionCode.QUEUE_FULL: 503,
    RejectionCode.TENANT_QUEUE_FULL: 429,
    RejectionCode.TENANT_STOPPED: 403,
    RejectionCode.UNKNOWN_TENANT: 401,
    RejectionCode.NO_POLICY: 503,
    RejectionCode.SHED: 429,
}
_HTTP_CODES = {404: "unknown_path", 405: "method_not_allowed"}
_VALIDATION_CODES = {
    "extra_forbidden": UNKNOWN,
    "json_invalid": "invalid_json",
    "missing": "missing_field",
    UNKNOWN: UNKNOWN,
    UNSUPPORTED: UNSUPPORTED,
}
_MAX_PARAM_LENGTH = 200  # of what a client may have named itself, at any length
_UNIONS = {"content", "prompt", "stop"}
"""Fields in whose errors' places the name of a branch follows; no field of theirs has a name."""


class ApiError(Exception):
    """A request gets an error for an answer.

    Attributes:
        status: HTTP status.
        code: Stable and machine-readable.
        param: The field of the request at fault.
        retry_after_seconds: When a retry may succeed; None = the same request never will.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    @property
    def headers(self) -> dict[str, str]:
        """The response headers that belong to it."""
        headers = {REASON_HEADER: self.code}
        if self.retry_after_seconds is not None:
            seconds = min(math.ceil(self.retry_after_seconds), MAX_RETRY_SECONDS)
            headers["retry-after"] = str(max(1, seconds))
        return headers

    def body(self) -> dict[str, Mapping[str, object]]:
        """Return the OpenAI error object."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, default),
                "param": self.param,
                "code": self.code,
            }
        }


class InvalidApiKeyError(ApiError):
    """The caller is no tenant of this pool."""

    def __init__(self, message: str = "The API key belongs to no tenant of this pool.") -> None:
        super().__init__(401, "invalid_api_key", message)


class InvalidAdminTokenError(ApiError):
    """The caller of the admin API doesn't hold its token."""

    def __init__(self) -> None:
        super().__init__(
            401,
            "invalid_admin_token",
            "The admin token is missing or wrong (Authorization: Bearer).",
        )


class InvalidHeaderError(ApiError):
    """A header of the request makes no sense."""

    def __init__(self, header: str, allowed: str) -> None:
        super().__init__(400, "invalid_header", f"{header} is {allowed}.", param=header)


class BodyTooLargeError(ApiError):
    """The body is longer than any that could be served."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            413, "body_too_large", f"The body has more than {limit_bytes} bytes (the limit)."
        )


class UnsupportedMediaTypeError(ApiError):
    """The body is, or may be, something else than JSON."""

    def __init__(self, header: str, expected: str, got: str) -> None:
        super().__init__(
            415,
            "unsupported_media_type",
            f"{header} must be {expected}, got {got!r}.",
            param=header,
        )


class NoPolicyError(ApiError):
    """The engine has not received a policy yet, so nobody can be served."""

    def __init__(self) -> None:
        super().__init__(
            503,
            RejectionCode.NO_POLICY.value,
            "This engine has no policy in force yet.",
            retry_after_seconds=1,
        )


class EngineDrainingError(ApiError):
    """The engine shuts down."""

    def __init__(self) -> None:
        super().__init__(
            503, "engine_draining", "This engine is shutting down.", retry_after_seconds=1
        )


class EngineFailedError(ApiError):
    """A step, or the engine's thread, did not survive."""

    def __init__(self, message: str) -> None:
        super().__init__(500, "engine_failed", message)


class RequestCancelledError(ApiError):
    """The tenant cancelled its own request while it ran."""

    def __init__(self) -> None:
        # 410, as the official client repeats what was answered with 409.
        super().__init__(410, "request_cancelled", "The request was cancelled.")


class QueueTimeoutError(ApiError):
    """A request waited for its first token for longer than its tenant's policy allows."""

    def __init__(self) -> None:
        super().__init__(
            504,
            "queue_timeout",
            "The request waited for its first token for longer than its tenant's queue timeout.",
        )


class RequestTimeoutError(ApiError):
    """A request took longer than its tenant's policy allows."""

    def __init__(self) -> None:
        super().__init__(
            504, "request_timeout", "The request took longer than its tenant's request timeout."
        )


class TenantStoppedError(ApiError):
    """The tenant's policy lets nothing new in, or has ended what was running."""

    def __init__(self) -> None:
        super().__init__(
            403, RejectionCode.TENANT_STOPPED.value, "The tenant is stopped by its policy."
        )


class RateLimitedError(ApiError):
    """The tenant has used up what it may in a minute, over all engines of the pool."""

    def __init__(self, unit: str, *, per_minute: float, wait_seconds: float) -> None:
        super().__init__(
            429,
            "rate_limited",
            f"The limit of {per_minute:g} {unit} a minute, over the whole pool, is used up; there"
            f" may be enough in {wait_seconds:.1f} s.",
            retry_after_seconds=_spread(wait_seconds),
        )


class QueueFullError(ApiError):
    """The engine's queue, that of all tenants together, is full."""

    def __init__(self, max_waiting: int) -> None:
        super().__init__(
            503,
            RejectionCode.QUEUE_FULL.value,
            f"{max_waiting} requests are waiting already.",
            retry_after_seconds=1,
        )


class SlowReaderError(ApiError):
    """The client reads more slowly than the engine produces, and the buffer is full."""

    def __init__(self, limit_events: float) -> None:
        super().__init__(
            503,
            "slow_reader",
            f"The client left more than {limit_events:.0f} tokens unread; the request was"
            " cancelled.",
            retry_after_seconds=1,
        )


def from_rejection(rejection: Rejection) -> ApiError:
    """Turn the scheduler's refusal into the API's."""
    if rejection.code is RejectionCode.UNKNOWN_TENANT:
        return InvalidApiKeyError()
    is_about_prompt = rejection.code in {
        RejectionCode.PROMPT_TOO_LONG,
        RejectionCode.EMPTY_PROMPT,
    }
    wait = rejection.retry_after_seconds
    return ApiError(
        _REJECTION_STATUS[rejection.code],
        rejection.code.value,
        rejection.message,
        param="prompt" if is_about_prompt else None,
        retry_after_seconds=None if wait is None else _spread(wait),
    )


def _spread(seconds: float) -> float:
    """Return up to a quarter more: who is refused together is told to come back one by one."""
    return seconds * random.uniform(1.0, 1.25)


def from_validation(error: ValidationError) -> ApiError:
    """Name the first field of the body, or of the query, that is wrong."""
    first = _most_specific(error.errors(include_url=False, include_input=False))
    kind, context = str(first["type"]), first.get("ctx", {})
    code = _VALIDATION_CODES.get(kind, "invalid_value")
    if code == "invalid_json":
        return ApiError(400, code, f"The body is not JSON: {context.get('error')}.")
    path = _path(first)
    if "param" in context:
        path.append(context["param"])
    param = ".".join(path)[:_MAX_PARAM_LENGTH] if path else None
    if code == UNKNOWN:
        message = f"Unknown field: {param}."
    else:
        message = f"{param or 'body'}: {first['msg']}."
    return ApiError(400, code, message, param=param)


def _most_specific(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of the first wrong field, the deepest error: the branch of a union that came furthest."""
    field = errors[0]["loc"][:1]
    return max((e for e in errors if e["loc"][:1] == field), key=lambda e: len(e["loc"]))


def _path(error: Mapping[str, Any]) -> list[str]:
    """Return where the error is, without the names of union branches."""
    before: object = None
    path: list[str] = []
    for part in error["loc"]:
        if before not in _UNIONS or isinstance(part, int):
            path.append(str(part))
        before = part
    return path


async def answer_api_error(_: HttpRequest, error: Exception) -> JsonResponse:
    """Answer with the error object."""
    if not isinstance(error, ApiError):  # as Starlette's signature is wider than its promise
        raise error
    return JsonResponse(error.body(), status_code=error.status, headers=error.headers)


async def answer_http_exception(request: HttpRequest, error: Exception) -> JsonResponse:
    """Answer what the framework refuses: unknown paths and wrong methods."""
    if not isinstance(error, HTTPException):
        raise error
    code = _HTTP_CODES.get(error.status_code, "bad_request")
    answer = await answer_api_error(request, ApiError(error.status_code, code, f"{error.detail}."))
    answer.headers.update(error.headers or {})
    return answer


async def answer_defect(request: HttpRequest, _: Exception) -> JsonResponse:
    """Answer when the server itself is wrong; the framework logs the rest."""
    return await answer_api_error(request, ApiError(500, "internal_error", "Internal error."))
