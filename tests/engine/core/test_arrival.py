"""What refused arrivals are told: which limit of whom it is, and when there is room."""

from math import inf

import pytest

from tidegate_engine.core.request import Rejection, RejectionCode
from tidegate_policies.rules import PreemptionRule, StopPolicy, TenantRule
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request, a_run
from tidegate_testing.simulation import Simulation, a_simulation

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


def told_to_wait(engine: Simulation, *, prompt: int = 20) -> float | None:
    """Return when who finds its tenant's queue full is told to come back; None = it was let in."""
    rejection = engine.submit(a_request(prompt=prompt, output=100))
    if rejection is None:
        return None
    assert rejection.code is RejectionCode.TENANT_QUEUE_FULL
    return rejection.retry_after_seconds


@pytest.mark.parametrize("slots", [4, 32], ids=["full batch", "own limit"])
@pytest.mark.parametrize(
    ("rule", "waiting", "prompt"),
    [
        (a_tenant(max_running=4, max_queued=6), 6, 20),
        (a_tenant(max_running=4, max_queued_tokens=120), 6, 20),
        (a_tenant(max_running=4, max_queued_tokens=300), 15, 180),  # needs the room of nine
    ],
    ids=["requests", "tokens", "many tokens"],
)
def test_who_finds_its_tenants_queue_full_is_told_when_it_has_room(
    rule: TenantRule, waiting: int, prompt: int, slots: int
) -> None:
    engine = a_simulation(a_snapshot(rule), blocks=1000, max_num_seqs=slots)
    engine.accept(*(a_request(output=200 + 20 * number) for number in range(4)))
    engine.step()
    engine.accept(*(a_request(prompt=20, output=200) for _ in range(waiting)))
    told, began = told_to_wait(engine, prompt=prompt), engine.clock.now()
    assert told is not None
    while told_to_wait(engine, prompt=prompt) is not None:
        engine.step()
    assert told == pytest.approx(engine.clock.now() - began, rel=0.2)


def test_who_queues_in_several_tiers_is_told_when_the_fastest_has_room() -> None:
    tiers = {"standard": 0, "low": -1}
    rule = a_tenant(max_queued=2, allowed_tiers=("low",))
    engine = a_simulation(a_snapshot(rule, tiers=tiers), blocks=1000, max_num_seqs=1)
    engine.accept(a_request(output=100))
    engine.step()
    engine.accept(a_request(output=900), a_request(output=900, tier="low"))
    told, began = told_to_wait(engine), engine.clock.now()
    while told_to_wait(engine) is not None:
        engine.step()
    assert told == pytest.approx(engine.clock.now() - began, rel=0.2)


def test_while_a_tenant_is_held_nobody_knows_when_its_queue_has_room() -> None:
    engine = a_simulation(a_snapshot(a_tenant(max_queued=1, stop=StopPolicy.HOLD)), blocks=1000)
    assert [told_to_wait(engine) for _ in range(2)] == [None, inf]
