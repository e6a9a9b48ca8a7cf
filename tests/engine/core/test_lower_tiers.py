"""A tenant whose requests ask for lower tiers: scheduled there, limited as one tenant."""

from random import Random

import pytest

from tidegate_engine.core.request import Rejection, RejectionCode
from tidegate_policies.rules import PreemptionRule, ServiceRule, StopPolicy
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import Run, a_request, a_run

TIERS = {"gold": 10, "silver": 5, "bronze": 0}


def a_policy(*, allowed: tuple[str, ...] = ("silver", "bronze"), **acme: object) -> PolicySnapshot:
    return a_snapshot(
        a_tenant("acme", tier="gold", allowed_tiers=allowed, **acme),
        a_tenant("zeta", tier="silver"),
        a_tenant("yoyo", tier="bronze"),
        tiers=TIERS,
    )


def ask(
    run: Run, name: str, tier: str | None = None, *, tenant: str = "acme", output: int = 1
) -> None:
    run.submit(a_request(tenant, request_id=name, tier=tier, output=output))


def rejection(run: Run, **fields: object) -> Rejection | None:
    return run.scheduler.submit(a_request("acme", **fields), 0.0)  # type: ignore[arg-type]


def apply(run: Run, policy: PolicySnapshot, revision: int = 2) -> None:
    run.scheduler.apply_policy(policy, revision)


def test_a_request_is_served_after_all_of_higher_tiers_wherever_its_tenant_is() -> None:
    run = a_run(a_policy(), max_num_seqs=1)
    ask(run, "low", "bronze")
    ask(run, "other", tenant="zeta")
    ask(run, "own")
    run.drain()
    assert run.admitted == ["own", "other", "low"]


def test_it_may_be_displaced_by_its_own_tenant_and_displaces_nobody_of_the_same_tier() -> None:
    run = a_run(
        a_policy(preemption=PreemptionRule(min_quantum_tokens=0)),
        max_num_seqs=1,
        max_batched_tokens=8,
    )
    ask(run, "low", "bronze", output=30)
    run.steps(3)
    ask(run, "own")
    run.drain()
    assert run.admitted == ["low", "own", "low"]


def test_two_tenants_share_a_tier_by_weight_whichever_is_there_by_its_own_wish() -> None:
    run = a_run(a_policy(), max_num_seqs=2, blocks=400)
    for number in range(40):
        ask(run, f"acme{number}", "bronze", output=8)
        ask(run, f"yoyo{number}", tenant="yoyo", output=8)
    run.steps(120)
    counts = [sum(r.startswith(name) for r in run.finished) for name in ("acme", "yoyo")]
    assert min(counts) > 5
    assert abs(counts[0] - counts[1]) <= 1


def test_service_in_a_lower_tier_costs_the_tenant_nothing_in_its_own() -> None:
    policy = a_snapshot(
        a_tenant("acme", tier="gold", allowed_tiers=("bronze",)),
        a_tenant("rival", tier="gold"),
        tiers={"gold": 10, "bronze": 0},
    )
    run = a_run(policy, max_num_seqs=1)
    ask(run, "rival-first", tenant="rival")
    for number in range(8):
        ask(run, f"low{number}", "bronze", output=10)
    run.drain()
    run.submit(a_request("rival", request_id="rival", prompt=(8, 9), output=1))
    run.submit(a_request("acme", request_id="own", prompt=(8, 9), output=1))
    run.drain()
    # The rival has been served once in their tier, and its tenant never.
    assert run.admitted[-2:] == ["own", "rival"]
    accounts = run.scheduler.stats().accounts
    assert accounts["acme bronze"].service > 8 * 10
    assert accounts["acme"].service == 2 + 2
    assert run.scheduler.stats().tenants["acme"].service == (
        accounts["acme"].service + accounts["acme bronze"].service
    )


def test_limits_hold_over_all_tiers_of_a_tenant() -> None:
    run = a_run(a_policy(max_running=2), max_num_seqs=8)
    ask(run, "low", "bronze", output=6)
    ask(run, "middle", "silver", output=3)
    run.step()
    ask(run, "own")
    run.step()
    stats = run.scheduler.stats().tenants["acme"]
    assert (stats.running, stats.waiting) == (2, 1)
    run.drain()
    # Who was kept out by the limit comes in with the end of a request of another tier.
    assert run.admitted == ["middle", "low", "own"]


