"""JSON bodies, written by orjson."""

import orjson
from starlette.responses import Response


class JsonResponse(Response):
    """A response whose body is JSON."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Write `content`: dicts, lists, text, numbers."""
        return orjson.dumps(content)
