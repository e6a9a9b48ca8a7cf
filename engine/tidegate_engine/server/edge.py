"""What happens to every HTTP request before anybody looks at it."""

from collections.abc import Callable

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidegate_engine.server.errors import (
    ApiError,
    BodyTooLargeError,
    answer_api_error,
    answer_defect,
    answer_http_exception,
)
from tidegate_engine.server.request_id import REQUEST_ID_HEADER, is_name, new_request_id

MAX_BODY_BYTES = 4 * 1024 * 1024
"""Larger bodies are refused: no prompt that fits a model is that long."""


class _EdgedApp(FastAPI):
    """An application behind an `Edge`."""

    def __init__(self, title: str, clock: Callable[[], float]) -> None:
        # No documentation pages: they would load scripts from elsewhere.
        super().__init__(title=title, docs_url=None, redoc_url=None, redirect_slashes=False)
        self._clock = clock

    def build_middleware_stack(self) -> ASGIApp:
        # Outside everything: the framework's own middlewares stand inside that which answers when
        # the server itself is wrong, and that answer has to be found again most of all.
        return Edge(super().build_middleware_stack(), clock=self._clock)


def edged_app(title: str, clock: Callable[[], float]) -> FastAPI:
    """Return an application without routes, behind an `Edge`, whose errors are OpenAI objects."""
    app = _EdgedApp(title, clock)
    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(HTTPException, answer_http_exception)
    app.add_exception_handler(Exception, answer_defect)
    return app


class Edge:
    """Gives every request an id and an arrival time, and bounds its body.

    The id is that of the response body, too, so that it names what can be cancelled; in the header
    `x-request-id` it stands unless the client gave the request a name there.
    Both are in `request.state`: `request_id` and `arrived_at`.
    """

    def __init__(self, app: ASGIApp, *, clock: Callable[[], float]) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event of the framework."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name = headers.get(REQUEST_ID_HEADER)
        if name is not None and not is_name(name):
            name = None  # refused where it is read; it isn't repeated either
        request_id = new_request_id(scope["path"], name)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["arrived_at"] = self._clock()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = name or request_id
            await send(message)

        bounded = _bounded(receive, announced=headers.get("content-length", ""))
        await self._app(scope, bounded, send_with_id)


def _bounded(receive: Receive, *, announced: str) -> Receive:
    """Refuse larger bodies: announced ones unread, so that no client is told to go on."""
    is_announced_too_large = announced.isdecimal() and int(announced) > MAX_BODY_BYTES
    received = 0

    async def receive_bounded() -> Message:
        nonlocal received
        if is_announced_too_large:
            raise BodyTooLargeError(MAX_BODY_BYTES)
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise BodyTooLargeError(MAX_BODY_BYTES)
        return message

    return receive_bounded
