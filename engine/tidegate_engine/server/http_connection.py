"""One HTTP connection: cut off, or told what is wrong, where it costs without being of use.

The parser holds what it hasn't finished, in pieces that it copies each time that one is added; so
what may be unfinished is bounded here. An `Upgrade` is passed over, as RFC 9110, section 7.8, has
it for protocols that a server doesn't speak: the parser would take the body for one of those.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from tidegate_engine.server.error_codes import ErrorCode
from tidegate_engine.server.errors import ApiError
from tidegate_engine.server.json_response import JsonResponse
from tidegate_engine.server.request_id import REQUEST_ID_HEADER, new_request_id

MAX_HEAD_BYTES = 32 * 1024
"""So long a head, or trailer of a chunked body, is read in any case; twice as long is none."""

LINGER_SECONDS = 5
"""How long the rest of what was refused is read before the connection is cut."""

_MAX_LINGER_BYTES = 4 * 1024 * 1024

# Short beside a head, as only whole pieces of one are counted.
_PIECE_BYTES = MAX_HEAD_BYTES // 4


class InvalidHttpError(ApiError):
    """What came is no HTTP request."""

    def __init__(self) -> None:
        super().__init__(ErrorCode.INVALID_HTTP, "What came is not a valid HTTP/1.1 request.")


class HeadTooLargeError(ApiError):
    """The request line and the headers of a request, or its trailer, don't end."""

    def __init__(self) -> None:
        super().__init__(
            ErrorCode.HEADERS_TOO_LARGE,
            f"The request line and headers have more than {MAX_HEAD_BYTES} bytes.",
        )


@dataclass(slots=True, eq=False)
class _Fields:
    """A head, or what may be a trailer, that is being received.

    Attributes:
        num_bytes: Of the pieces that hold nothing else.
    """

    is_trailer: bool = False
    num_bytes: int = 0


class HttpConnection(HttpToolsProtocol):
    """A connection of an `HttpServer`.

    At any time a request is being received or awaited, for `request_seconds`; or one is being
    answered; or the framework's timer for connections without a further request runs.
    """

    def __init__(
        self, *arguments: Any, max_connections: int, request_seconds: float, **options: Any
    ) -> None:
        """Prepare.

        Args:
            arguments: As the framework has them.
            max_connections: Of the server; those that come when it has so many are cut at once.
            request_seconds: How long a request may take to come.
            options: As the framework has them.
        """
        super().__init__(*arguments, **options)
        self._max_connections = max_connections
        self._request_seconds = request_seconds
        self._receiving: asyncio.TimerHandle | None = None
        self._fields: _Fields | None = None
        self._lingers = False
        self._num_passed_over = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request, or cut."""
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            transport.abort()
        else:
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell who serves a request that nobody reads the answer."""
        self._received()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came: any part of a request, or of several."""
        self._unset_keepalive_if_required()
        if self._lingers:
            self._pass_over(len(data))
            return
        try:
            self._feed(memoryview(data))
        except httptools.HttpParserError as error:
            self.logger.debug("Invalid HTTP request: %s", error)
            self._refuse(InvalidHttpError())
        except ApiError as error:
            self._refuse(error)
        # Blank lines, or the rest of a body whose request was answered before: no request is
        # begun by them, and the framework's timer was unset.
        if self._receiving is None and self._served is None:
            self._expect_request()

    def on_message_begin(self) -> None:
        """Begin a request; it may take its time from here."""
        if (served := self._served) is not None:
            # Pipelined: while it waited, nobody could see its sender hang up on the one before.
            self._leave(served)
            self.transport.abort()
        super().on_message_begin()
        self._fields = _Fields()
        self._expect_request()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field of the head; those of trailers must not pass for such, and have no use."""
        if self._fields is None or not self._fields.is_trailer:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to serve, unless the head is to come again without its `Upgrade`."""
        self._fields = None
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._fields = None
        super().on_body(body)

    def on_chunk_header(self) -> None:
        """Take the size of a chunk; what follows that of the last one is the trailer."""
        self._fields = _Fields(is_trailer=True)

    def on_chunk_complete(self) -> None:
        """Take the end of a chunk."""
        self._fields = None

    def on_message_complete(self) -> None:
        """End a request; its answer may take longer."""
        if not self.parser.should_upgrade():
            self._received()
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, and hold nothing of this one's unread body until then."""
        self.cycle.body = bytearray()
        super().on_response_complete()

    @property
    def _served(self) -> RequestResponseCycle | None:
        """The request that isn't answered to its end."""
        cycle: RequestResponseCycle | None = self.cycle
        return None if cycle is None or cycle.response_complete else cycle

    def _feed(self, received: memoryview) -> None:
        while received and not self.transport.is_closing():
            fields = self._fields
            num_parsed = self._parse(received[:_PIECE_BYTES])
            received = received[num_parsed:]
            if fields is not None and fields is self._fields:
                fields.num_bytes += num_parsed
                if fields.num_bytes > MAX_HEAD_BYTES:
                    raise HeadTooLargeError

    def _parse(self, piece: memoryview) -> int:
        """Feed the parser; return how much it took.

        Raises:
            HttpParserError: It is no HTTP.
            InvalidHttpError: It asks for a tunnel.
        """
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            [num_parsed] = upgrade.args
            head = self._head_without_upgrade()
            # A new one: the old one is at its end if the connection is to be closed after this.
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(head)
            return int(num_parsed)
        return len(piece)

    def _head_without_upgrade(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise InvalidHttpError
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _refuse(self, error: ApiError) -> None:
        """Answer with `error`, if that can be, and hang up."""
        if self.transport.is_closing():
            return
        if (served := self._served) is not None:
            self._leave(served)
            if served.response_started:
                self.transport.abort()
                return
        headers = {
            **error.headers,
            REQUEST_ID_HEADER: new_request_id("", None),
            "connection": "close",
        }
        answer = JsonResponse(error.body(), status_code=error.status, headers=headers)
        fields = [*self.server_state.default_headers, *answer.raw_headers]
        lines = [b"%s: %s\r\n" % field for field in fields]
        self.transport.write(
            b"".join([STATUS_LINE[error.status], *lines, b"\r\n", bytes(answer.body)])
        )
        self._linger()

    def _linger(self) -> None:
        """End what is sent, and let the other side end, for a while, what it sends.

        A socket that is closed before it was read to its end resets the connection, and a reset
        may overtake the answer.
        """
        self._lingers = True
        self.transport.write_eof()
        self._cut_after(LINGER_SECONDS)

    def _pass_over(self, num_bytes: int) -> None:
        self._num_passed_over += num_bytes
        if self._num_passed_over > _MAX_LINGER_BYTES:
            self.transport.abort()

    def _leave(self, served: RequestResponseCycle) -> None:
        """Let nothing more be sent for it, and who serves it see that its client is gone."""
        served.disconnected = True
        served.message_event.set()
        self.flow.resume_writing()

    def _expect_request(self) -> None:
        self._cut_after(self._request_seconds)

    def _cut_after(self, seconds: float) -> None:
        self._received()
        self._receiving = self.loop.call_later(seconds, self.transport.abort)

    def _received(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None
