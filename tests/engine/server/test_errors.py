import pytest

from tidegate_engine.core.request import Rejection, RejectionCode
from tidegate_engine.server.errors import REASON_HEADER, from_rejection

STATUS = {
    RejectionCode.PROMPT_TOO_LONG: 400,
    RejectionCode.EMPTY_PROMPT: 400,
    RejectionCode.UNKNOWN_TENANT: 401,
    RejectionCode.TENANT_STOPPED: 403,
    RejectionCode.TIER_NOT_ALLOWED: 403,
    RejectionCode.TENANT_QUEUE_FULL: 429,
    RejectionCode.QUEUE_FULL: 503,
    RejectionCode.NO_POLICY: 503,
    RejectionCode.SHED: 429,
}


@pytest.mark.parametrize("code", list(RejectionCode))
def test_every_refusal_has_its_status_and_tells_proxies_its_reason(code: RejectionCode) -> None:
    error = from_rejection(Rejection(code=code, message="no", retry_after_seconds=2.1))
    assert error.status == STATUS[code]
    assert error.headers[REASON_HEADER] == error.code
    if code is not RejectionCode.UNKNOWN_TENANT:
        assert error.code == code.value
        told = error.headers.get("retry-after")
        assert told in ({"3", "4"} if error.status in {429, 503} else {None})


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.001, {1, 2}), (10.0, {10, 11, 12}), (500.0, set(range(48, 61)))]
)
def test_who_is_refused_is_told_to_come_back_within_a_minute_and_not_all_at_once(
    seconds: float, told: set[int]
) -> None:
    refusal = Rejection(code=RejectionCode.SHED, message="no", retry_after_seconds=seconds)
    heard = {int(from_rejection(refusal).headers["retry-after"]) for _ in range(400)}
    assert heard == told
