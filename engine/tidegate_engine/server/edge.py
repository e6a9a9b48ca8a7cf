"""What happens to every HTTP request before anybody looks at it."""

import uuid
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 4 * 1024 * 1024
"""Larger bodies are refused: no prompt that fits a model is that long."""

REQUEST_ID_HEADER = "x-request-id"
_ID_PREFIXES = {"/v1/completions": "cmpl", "/v1/chat/completions": "chatcmpl"}


class Edge:
    """Gives every request an id and an arrival time, and bounds its body.

    The id is that of the response body, too, so that `x-request-id` names what can be cancelled.
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
        request_id = f"{_ID_PREFIXES.get(scope['path'], 'req')}-{uuid.uuid4().hex}"
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["arrived_at"] = self._clock()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, _bounded(receive), send_with_id)


def _bounded(receive: Receive) -> Receive:
    received = 0

    async def receive_bounded() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise HTTPException(413, f"The body has more than {MAX_BODY_BYTES} bytes")
        return message

    return receive_bounded