def test_queue_limits_and_the_part_of_the_engines_queue_are_one_for_all_tiers() -> None:
    run = a_run(a_policy(max_queued=2, max_queued_tokens=9), max_num_seqs=1)
    ask(run, "low", "bronze")
    refused = rejection(run, prompt=6, tier="silver")
    assert refused is not None
    assert refused.code is RejectionCode.TENANT_QUEUE_FULL
    ask(run, "middle", "silver")
    refused = rejection(run, prompt=1)
    assert refused is not None
    assert refused.code is RejectionCode.TENANT_QUEUE_FULL


def test_a_nominal_that_is_needed_at_worst_is_shared_by_all_tiers() -> None:
    policy = a_policy(kv_nominal_percent=25, preemption=PreemptionRule(preemptible=False))
    run = a_run(policy, blocks=32, block_size=4)  # 8 blocks are acme's
    ask(run, "own", output=17)  # 20 tokens: 5 blocks
    ask(run, "low", "bronze", output=17)
    run.step()
    assert run.scheduler.stats().tenants["acme"].running == 1
    run.drain()
    assert run.admitted == ["own", "low"]


def test_what_a_policy_doesnt_allow_is_refused_by_name() -> None:
    run = a_run(a_policy(allowed=("bronze",)))
    refused = rejection(run, tier="silver")
    assert refused is not None
    assert refused.code is RejectionCode.TIER_NOT_ALLOWED
    assert "'gold', 'bronze'" in refused.message


def test_queued_requests_stay_in_their_tier_when_it_is_allowed_no_more() -> None:
    run = a_run(a_policy(), max_num_seqs=1)
    ask(run, "low", "bronze")
    ask(run, "other", tenant="zeta")
    apply(run, a_policy(allowed=()))
    run.step()
    assert rejection(run, tier="bronze") is not None
    run.drain()
    assert run.admitted == ["other", "low"]
    assert "acme bronze" not in run.scheduler.stats().accounts


def test_a_tenant_that_sinks_to_a_lower_tier_has_one_queue_there_by_arrival() -> None:
    run = a_run(a_policy(), max_num_seqs=1)
    for number in range(3):
        ask(run, f"low{number}", "bronze")
        ask(run, f"own{number}")
    ask(run, "between", tenant="yoyo")
    sunk = a_snapshot(
        a_tenant("acme", tier="bronze"), a_tenant("yoyo", tier="bronze"), tiers={"bronze": 0}
    )
    apply(run, sunk)
    run.drain()
    own = [name for name in run.admitted if name != "between"]
    assert own == ["low0", "own0", "low1", "own1", "low2", "own2"]
    # One tenant, one share: the other's request is among the first.
    assert run.admitted.index("between") <= 1


def test_running_and_swapped_requests_of_a_tier_move_with_its_value() -> None:
    run = a_run(a_policy(), max_num_seqs=2)
    ask(run, "low", "bronze", output=12)
    ask(run, "middle", "silver", output=12)
    run.steps(4)
    raised = a_snapshot(
        a_tenant("acme", tier="gold", allowed_tiers=("silver",)),
        a_tenant("zeta", tier="silver"),
        tiers={"gold": 10, "silver": 5, "bronze": 20},
    )
    apply(run, raised)
    run.step()
    # What is above the tenant's own tier now is served in that.
    assert set(run.scheduler.stats().accounts) == {"acme", "acme silver", "zeta"}
    run.drain()
    assert set(run.finished) == {"low", "middle"}
    assert run.scheduler.stats().tenants["acme"].finished == 2


def test_two_tiers_of_the_same_value_give_no_second_share() -> None:
    policy = a_snapshot(
        a_tenant("acme", tier="gold", allowed_tiers=("a", "b")),
        tiers={"gold": 10, "a": 1, "b": 1},
    )
    run = a_run(policy, max_num_seqs=1)
    ask(run, "one", "a")
    ask(run, "two", "b")
    run.step()
    assert set(run.scheduler.stats().accounts) == {"acme", "acme a"}
    run.drain()


