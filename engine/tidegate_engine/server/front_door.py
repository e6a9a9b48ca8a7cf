"""What answers before there is an engine: the port is open from the start, while a model loads."""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from tidegate_engine.server.edge import Edge
from tidegate_engine.server.error_codes import ErrorCode
from tidegate_engine.server.errors import ApiError
from tidegate_engine.server.json_response import JsonResponse

_RETRY_AFTER_SECONDS = 5


class ModelLoadingError(ApiError):
    """The engine can't serve yet."""

    def __init__(self) -> None:
        super().__init__(
            ErrorCode.MODEL_LOADING,
            "This engine is still loading its model.",
            retry_after_seconds=_RETRY_AFTER_SECONDS,
        )


class FrontDoor:
    """An ASGI application that is another one from some moment on.

    Until then the process is alive and not ready, as probes want to know, and everything else is
    told to come back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._app: ASGIApp = Edge(_answer_while_loading, clock=clock)

    def open(self, app: ASGIApp) -> None:
        """Let `app` answer from here on."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event of the framework."""
        await self._app(scope, receive, send)


async def _answer_while_loading(scope: Scope, receive: Receive, send: Send) -> None:
    await _answer(scope["path"])(scope, receive, send)


def _answer(path: str) -> JsonResponse:
    if path == "/healthz":
        return JsonResponse({"alive": True})
    if path == "/readyz":
        return JsonResponse({"ready": False, "lacking": ["model"]}, status_code=503)
    error = ModelLoadingError()
    return JsonResponse(error.body(), status_code=error.status, headers=error.headers)
