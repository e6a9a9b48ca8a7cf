"""Ids of requests: unique, and recognisable by what the client calls its request.

A response's id is `cmpl-` or the like and random digits. A client that sends `x-request-id` finds
it again: between the two in the id, and as it was in the response's header. Two requests may come
with the same name, so it is no id by itself.
"""

import re
import uuid

REQUEST_ID_HEADER = "x-request-id"
MAX_NAME_CHARS = 128
"""Longest name that a client may give to a request."""

_NAME = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_NAME_CHARS}}}")
_PREFIXES = {"/v1/completions": "cmpl", "/v1/chat/completions": "chatcmpl"}
_SUFFIX_DIGITS = 12


def is_name(text: str) -> bool:
    """Whether a client may call a request so."""
    return _NAME.fullmatch(text) is not None


def new_request_id(path: str, name: str | None) -> str:
    """Return a new id.

    Args:
        path: Of the HTTP request.
        name: What the client calls it, if it does.
    """
    prefix = _PREFIXES.get(path, "req")
    digits = uuid.uuid4().hex
    return f"{prefix}-{digits}" if name is None else f"{prefix}-{name}-{digits[:_SUFFIX_DIGITS]}"


def is_named(request_id: str, name: str) -> bool:
    """Whether `name` means this request.

    Args:
        request_id: Of a response, or of one of its choices, which ends in `.` and its number.
        name: An id of either kind, or the client's name for the request.
    """
    of_response, _, choice = request_id.rpartition(".")
    if not choice.isdecimal() or not of_response:
        of_response = request_id
    given = of_response.partition("-")[2].rpartition("-")[0]
    return name in {request_id, of_response} or (bool(given) and name == given)
