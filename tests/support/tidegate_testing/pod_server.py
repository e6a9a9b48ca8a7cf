"""A small HTTP server for pods: `python pod_server.py PORT`; standard library alone.

GET / tells its variables, /crash ends it with code 3, /hold streams a line every 50 ms until the
caller leaves, /unready makes /ready fail. SIGTERM and a caller's leaving are printed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CRASH_CODE = 3
HOLD_INTERVAL_SECONDS = 0.05


class _Requests(BaseHTTPRequestHandler):
    is_ready = True

    def do_GET(self) -> None:
        if self.path == "/crash":
            os._exit(CRASH_CODE)
        elif self.path == "/hold":
            self._hold()
        elif self.path == "/unready":
            _Requests.is_ready = False
            self._answer(200, {})
        elif self.path == "/ready":
            self._answer(200 if self.is_ready else 503, {})
        else:
            self._answer(200, dict(os.environ))

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - overridden
        """Stays silent: the log shows what tests look for, not every probe."""

    def _answer(self, status: int, body: dict[str, str]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _hold(self) -> None:
        self.send_response(200)
        self.end_headers()
        left = threading.Event()
        threading.Thread(target=self._wait_for_end, args=(left,), daemon=True).start()
        while not left.wait(HOLD_INTERVAL_SECONDS):
            self.wfile.write(os.environ["HOSTNAME"].encode() + b"\n")
        sys.stdout.write("caller left\n")
        sys.stdout.flush()

    def _wait_for_end(self, left: threading.Event) -> None:
        try:
            self.connection.recv(1)
        except OSError:
            pass
        finally:
            left.set()


def main() -> None:
    """Serves until SIGTERM."""
    server = ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), _Requests)

    def end(*_: object) -> None:
        sys.stdout.write("got SIGTERM\n")
        sys.stdout.flush()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    server.serve_forever()


if __name__ == "__main__":
    main()
