"""Reading a request's body: JSON into the shape that a route wants."""

from email.message import Message as Header
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from tidegate_engine.server.errors import ApiError, UnsupportedMediaTypeError, from_validation

_JSON = "application/json"
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
        return shape.model_validate_json(await request.body())
    except ValidationError as error:
        raise from_validation(error) from error
    except ClientDisconnect as error:
        raise ApiError(400, "client_disconnected", "The body ended before its end.") from error


def _check_media_type(request: Request) -> None:
    given = request.headers.get("content-type", "")
    if given != _JSON and not _means_json(given):
        raise UnsupportedMediaTypeError("content-type", f"{_JSON} in UTF-8", given)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise UnsupportedMediaTypeError("content-encoding", "left out", encoding)


def _means_json(content_type: str) -> bool:
    header = Header()
    header["content-type"] = content_type
    charset = str(header.get_param("charset", "utf-8"))
    return header.get_content_type() == _JSON and charset.lower() in {"utf-8", "utf8"}
