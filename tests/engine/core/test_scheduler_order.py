"""Who is served first: tiers, fairness, weights."""

import pytest

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_policies.rules import WatermarkRule
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request, a_run

TIERS = {"gold": 100, "standard": 0}
WIDE = WatermarkRule(low_percent=98, high_percent=99)  # watermarks out of the way


def test_a_higher_tier_goes_first_whenever_it_arrives() -> None:
    run = a_run(
        a_snapshot(a_tenant("gold", tier="gold"), a_tenant("batch"), tiers=TIERS), max_num_seqs=1
    )
    run.submit(*(a_request("batch", request_id=f"b{n}") for n in range(3)))
    run.step()
    run.submit(a_request("gold", request_id="g"))
    run.drain()
    assert run.admitted == ["b0", "g", "b1", "b2"]


def test_one_request_of_a_quiet_tenant_passes_a_flood() -> None:
    run = a_run(a_snapshot(a_tenant("flood"), a_tenant("quiet")), max_num_seqs=1)
    run.submit(*(a_request("flood") for _ in range(50)), a_request("quiet", request_id="q"))
    run.drain()
    assert run.admitted.index("q") <= 1


def shares(weights: dict[str, int], *, steps: int) -> dict[str, float]:
    policy = a_snapshot(*(a_tenant(t, weight=w) for t, w in weights.items()))
    run = a_run(policy, max_num_seqs=2, max_waiting=2000)
    for tenant in weights:
        run.submit(*(a_request(tenant, output=6) for _ in range(300)))
    run.steps(steps)
    stats = run.scheduler.stats().tenants
    total = sum(stats[t].service for t in weights)
    return {tenant: stats[tenant].service / total for tenant in weights}


def test_backlogged_tenants_are_served_by_weight() -> None:
    achieved = shares({"a": 1, "b": 2, "c": 4}, steps=700)
    for tenant, expected in {"a": 1 / 7, "b": 2 / 7, "c": 4 / 7}.items():
        assert achieved[tenant] == pytest.approx(expected, abs=0.02)


def test_weight_zero_is_served_when_nobody_else_wants_service() -> None:
    run = a_run(a_snapshot(a_tenant("spare", weight=0), a_tenant("paying")), max_num_seqs=1)
    run.submit(a_request("spare", request_id="s"), a_request("spare", request_id="s2"))
    run.submit(*(a_request("paying", request_id=f"p{n}") for n in range(3)))
    run.drain()
    assert run.admitted == ["p0", "p1", "p2", "s", "s2"]


def test_a_changed_weight_counts_from_the_next_charge_on() -> None:
    run = a_run(a_snapshot(a_tenant("a"), a_tenant("b")), max_num_seqs=2)
    for tenant in "ab":
        run.submit(*(a_request(tenant, output=6) for _ in range(400)))
    run.steps(200)
    before = run.scheduler.stats().tenants
    run.scheduler.apply_policy(a_snapshot(a_tenant("a", weight=300), a_tenant("b")), 2)
    run.steps(400)
    after = run.scheduler.stats().tenants
    gained = {t: after[t].output_tokens - before[t].output_tokens for t in "ab"}
    assert before["a"].output_tokens == pytest.approx(before["b"].output_tokens, abs=12)
    assert gained["a"] / gained["b"] == pytest.approx(3, rel=0.1)


def test_a_newcomer_gains_nothing_from_having_been_idle() -> None:
    run = a_run(a_snapshot(a_tenant("old"), a_tenant("new")), max_num_seqs=1)
    run.submit(*(a_request("old", output=6) for _ in range(100)))
    run.steps(200)
    served = run.scheduler.stats().tenants["old"].output_tokens
    run.submit(*(a_request("new", output=6) for _ in range(100)))
    run.steps(200)
    stats = run.scheduler.stats().tenants
    assert stats["new"].output_tokens == pytest.approx(stats["old"].output_tokens - served, abs=12)


def test_who_gets_all_it_asks_for_banks_nothing_meanwhile() -> None:
    run = a_run(a_snapshot(a_tenant("light"), a_tenant("heavy")), max_num_seqs=4, blocks=400)
    run.submit(*(a_request("heavy", output=6) for _ in range(200)))
    run.submit(a_request("light", output=400))
    run.steps(100)  # it has never waited, nor been without a request
    before = run.scheduler.stats().tenants
    assert before["light"].virtual_counter < before["heavy"].virtual_counter / 2
    run.submit(*(a_request("light", output=6) for _ in range(200)))
    run.steps(100)
    after = run.scheduler.stats().tenants
    gained = {name: after[name].service - before[name].service for name in after}
    assert gained["light"] == pytest.approx(gained["heavy"], rel=0.1)


def test_who_decodes_begins_its_next_prompt_beside_the_half_read_ones_of_others() -> None:
    run = a_run(a_snapshot(a_tenant("a"), a_tenant("b")), blocks=200, max_batched_tokens=16)
    run.submit(a_request("b", request_id="first", output=40))
    run.step()
    run.submit(*(a_request("a", request_id=f"long{n}", prompt=(n,) * 80) for n in (1, 2)))
    run.step()
    run.submit(a_request("b", request_id="next", prompt=(3,) * 80))
    run.step()
    assert run.admitted == ["first", "long1", "long2", "next"]


def test_a_tenant_of_long_prompts_gets_its_share_of_the_time_not_of_the_tokens() -> None:
    costs = ExecutorCosts(prefill_token_seconds=1e-4, prefill_pair_seconds=1e-7)
    run = a_run(a_snapshot(a_tenant("long"), a_tenant("short")), blocks=2000, costs=costs)
    run.submit(*(a_request("long", prompt=_tokens(n, 1000), output=1) for n in range(40)))
    run.submit(*(a_request("short", prompt=_tokens(n, 50), output=1) for n in range(200)))
    run.steps(200)
    served = run.scheduler.stats().tenants
    seconds_per_token = {"long": 1e-4 + 500 * 1e-7, "short": 1e-4 + 25 * 1e-7}
    seconds = {name: served[name].prompt_tokens * seconds_per_token[name] for name in served}
    outputs = served["short"].output_tokens * 2e-4
    assert seconds["long"] == pytest.approx(seconds["short"] + outputs, rel=0.1)


def _tokens(number: int, length: int) -> tuple[int, ...]:
    return (number, *range(1, length))
