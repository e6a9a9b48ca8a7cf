"""The codes of all errors of the HTTP API: stable, as clients may act on them.

`docs/api.md` lists them for users.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class ErrorCode(enum.StrEnum):
    """What is wrong."""

    INVALID_HTTP = "invalid_http"
    INVALID_HEADER = "invalid_header"
    INVALID_JSON = "invalid_json"
    CLIENT_DISCONNECTED = "client_disconnected"
    MISSING_FIELD = "missing_field"
    UNKNOWN_FIELD = "unknown_field"
    UNSUPPORTED_FIELD = "unsupported_field"
    INVALID_VALUE = "invalid_value"
    INVALID_MESSAGES = "invalid_messages"
    TOO_MANY_CHOICES = "too_many_choices"
    TOO_MANY_LOGPROBS = "too_many_logprobs"
    EMPTY_PROMPT = "empty_prompt"
    PROMPT_TOO_LONG = "prompt_too_long"
    INVALID_API_KEY = "invalid_api_key"
    INVALID_ADMIN_TOKEN = "invalid_admin_token"
    TENANT_STOPPED = "tenant_stopped"
    TIER_NOT_ALLOWED = "tier_not_allowed"
    TENANT_HEADER_NOT_ALLOWED = "tenant_header_not_allowed"
    UNKNOWN_PATH = "unknown_path"
    MODEL_NOT_FOUND = "model_not_found"
    REQUEST_NOT_FOUND = "request_not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    REQUEST_CANCELLED = "request_cancelled"
    BODY_TOO_LARGE = "body_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    TENANT_QUEUE_FULL = "tenant_queue_full"
    RATE_LIMITED = "rate_limited"
    SHED = "shed"
    SLOW_READER = "slow_reader"
    HEADERS_TOO_LARGE = "headers_too_large"
    ENGINE_FAILED = "engine_failed"
    INTERNAL_ERROR = "internal_error"
    NO_POLICY = "no_policy"
    MODEL_LOADING = "model_loading"
    QUEUE_FULL = "queue_full"
    ENGINE_OVERLOADED = "engine_overloaded"
    ENGINE_DRAINING = "engine_draining"
    QUEUE_TIMEOUT = "queue_timeout"
    REQUEST_TIMEOUT = "request_timeout"


class Cause(enum.StrEnum):
    """Whose doing an error is: who sent the request, or the engine with all that it serves."""

    CALLER = "caller"
    ENGINE = "engine"


class Meaning(NamedTuple):
    """What an error says beside its code.

    Attributes:
        status: HTTP status.
        is_retryable: Whether the same request may succeed later; then `Retry-After` says when.
    """

    status: int
    cause: Cause
    is_retryable: bool


_CALLER = {
    400: (
        ErrorCode.INVALID_HTTP,
        ErrorCode.INVALID_HEADER,
        ErrorCode.INVALID_JSON,
        ErrorCode.CLIENT_DISCONNECTED,
        ErrorCode.MISSING_FIELD,
        ErrorCode.UNKNOWN_FIELD,
        ErrorCode.UNSUPPORTED_FIELD,
        ErrorCode.INVALID_VALUE,
        ErrorCode.INVALID_MESSAGES,
        ErrorCode.TOO_MANY_CHOICES,
        ErrorCode.TOO_MANY_LOGPROBS,
        ErrorCode.EMPTY_PROMPT,
        ErrorCode.PROMPT_TOO_LONG,
    ),
    401: (ErrorCode.INVALID_API_KEY, ErrorCode.INVALID_ADMIN_TOKEN),
    403: (
        ErrorCode.TENANT_STOPPED,
        ErrorCode.TIER_NOT_ALLOWED,
        ErrorCode.TENANT_HEADER_NOT_ALLOWED,
    ),
    404: (ErrorCode.UNKNOWN_PATH, ErrorCode.MODEL_NOT_FOUND, ErrorCode.REQUEST_NOT_FOUND),
    405: (ErrorCode.METHOD_NOT_ALLOWED,),
    410: (ErrorCode.REQUEST_CANCELLED,),
    413: (ErrorCode.BODY_TOO_LARGE,),
    415: (ErrorCode.UNSUPPORTED_MEDIA_TYPE,),
    429: (
        ErrorCode.TENANT_QUEUE_FULL,
        ErrorCode.RATE_LIMITED,
        ErrorCode.SHED,
        ErrorCode.SLOW_READER,
    ),
    431: (ErrorCode.HEADERS_TOO_LARGE,),
    504: (ErrorCode.REQUEST_TIMEOUT,),
}
_ENGINE = {
    500: (ErrorCode.ENGINE_FAILED, ErrorCode.INTERNAL_ERROR),
    503: (
        ErrorCode.NO_POLICY,
        ErrorCode.MODEL_LOADING,
        ErrorCode.QUEUE_FULL,
        ErrorCode.ENGINE_OVERLOADED,
        ErrorCode.ENGINE_DRAINING,
    ),
    504: (ErrorCode.QUEUE_TIMEOUT,),
}
_RETRYABLE = frozenset((*_CALLER[429], *_ENGINE[503], *_ENGINE[504]))

MEANINGS: Mapping[ErrorCode, Meaning] = MappingProxyType(
    {
        code: Meaning(status, cause, code in _RETRYABLE)
        for cause, by_status in ((Cause.CALLER, _CALLER), (Cause.ENGINE, _ENGINE))
        for status, codes in by_status.items()
        for code in codes
    }
)
"""The meaning of every code."""
