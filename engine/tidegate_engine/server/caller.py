"""Who sends a request, and what its headers ask for."""

from dataclasses import dataclass

from starlette.requests import Request as HttpRequest

from tidegate_engine.server.errors import InvalidHeaderError
from tidegate_engine.server.request_id import MAX_NAME_CHARS, REQUEST_ID_HEADER, is_name

TIER_HEADER = "x-tidegate-tier"
TTFT_HEADER = "x-slo-ttft-ms"
MAX_TTFT_MS = 24 * 60 * 60 * 1000
"""Longest time to the first token that a client may ask for: a day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls, under which id, and how urgently.

    Attributes:
        request_id: The id of the response.
        arrived_at: Clock when the request came.
        ttft_seconds: When the first token is wanted: earlier or later than the tenant's target. It
            orders the tenant's own requests alone, so nobody gains on another tenant by it. None =
            as the tenant's policy says.
        tier: The tier that is asked for, allowed or not; None = the tenant's own.
    """

    tenant: str
    request_id: str
    arrived_at: float
    ttft_seconds: float | None = None
    tier: str | None = None

    @classmethod
    def of(cls, request: HttpRequest, *, tenant: str) -> "Caller":
        """Read the headers of a request that has passed the `Edge`.

        Raises:
            InvalidHeaderError: A header makes no sense.
        """
        name = request.headers.get(REQUEST_ID_HEADER)
        if name is not None and not is_name(name):
            allowed = f"1 to {MAX_NAME_CHARS} ASCII letters, digits and any of . _ : -"
            raise InvalidHeaderError(REQUEST_ID_HEADER, allowed)
        return cls(
            tenant=tenant,
            request_id=request.state.request_id,
            arrived_at=request.state.arrived_at,
            ttft_seconds=_ttft_seconds(header_of(request, TTFT_HEADER)),
            tier=header_of(request, TIER_HEADER),
        )


def header_of(request: HttpRequest, name: str) -> str | None:
    """Return the value of a header that says who calls or how urgently; None = there is none.

    Raises:
        InvalidHeaderError: There are several: which of them would a proxy on the way have obeyed?
    """
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise InvalidHeaderError(name, "to be given once")
    return values[0] if values else None


def _ttft_seconds(header: str | None) -> float | None:
    if header is None:
        return None
    digits = header.strip(" \t")
    # Neither signs nor digits of other scripts, and nothing so long that reading it takes time.
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= len(str(MAX_TTFT_MS))
    milliseconds = int(digits) if is_number else 0
    if not 1 <= milliseconds <= MAX_TTFT_MS:
        allowed = f"a whole number of milliseconds from 1 to {MAX_TTFT_MS}"
        raise InvalidHeaderError(TTFT_HEADER, allowed)
    return milliseconds / 1000
