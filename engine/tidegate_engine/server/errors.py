"""Errors of the HTTP API, in the shape and the words of the OpenAI API.

A refusal names its code in `x-tidegate-reason` too, for proxies and access logs that don't read
bodies.
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from tidegate_engine.core.request import Rejection, RejectionCode
from tidegate_engine.server.error_codes import MEANINGS, Cause, ErrorCode
from tidegate_engine.server.json_response import JsonResponse

REASON_HEADER = "x-tidegate-reason"

RETRY_HEADER = "x-should-retry"
"""Whether to repeat the request, to the official clients: else they repeat all 5xx, twice."""

MAX_RETRY_SECONDS = 60
"""Nobody is told to wait for longer: by then all may have changed."""

_LONGEST_SPREAD_FROM = MAX_RETRY_SECONDS * 4 // 5  # and a quarter more is all of them

UNKNOWN = "unknown_field"
"""Type of the pydantic error of a field that no body has."""

UNSUPPORTED = "unsupported_field"
"""Type of the pydantic error of a known OpenAI field that this engine can't honour."""

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_HTTP_CODES = {404: ErrorCode.UNKNOWN_PATH, 405: ErrorCode.METHOD_NOT_ALLOWED}
_VALIDATION_CODES = {
    "extra_forbidden": ErrorCode.UNKNOWN_FIELD,
    "json_invalid": ErrorCode.INVALID_JSON,
    "missing": ErrorCode.MISSING_FIELD,
    UNKNOWN: ErrorCode.UNKNOWN_FIELD,
    UNSUPPORTED: ErrorCode.UNSUPPORTED_FIELD,
}
_MAX_PARAM_LENGTH = 200  # of what a client may have named itself, at any length
_UNIONS = {"content", "prompt", "stop"}
"""Fields in whose errors' places the name of a branch follows; no field of theirs has a name."""


class ApiError(Exception):
    """A request gets an error for an answer.

    Attributes:
        param: The field of the request at fault.
        retry_after_seconds: When a retry may succeed, if the same request ever may.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: float = 1.0,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    @property
    def status(self) -> int:
        """The HTTP status."""
        return MEANINGS[self.code].status

    @property
    def headers(self) -> dict[str, str]:
        """The response headers that belong to it."""
        headers = {REASON_HEADER: self.code.value}
        meaning = MEANINGS[self.code]
        if meaning.is_retryable:
            headers["retry-after"] = str(_spread(self.retry_after_seconds))
        elif meaning.cause is Cause.CALLER:
            headers[RETRY_HEADER] = "false"
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
        super().__init__(ErrorCode.INVALID_API_KEY, message)


class InvalidAdminTokenError(ApiError):
    """The caller of the admin API doesn't hold its token."""

    def __init__(self) -> None:
        super().__init__(
            ErrorCode.INVALID_ADMIN_TOKEN,
            "The admin token is missing or wrong (Authorization: Bearer).",
        )


class InvalidHeaderError(ApiError):
    """A header of the request makes no sense."""

    def __init__(self, header: str, allowed: str) -> None:
        super().__init__(ErrorCode.INVALID_HEADER, f"{header} is {allowed}.", param=header)


class BodyTooLargeError(ApiError):
    """The body is longer than any that could be served."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            ErrorCode.BODY_TOO_LARGE, f"The body has more than {limit_bytes} bytes (the limit)."
        )


class UnsupportedMediaTypeError(ApiError):
    """The body is, or may be, something else than JSON."""

    def __init__(self, header: str, expected: str, got: str) -> None:
        super().__init__(
            ErrorCode.UNSUPPORTED_MEDIA_TYPE,
            f"{header} must be {expected}, got {got!r}.",
            param=header,
        )


class NoPolicyError(ApiError):
    """The engine has not received a policy yet, so nobody can be served."""

    def __init__(self) -> None:
        super().__init__(ErrorCode.NO_POLICY, "This engine has no policy in force yet.")


class EngineDrainingError(ApiError):
    """The engine shuts down."""

    def __init__(self) -> None:
        super().__init__(ErrorCode.ENGINE_DRAINING, "This engine is shutting down.")


class EngineFailedError(ApiError):
    """A step, or the engine's thread, did not survive."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.ENGINE_FAILED, message)


class RequestCancelledError(ApiError):
    """The tenant cancelled its own request while it ran."""

    def __init__(self) -> None:
        # 410, as the official client repeats what was answered with 409.
        super().__init__(ErrorCode.REQUEST_CANCELLED, "The request was cancelled.")


