"""The requests that are open in an HTTP server, and what they hold: both are bounded."""

from collections import Counter
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidegate_engine.server.error_codes import ErrorCode
from tidegate_engine.server.errors import ApiError
from tidegate_engine.server.json_response import JsonResponse
from tidegate_engine.server.request_id import REQUEST_ID_HEADER

_PIECE_BYTES = 64 * 1024


class EngineOverloadedError(ApiError):
    """So many requests are open, or their bodies so large, that no further one is received."""

    def __init__(self) -> None:
        super().__init__(
            ErrorCode.ENGINE_OVERLOADED,
            "This engine has as many requests open as it may.",
        )

    @property
    def headers(self) -> dict[str, str]:
        """The response headers; closing spares us the body, or the rest of it, on its way."""
        return {**super().headers, "connection": "close"}


class OpenBodies:
    """How many bytes of bodies are held, and for whom.

    Nobody gets more than is still free then. So whoever takes what he can get leaves half, two of
    them leave a third, and there is something for a newcomer at any time; one alone isn't held to
    a small fixed share.

    Source: Choudhury and Hahne, Dynamic Queue Length Thresholds for Shared-Memory Packet Switches,
    IEEE/ACM Transactions on Networking 6(2), 1998; with its alpha = 1.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()
        self._total = 0

    def hold(self, owner: str, num_bytes: int) -> None:
        """Count `num_bytes` more for `owner`.

        Raises:
            EngineOverloadedError: That would be more than is free; nothing is counted.
        """
        if num_bytes and self._held[owner] + num_bytes > self._max_bytes - self._total - num_bytes:
            raise EngineOverloadedError
        self._held[owner] += num_bytes
        self._total += num_bytes

    def release(self, owner: str, num_bytes: int) -> None:
        """Count `num_bytes` less, which `hold` has counted."""
        self._total -= num_bytes
        self._held[owner] -= num_bytes
        if not self._held[owner]:
            del self._held[owner]


class OpenRequests:
    """Refuses requests while too many are open, before anything of their bodies is read.

    Only those that carry a body, as generations do, count and are refused: by the application, once
    it knows whose they are and wants to read them, so that it can tell of it. Bytes of bodies count
    when they have come, not when they are announced, for the tenant that the application names in
    `request.state.tenant`, and until the answer ends.

    So do long answers that are sent whole: they are open until their readers have taken all but the
    last piece. Streams bound by themselves what is unread.
    """

    def __init__(self, app: ASGIApp, *, max_requests: int, max_body_bytes: int) -> None:
        self._app = app
        self._max_requests = max_requests
        self._bodies = OpenBodies(max_body_bytes)
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event of the framework."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._num_open >= self._max_requests:
            await self._app(scope, _refuse, send)
            return
        self._num_open += 1
        try:
            await self._serve(scope, receive, send)
        finally:
            self._num_open -= 1

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        held: Counter[str] = Counter()

        def hold(num_bytes: int) -> None:
            owner = state.get("tenant", "")
            self._bodies.hold(owner, num_bytes)
            held[owner] += num_bytes

        async def receive_held() -> Message:
            message = await receive()
            hold(len(message.get("body", b"")))
            return message

        try:
            await self._app(scope, receive_held, _WholeAnswers(send, hold))
        finally:
            for owner, num_bytes in held.items():
                self._bodies.release(owner, num_bytes)


class _WholeAnswers:
    """Sends long answers piece by piece, each when the one before is on its way, and counts them.

    The head waits for what follows it: an answer for which there is no room is an error instead.
    """

    def __init__(self, send: Send, hold: Callable[[int], None]) -> None:
        self._send = send
        self._hold = hold
        self._head: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        head, self._head = self._head, None
        body = message.get("body", b"")
        is_long = len(body) > _PIECE_BYTES and not message.get("more_body", False)
        if head is not None:
            if is_long:
                head, body = self._held(head, body)
            await self._send(head)
        if not is_long:
            await self._send(message)
            return
        for start in range(0, len(body), _PIECE_BYTES):
            piece = body[start : start + _PIECE_BYTES]
            has_more = start + _PIECE_BYTES < len(body)
            await self._send({"type": message["type"], "body": piece, "more_body": has_more})

    def _held(self, head: Message, body: bytes) -> tuple[Message, bytes]:
        try:
            self._hold(len(body))
        except EngineOverloadedError as error:
            request_id = Headers(raw=head["headers"])[REQUEST_ID_HEADER]
            answer = JsonResponse(
                error.body(),
                status_code=error.status,
                headers={**error.headers, REQUEST_ID_HEADER: request_id},
            )
            start = {**head, "status": error.status, "headers": answer.raw_headers}
            return start, bytes(answer.body)
        return head, body


async def _refuse() -> Message:
    raise EngineOverloadedError
