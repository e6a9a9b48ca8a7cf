"""Reading a request's body: JSON into the shape that a route wants."""

import re
from email.message import Message as Header
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from tidegate_engine.server.error_codes import ErrorCode
from tidegate_engine.server.errors import ApiError, UnsupportedMediaTypeError, from_validation

MAX_CONTAINERS = 1 << 16
"""Most arrays and objects of a body: two bytes of one take hundreds once they are parsed."""

_JSON = "application/json"
# Matches to the end where a string has none: so every byte is looked at once.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, shape: type[Body]) -> Body:
    """Read and check the body.

    Not left to the framework, which reads a body before it knows whose it is, takes other media
    types for JSON, and gives up on deeply nested ones.

    Raises:
        ApiError: It is no JSON, too large, not of this shape, or the client hung up.
    """
    _check_media_type(request)
    try:
        content = await request.body()
        _check_structure(content)
        return shape.model_validate_json(content)
    except ValidationError as error:
        raise from_validation(error) from error
    except ClientDisconnect as error:
        raise ApiError(ErrorCode.CLIENT_DISCONNECTED, "The body ended before its end.") from error


def _check_media_type(request: Request) -> None:
    given = request.headers.get("content-type", "")
    if given != _JSON and not _means_json(given):
        raise UnsupportedMediaTypeError("content-type", f"{_JSON} in UTF-8", given)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise UnsupportedMediaTypeError("content-encoding", "left out", encoding)


def _check_structure(content: bytes) -> None:
    if _num_brackets(content) > MAX_CONTAINERS and (
        # Texts may hold as many as they like.
        _num_brackets(_STRING.sub(b"", content)) > MAX_CONTAINERS
    ):
        raise ApiError(
            ErrorCode.INVALID_JSON,
            f"The body has more than {MAX_CONTAINERS} arrays and objects (the limit).",
        )


def _num_brackets(content: bytes) -> int:
    return content.count(b"{") + content.count(b"[")


def _means_json(content_type: str) -> bool:
    header = Header()
    header["content-type"] = content_type
    charset = str(header.get_param("charset", "utf-8"))
    return header.get_content_type() == _JSON and charset.lower() in {"utf-8", "utf8"}
