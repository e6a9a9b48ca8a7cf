"""The list of error codes, the table of them in the documentation, and the tests name the same."""

import re
from pathlib import Path

import pytest

from tidegate_engine.core.request import RejectionCode
from tidegate_engine.server.error_codes import MEANINGS, Cause, ErrorCode
from tidegate_engine.server.errors import REASON_HEADER, RETRY_HEADER, ApiError

ROOT = Path(__file__).parents[3]
SERVED = re.compile(r"\b(a_running_engine|RunningEngine|import openai)\b")
ROW = re.compile(r"^\| `(\w+)` \| (\d+) \| (\w+) \| (yes|no) \| .+ \|$", re.MULTILINE)


def test_the_documented_table_says_what_the_code_does() -> None:
    rows = ROW.findall((ROOT / "docs/api.md").read_text())
    documented = [(code, int(status), cause, retry == "yes") for code, status, cause, retry in rows]
    assert documented == [(code, *MEANINGS[code]) for code in sorted(ErrorCode, key=_by_status)]


def _by_status(code: ErrorCode) -> tuple[int, int]:
    return MEANINGS[code].status, list(ErrorCode).index(code)


@pytest.fixture(scope="module")
def tests_over_http() -> list[str]:
    """The texts of all test files that ask a served engine."""
    texts = (path.read_text() for path in (ROOT / "tests/engine").rglob("test_*.py"))
    return [text for text in texts if SERVED.search(text)]


# A body that breaks off has nobody left who could be told.
@pytest.mark.parametrize("code", [c for c in ErrorCode if c is not ErrorCode.CLIENT_DISCONNECTED])
def test_some_client_of_a_served_engine_gets_the_code(
    tests_over_http: list[str], code: ErrorCode
) -> None:
    status = MEANINGS[code].status
    # As `(400, "it")`, `code="it"`, `error["code"] == "it"` or `"code":"it"`.
    told = re.compile(rf"""({status}, |\bcode("?\]? ?==? ?|":))"{code}\"""")
    assert any(told.search(text) for text in tests_over_http)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_an_error_tells_its_code_twice_and_whether_and_when_to_come_back(
    code: ErrorCode,
) -> None:
    error = ApiError(code, "No.", retry_after_seconds=7.0)
    told = error.body()["error"]
    assert (told["code"], error.headers[REASON_HEADER]) == (code, code)
    _, cause, is_retryable = MEANINGS[code]
    assert ("retry-after" in error.headers) is is_retryable
    helps_elsewhere = is_retryable or cause is Cause.ENGINE
    assert error.headers.get(RETRY_HEADER) == (None if helps_elsewhere else "false")


def test_the_callers_errors_are_never_503_and_the_engines_never_4xx() -> None:
    for status, cause, is_retryable in MEANINGS.values():
        if status == 503:
            assert (cause, is_retryable) == (Cause.ENGINE, True)
        if status < 500:
            assert (cause, is_retryable) == (Cause.CALLER, status == 429)


def test_every_refusal_of_the_scheduler_has_a_code_but_that_of_an_unknown_tenant() -> None:
    codes = {code.value for code in RejectionCode if code is not RejectionCode.UNKNOWN_TENANT}
    assert codes <= {code.value for code in ErrorCode}
