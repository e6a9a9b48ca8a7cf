"""What refused arrivals are told: which limit of whom it is, and when there is room."""

import pytest

from tidegate_engine.core.request import Rejection, RejectionCode
from tidegate_policies.rules import PreemptionRule, TenantRule
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request, a_run

FIXED = PreemptionRule(preemptible=False)


def refusal(rule: TenantRule, *, prompt: int) -> Rejection:
    rejection = a_run(a_snapshot(rule), blocks=100).scheduler.submit(a_request(prompt=prompt), 0.0)
    assert rejection is not None
    assert rejection.code is RejectionCode.PROMPT_TOO_LONG
    assert rejection.retry_after_seconds is None
    return rejection


@pytest.mark.parametrize(
    ("rule", "fields"),
    [
        (a_tenant(preemption=FIXED), "kv.nominalPercent 0, preemption.preemptible false"),
        (
            a_tenant(kv_borrowing_limit_percent=0),
            "kv.nominalPercent 0, kv.borrowingLimitPercent 0",
        ),
    ],
)
def test_who_may_hold_no_kv_is_told_so_and_by_which_fields(rule: TenantRule, fields: str) -> None:
    message = f"no prompt fits: tenant 'acme' may hold 0 KV blocks ({fields})"
    assert refusal(rule, prompt=5).message == message


@pytest.mark.parametrize(
    ("rule", "limit"),
    [
        (
            a_tenant(kv_nominal_percent=5, preemption=FIXED),
            "19: one less than tenant 'acme' may hold in KV"
            " (kv.nominalPercent 5, preemption.preemptible false)",
        ),
        (
            a_tenant(kv_borrowing_limit_percent=5, max_prompt_tokens=20),
            "19: one less than tenant 'acme' may hold in KV"
            " (kv.nominalPercent 0, kv.borrowingLimitPercent 5)",
        ),
        (a_tenant(max_prompt_tokens=20), "20: limits.maxPromptTokens of tenant 'acme'"),
        (a_tenant(), "399: one less than tenant 'acme' may hold in KV"),
    ],
)
def test_a_prompt_that_is_too_long_is_told_the_least_limit_and_whose_it_is(
    rule: TenantRule, limit: str
) -> None:
    message = refusal(rule, prompt=400).message
    assert message == f"the prompt has 400 tokens, the limit is {limit}"
