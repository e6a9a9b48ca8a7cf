import pytest
from starlette.requests import Request

from tidegate_engine.server.caller import MAX_TTFT_MS, TIER_HEADER, TTFT_HEADER, Caller
from tidegate_engine.server.errors import ApiError


def caller(*values: str, header: str = TTFT_HEADER) -> Caller:
    headers = [(header.encode(), value.encode("latin-1")) for value in values]
    state = {"request_id": "cmpl-1", "arrived_at": 2.5}
    request = Request({"type": "http", "headers": headers, "state": state})
    return Caller.of(request, tenant="acme")


def test_without_a_header_the_policy_says_when_the_first_token_is_wanted() -> None:
    assert caller() == Caller(tenant="acme", request_id="cmpl-1", arrived_at=2.5)


@pytest.mark.parametrize(
    ("text", "seconds"), [("1", 0.001), ("250", 0.25), (" \t0250 ", 0.25), ("86400000", 86_400)]
)
def test_the_header_says_when_the_first_token_is_wanted(text: str, seconds: float) -> None:
    assert caller(text).ttft_seconds == seconds


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-5", "+5", "2.5", "1e3", "0x10", "1_000", "soon", "²", "Ù£", "86400001"),
        "9" * 5000,
        # Spaces to Python, and not to HTTP.
        *("\xa05", "5\x85", "\x1c5"),
    ],
)
def test_anything_else_is_refused_with_the_headers_name_and_its_limit(text: str) -> None:
    with pytest.raises(ApiError, match=str(MAX_TTFT_MS)) as caught:
        caller(text)
    assert (caught.value.status, caught.value.code) == (400, "invalid_header")
    assert caught.value.param == TTFT_HEADER
    assert TTFT_HEADER in str(caught.value)


@pytest.mark.parametrize(
    ("header", "values"),
    [(TTFT_HEADER, ("5", "900")), (TTFT_HEADER, ("5", "5")), (TIER_HEADER, ("low", "standard"))],
)
def test_what_is_asked_for_twice_is_refused_by_name(header: str, values: tuple[str, str]) -> None:
    with pytest.raises(ApiError, match="once") as caught:
        caller(*values, header=header)
    assert (caught.value.code, caught.value.param) == ("invalid_header", header)
