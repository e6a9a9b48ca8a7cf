"""The OpenAPI document of the engine's API: what routes take, answer and refuse."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from tidegate_engine.server.answers import ErrorAnswer
from tidegate_engine.server.request_id import REQUEST_ID_HEADER

GENERATION = (400, 401, 403, 404, 410, 413, 415, 429, 500, 503, 504)
"""What a request for tokens may be refused with, or end with before its first token."""

_MEANINGS = {
    400: "Something about the request makes no sense; `param` names the field or header.",
    401: "The API key belongs to no tenant of this pool.",
    403: "The tenant is stopped by its policy, or a header asks for what the caller may not have.",
    404: "No such path, model, or running request.",
    410: "The request was cancelled by its tenant while it ran.",
    413: "The body is too large.",
    415: "The body is not said to be JSON in UTF-8.",
    429: "The tenant has reached a limit of its own; see `Retry-After`.",
    500: "The engine is broken.",
    503: "The engine drains, is full, or has no policy yet; see `Retry-After`.",
    504: "A time limit of the tenant's policy has passed.",
}
_SCHEMAS = "#/components/schemas/"
_REQUEST_ID = {
    REQUEST_ID_HEADER: {
        "description": "What the client called the request; else its id.",
        "schema": {"type": "string"},
    }
}
# Before version 3.2, OpenAPI describes a stream by its events.
_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk as JSON; at last [DONE]."}},
    "required": ["data"],
}


def answers(
    model: type[BaseModel], *refusals: int, streams: bool = False
) -> dict[int | str, dict[str, Any]]:
    """Return what a route may answer, as FastAPI wants it.

    Args:
        model: Of status 200.
        refusals: Other statuses, all with an error object.
        streams: Whether the answer may come as server-sent events instead.
    """
    documented: dict[int | str, dict[str, Any]] = {200: {"model": model, "headers": _REQUEST_ID}}
    if streams:
        documented[200]["content"] = {"text/event-stream": {"schema": _EVENT}}
    for status in refusals:
        documented[status] = {
            "model": ErrorAnswer,
            "description": _MEANINGS[status],
            "headers": _REQUEST_ID,
        }
    return documented


def describe_bodies(app: FastAPI, bodies: Mapping[str, type[BaseModel]]) -> None:
    """Put the bodies that routes read by themselves into the application's document.

    Args:
        app: All of its routes are there.
        bodies: Shape of the body of `POST`, by path.
    """
    document = app.openapi()
    schemas = document["components"]["schemas"]
    for path, shape in bodies.items():
        schema = shape.model_json_schema(ref_template=_SCHEMAS + "{model}")
        schemas |= schema.pop("$defs", {})
        schemas[shape.__name__] = schema
        document["paths"][path]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": _SCHEMAS + shape.__name__}}},
        }
    _drop_foreign_errors(document)


def _drop_foreign_errors(document: dict[str, Any]) -> None:
    """Take out the framework's own errors, which are never sent."""
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
