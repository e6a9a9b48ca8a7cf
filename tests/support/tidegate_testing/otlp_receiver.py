"""An OpenTelemetry collector that only listens: OTLP over HTTP, on loopback."""

import gzip
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Attribute = str | int | float | list[str]


class OtlpReceiver:
    """What has come so far.

    Attributes:
        resources: Attributes of who sent spans, in each export.
        spans: All spans, in the order in which they came.
        bodies: As they came, uncompressed.
    """

    def __init__(self) -> None:
        self.resources: list[dict[str, Attribute]] = []
        self.spans: list[Span] = []
        self.bodies: list[bytes] = []
        self.endpoint = ""

    def take(self, path: str, body: bytes) -> bool:
        """Read an export; return whether it is one of traces."""
        if path != "/v1/traces":
            return False
        self.bodies.append(body)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(attributes_of(group.resource.attributes))
            for scope in group.scope_spans:
                self.spans += scope.spans
        return True

    def roots(self) -> list[Span]:
        """Return the spans of whole requests."""
        return [span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER]

    def phases_of(self, root: Span) -> list[Span]:
        """Return what is below a request's span, in the order of time."""
        below = [span for span in self.spans if span.parent_span_id == root.span_id]
        return sorted(below, key=lambda span: span.start_time_unix_nano)


def attributes_of(pairs: Iterable[KeyValue]) -> dict[str, Attribute]:
    """Read attributes of a span or a resource."""
    found: dict[str, Attribute] = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        if kind == "array_value":
            found[pair.key] = [value.string_value for value in pair.value.array_value.values]
        else:
            found[pair.key] = getattr(pair.value, kind or "string_value")
    return found


@contextmanager
def an_otlp_receiver() -> Iterator[OtlpReceiver]:
    """Listen until the block ends."""
    receiver = OtlpReceiver()

    class Door(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            self.send_response(200 if receiver.take(self.path, body) else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Keep the tests' output short."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Door)
    receiver.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