class QueueTimeoutError(ApiError):
    """A request waited for its first token for longer than its tenant's policy allows."""

    def __init__(self) -> None:
        super().__init__(
            ErrorCode.QUEUE_TIMEOUT,
            "The request waited for its first token for longer than its tenant's queue timeout.",
        )


class RequestTimeoutError(ApiError):
    """A request took longer than its tenant's policy allows."""

    def __init__(self) -> None:
        super().__init__(
            ErrorCode.REQUEST_TIMEOUT,
            "The request took longer than its tenant's request timeout.",
        )


class TenantStoppedError(ApiError):
    """The tenant's policy lets nothing new in, or has ended what was running."""

    def __init__(self) -> None:
        super().__init__(ErrorCode.TENANT_STOPPED, "The tenant is stopped by its policy.")


class TierNotAllowedError(ApiError):
    """The request asks for a tier that is neither its tenant's nor one of the allowed ones."""

    def __init__(self, header: str, allowed: Sequence[str]) -> None:
        super().__init__(
            ErrorCode.TIER_NOT_ALLOWED,
            f"{header}: of the tiers of this pool, this tenant's requests may have"
            f" {', '.join(map(repr, allowed))}.",
            param=header,
        )


class TenantHeaderNotAllowedError(ApiError):
    """The caller names a tenant, and is not the gateway that may."""

    def __init__(self, header: str) -> None:
        super().__init__(
            ErrorCode.TENANT_HEADER_NOT_ALLOWED,
            f"{header} is for the trusted gateway alone (Authorization: Bearer, with its token).",
            param=header,
        )


class RateLimitedError(ApiError):
    """The tenant has used up what it may in a minute, over all engines of the pool."""

    def __init__(self, unit: str, *, per_minute: float, wait_seconds: float) -> None:
        super().__init__(
            ErrorCode.RATE_LIMITED,
            f"The limit of {per_minute:g} {unit} a minute, over the whole pool, is used up; there"
            f" may be enough in {wait_seconds:.1f} s.",
            retry_after_seconds=wait_seconds,
        )


class QueueFullError(ApiError):
    """The engine's queue, that of all tenants together, is full."""

    def __init__(self, max_waiting: int) -> None:
        super().__init__(
            ErrorCode.QUEUE_FULL,
            f"The queue is full: its limit is {max_waiting} requests, of which a quarter is for"
            " tenants with few of them.",
        )


class SlowReaderError(ApiError):
    """The client reads more slowly than the engine produces, and the buffer is full."""

    def __init__(self, limit_events: float) -> None:
        super().__init__(
            ErrorCode.SLOW_READER,
            f"The client left more than {limit_events:.0f} tokens unread; the request was"
            " cancelled.",
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
        ErrorCode(rejection.code.value),
        rejection.message,
        param="prompt" if is_about_prompt else None,
        retry_after_seconds=1.0 if wait is None else wait,
    )


def _spread(seconds: float) -> int:
    """Return up to a quarter more, in whole seconds, at least 1 and at most a minute.

    Who is refused together is told to come back one by one; also where a minute is too short.
    """
    least = max(1, math.ceil(min(seconds, _LONGEST_SPREAD_FROM)))
    return min(MAX_RETRY_SECONDS, least + random.randint(0, max(1, least // 4)))


def from_validation(error: ValidationError) -> ApiError:
    """Name the first field of the body, or of the query, that is wrong."""
    first = _most_specific(error.errors(include_url=False, include_input=False))
    kind, context = str(first["type"]), first.get("ctx", {})
    code = _VALIDATION_CODES.get(kind, ErrorCode.INVALID_VALUE)
    if code is ErrorCode.INVALID_JSON:
        return ApiError(code, f"The body is not JSON: {context.get('error')}.")
    path = _path(first)
    if "param" in context:
        path.append(context["param"])
    param = ".".join(path)[:_MAX_PARAM_LENGTH] if path else None
    if code is ErrorCode.UNKNOWN_FIELD:
        message = f"Unknown field: {param}."
    else:
        message = f"{param or 'body'}: {first['msg']}."
    return ApiError(code, message, param=param)


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
    code = _HTTP_CODES.get(error.status_code, ErrorCode.INTERNAL_ERROR)
    answer = await answer_api_error(request, ApiError(code, f"{error.detail}."))
    answer.headers.update(error.headers or {})
    return answer


async def answer_defect(request: HttpRequest, _: Exception) -> JsonResponse:
    """Answer when the server itself is wrong; the framework logs the rest."""
    return await answer_api_error(request, ApiError(ErrorCode.INTERNAL_ERROR, "Internal error."))