def test_a_hold_a_cancel_and_a_deletion_are_for_all_tiers() -> None:
    run = a_run(a_policy(stop=StopPolicy.HOLD))
    ask(run, "low", "bronze")
    ask(run, "own")
    run.step()
    assert run.admitted == []
    apply(run, a_policy(stop=StopPolicy.CANCEL))
    assert set(run.step().stopped) == {"low", "own"}
    apply(run, a_policy(), 3)
    run.step()
    ask(run, "low2", "bronze")
    apply(run, a_snapshot(a_tenant("zeta", tier="silver"), tiers=TIERS), 4)
    run.step()
    run.drain()
    assert "low2" in run.finished
    assert set(run.scheduler.stats().tenants) == {"zeta"}


def test_what_another_engine_gave_in_a_lower_tier_counts_in_that() -> None:
    run = a_run(a_policy(), max_num_seqs=1)
    ask(run, "first", tenant="yoyo", output=20)
    run.step()
    ask(run, "other", tenant="yoyo")
    run.scheduler.note_elsewhere({"acme bronze": 1000.0}, ["acme bronze"])
    ask(run, "low", "bronze")
    ask(run, "own")
    run.drain()
    assert run.admitted.index("own") < run.admitted.index("other") < run.admitted.index("low")


def a_random_policy(random: Random) -> PolicySnapshot:
    tiers = {name: random.randint(-2, 3) for name in ("a", "b", "c", "d")}
    rules = []
    for name in random.sample(["acme", "zeta", "yoyo"], random.randint(1, 3)):
        own = random.choice(list(tiers))
        lower = [tier for tier, value in tiers.items() if value < tiers[own]]
        rules.append(
            a_tenant(
                name,
                tier=own,
                allowed_tiers=tuple(random.sample(lower, random.randint(0, len(lower)))),
                weight=random.choice([0, 1, 5]),
                kv_nominal_percent=random.choice([0, 10]),
                max_running=random.choice([None, 1, 2]),
                stop=random.choice([StopPolicy.NONE] * 6 + list(StopPolicy)),
                preemption=PreemptionRule(
                    preemptible=random.random() < 0.8, min_quantum_tokens=random.choice([0, 4])
                ),
                service=ServiceRule(ttft_seconds=random.choice([None, 0.5])),
            )
        )
    return a_snapshot(*rules, tiers=tiers)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_wishes_and_policies_keeps_all_books(seed: int) -> None:
    random = Random(seed)
    run = a_run(a_random_policy(random), blocks=24, max_num_seqs=3, max_batched_tokens=12)
    names: list[str] = []
    merged = 0
    for step in range(250):
        for _ in range(random.randint(0, 2)):
            request = a_request(
                random.choice(["acme", "zeta", "yoyo"]),
                prompt=random.randint(1, 20),
                output=random.randint(1, 12),
                tier=random.choice([None, "a", "b", "c", "d"]),
            )
            if run.scheduler.submit(request, 0.0) is None:
                names.append(request.request_id)
        if random.random() < 0.1 and names:
            run.scheduler.cancel(random.choice(names), 0.0)
        if random.random() < 0.15:
            before = len(run.scheduler.stats().accounts)
            apply(run, a_random_policy(random), step + 2)
            run.step()
            merged += len(run.scheduler.stats().accounts) < before
        if random.random() < 0.2:
            accounts = [f"{name} {tier}" for name in ("acme", "gone") for tier in "abz"]
            run.scheduler.note_elsewhere(dict.fromkeys(accounts, 3.0), accounts[:2])
        run.step()
    assert merged
    calm = a_snapshot(
        *[a_tenant(name, tier="a") for name in ("acme", "zeta", "yoyo")], tiers={"a": 1}
    )
    apply(run, calm, 1000)
    run.step()
    run.drain()
    stats = run.scheduler.stats()
    assert set(stats.accounts) == {"acme", "zeta", "yoyo"}
    ends = [t.finished + t.cancelled + t.expired for t in (*stats.tenants.values(), stats.gone)]
    assert sum(ends) == stats.arrivals == len(names)
