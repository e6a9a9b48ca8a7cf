"""Who may see the console: whoever has the token, or, without one, whoever is on this machine."""

import hashlib
import hmac
from http import HTTPStatus
from importlib import resources
from ipaddress import ip_address
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import URL
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

COOKIE = "tidegate_console"
PARAMETER = "token"
MAX_FORM_BYTES = 4096


class Gate:
    """Stands before the whole application, its web sockets included."""

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        """Guard `app`.

        Args:
            app: What is guarded.
            token: None = only requests that name a loopback host get in. A page of somebody else
                in the same browser may send requests here, too, but under its own host's name.
        """
        self._app = app
        self._token = token
        self._pass = hashlib.sha256(f"{COOKIE} {token}".encode()).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a connection through, or answer it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        if self._is_admitted(connection):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            response = await self._refusal(Request(scope, receive))
            await response(scope, receive, send)

    def _is_admitted(self, connection: HTTPConnection) -> bool:
        host = connection.headers.get("host", "")
        origin = connection.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return False
        if self._token is None:
            return is_loopback(urlsplit(f"//{host}").hostname or "")
        return hmac.compare_digest(connection.cookies.get(COOKIE, ""), self._pass)

    async def _refusal(self, request: Request) -> Response:
        if self._token is None:
            return PlainTextResponse(
                "This console is for its own machine alone: ask for it as 127.0.0.1.\n",
                HTTPStatus.FORBIDDEN,
            )
        given = await _given_token(request)
        if given is not None and hmac.compare_digest(given.encode(), self._token.encode()):
            return self._welcome(request)
        page = resources.files(__package__).joinpath("enter.html").read_text(encoding="utf-8")
        said = "" if given is None else "That is not the token."
        return HTMLResponse(page.replace("{said}", said), HTTPStatus.UNAUTHORIZED)

    def _welcome(self, request: Request) -> Response:
        """Leave the token behind: it should not stay in the address bar."""
        left = [(k, v) for k, v in parse_qsl(request.url.query) if k != PARAMETER]
        target = URL(path=request.url.path, query=urlencode(left))
        response = RedirectResponse(str(target), HTTPStatus.SEE_OTHER)
        is_secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, self._pass, httponly=True, samesite="strict", secure=is_secure)
        return response


def is_loopback(host: str) -> bool:
    """Tell whether a host's name or address is one of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


async def _given_token(request: Request) -> str | None:
    if PARAMETER in request.query_params:
        return request.query_params[PARAMETER]
    if request.method != "POST":
        return None
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            return ""
    return dict(parse_qsl(body.decode(errors="replace"))).get(PARAMETER, "")
