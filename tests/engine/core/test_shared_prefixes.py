"""Tenants that share their prefixes find each other's blocks; private ones find their own alone."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate_engine.core.plan import StepPlan
from tidegate_engine.core.request import Request
from tidegate_policies.rules import PreemptionMode, PreemptionRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_tenant
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import (
    BLOCK_SIZE,
    Simulation,
    a_prompt,
    a_simulation,
    admitting_by_present_need,
    output_alone,
)

PROMPT = a_prompt(1, 4 * BLOCK_SIZE + 4)


def a_policy(*sharers: str, private: tuple[str, ...] = (), **fields: object) -> PolicySnapshot:
    return admitting_by_present_need(
        *(a_tenant(name, **{"shares_prefixes": True, **fields}) for name in sharers),  # type: ignore[arg-type]
        *(a_tenant(name, **fields) for name in private),  # type: ignore[arg-type]
    )


def cached(engine: Simulation, tenant: str) -> int:
    return engine.scheduler.stats().tenants[tenant].cached_tokens


def ask(engine: Simulation, tenant: str, *, output: int = 4) -> None:
    engine.accept(a_request(tenant, prompt=PROMPT, output=output))
    engine.step()


def found(engine: Simulation, tenant: str) -> int:
    """Return what the prefix cache has of the prompt for one request of a tenant."""
    before = cached(engine, tenant)
    ask(engine, tenant)
    engine.drain()
    return cached(engine, tenant) - before


def test_who_shares_finds_the_others_blocks_and_nobody_else_does() -> None:
    engine = a_simulation(a_policy("one", "two", private=("three", "four")), blocks=64)
    assert [found(engine, name) for name in ("one", "two", "three", "four")] == [0, 64, 0, 0]
    assert [found(engine, name) for name in ("three", "four")] == [64, 64]


def test_who_turns_private_neither_finds_what_is_shared_nor_leaves_anything_behind() -> None:
    engine = a_simulation(a_policy("one", "two"), blocks=64)
    assert [found(engine, "one"), found(engine, "two")] == [0, 64]
    engine.obey(a_policy("two", private=("one",)))
    engine.step()
    assert [found(engine, "one"), found(engine, "two")] == [0, 0]
    assert [found(engine, "one"), found(engine, "two")] == [64, 64]


def test_who_turns_shared_finds_the_others_blocks_from_then_on() -> None:
    engine = a_simulation(a_policy("one", private=("two",)), blocks=64)
    assert [found(engine, "one"), found(engine, "two")] == [0, 0]
    engine.obey(a_policy("one", "two"))
    engine.step()
    assert found(engine, "two") == 64


def test_a_request_that_waits_while_its_tenant_turns_private_finds_nothing_shared() -> None:
    engine = a_simulation(a_policy("one", "two"), blocks=64, max_num_seqs=1)
    ask(engine, "one", output=40)
    engine.accept(a_request("two", prompt=PROMPT, output=4))
    engine.steps(3)
    engine.obey(a_policy("one", private=("two",)))
    engine.drain()
    assert cached(engine, "two") == 0


def test_what_runs_while_its_tenant_turns_private_keeps_its_blocks_and_is_found_by_nobody() -> None:
    engine = a_simulation(a_policy("one", "two"), blocks=64)
    ask(engine, "one", output=100)
    ask(engine, "two", output=100)
    held = engine.scheduler.stats().kv_used_blocks
    engine.obey(a_policy("two", private=("one",)))
    engine.step()
    assert engine.scheduler.stats().kv_used_blocks == held
    ask(engine, "two", output=100)
    engine.drain()
    assert cached(engine, "two") == 64  # of the request before the change
    assert found(engine, "two") == 64  # and of the one after it


def test_each_pays_for_what_it_holds_whatever_the_other_does() -> None:
    engine = a_simulation(a_policy("one", "two", kv_nominal_percent=25), blocks=64)
    ask(engine, "one", output=6)
    ask(engine, "two", output=100)
    stats = engine.scheduler.stats()
    assert [engine.used_blocks("one"), engine.used_blocks("two")] == [5, 5]
    assert stats.kv_used_blocks == 4 + 2
    while engine.used_blocks("one"):
        engine.step()
    assert engine.used_blocks("two") == 5
    stats = engine.scheduler.stats()
    parts = sum(tenant.kv_seconds for tenant in stats.tenants.values())
    assert parts == pytest.approx(stats.kv_seconds, abs=1e-6)


def test_a_cap_holds_for_shared_blocks_too() -> None:
    policy = a_policy("one", "two", kv_nominal_percent=10, kv_borrowing_limit_percent=0)
    engine = a_simulation(policy, blocks=60)
    ask(engine, "one", output=20)
    ask(engine, "two", output=20)
    ask(engine, "two", output=20)
    assert engine.used_blocks("two") == 6  # of its own cap of 6: two tables of 5, 4 of them equal
    ask(engine, "two", output=20)
    assert engine.scheduler.stats().tenants["two"].running == 2


# -- whatever happens ---------------------------------------------------------------------------

TENANTS = ("a", "b", "c")
PROMPTS = [(number % 3, *range(1, length)) for number, length in enumerate((20, 36, 68, 84, 70))]
POLICIES = [
    admitting_by_present_need(
        *(
            a_tenant(
                name,
                tier=tier,
                shares_prefixes=name in sharers,
                preemption=PreemptionRule(mode=mode, min_quantum_tokens=0),
                kv_nominal_percent=nominal,
            )
            for name, tier in zip(TENANTS, ("high", "standard", "low"), strict=True)
        )
    )
    for sharers, mode, nominal in (
        ("abc", PreemptionMode.SWAP, 20),
        ("ab", PreemptionMode.RECOMPUTE, 0),
        ("bc", PreemptionMode.SWAP, 10),
        ("", PreemptionMode.RECOMPUTE, 30),
    )
]

events = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 2), st.integers(0, 4)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
        st.tuples(st.just("policy"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(0, 8), st.just(0)),
    ),
    min_size=5,
    max_size=40,
)


class Witness:
    """Knows what the prefix cache may have for whom, from plans and prompts alone."""

    def __init__(self) -> None:
        self.engine = a_simulation(POLICIES[0], blocks=24, host_blocks=24, max_num_seqs=6)
        self.requests: dict[str, Request] = {}
        self.policy = POLICIES[0]
        self._seen: dict[str, set[tuple[int, ...]]] = {name: set() for name in TENANTS}

    def arrive(self, tenant: str, prompt: tuple[int, ...]) -> None:
        request_id = f"r{len(self.requests)}"
        request = a_request(tenant, prompt=prompt, output=12, request_id=request_id)
        self.requests[request_id] = request
        self.engine.accept(request)

    def obey(self, policy: PolicySnapshot) -> None:
        self.policy = policy
        self.engine.obey(policy)

    def step(self) -> None:
        plan = self.engine.step()
        self._check(plan)
        for row in plan.rows:
            request = self.requests[row.request_id]
            self._seen[request.tenant].add(request.prompt_ids[: row.end])

    def _check(self, plan: StepPlan) -> None:
        for request_id, num_tokens in plan.cached:
            request = self.requests[request_id]
            if num_tokens and not self._shares(request.tenant):
                prefix = request.prompt_ids[: num_tokens // BLOCK_SIZE * BLOCK_SIZE]
                own = self._seen[request.tenant]
                assert any(prompt[: len(prefix)] == prefix for prompt in own), request

    def _shares(self, tenant: str) -> bool:
        return self.policy.tenant_rules[tenant].shares_prefixes


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=events)
def test_a_private_tenant_finds_its_own_prompts_alone_and_all_books_agree(
    events: list[tuple[str, int, int]],
) -> None:
    witness = Witness()
    for kind, which, what in events:
        if kind == "arrive":
            witness.arrive(TENANTS[which], PROMPTS[what])
        elif kind == "policy":
            witness.obey(POLICIES[which])
        elif kind == "cancel":
            witness.engine.cancel(f"r{which}")
        for _ in range(which if kind == "step" else 0):
            witness.step()
    for _ in range(2000):
        if not witness.engine.scheduler.has_work:
            break
        witness.step()
    stats = witness.engine.scheduler.stats()
    assert stats.kv_used_blocks == 0
    for request_id, request in witness.requests.items():
        trace = witness.engine.log.requests[request_id]
        if trace.is_finished:
            alone = output_alone(request, blocks=24, policy=POLICIES[3])
            assert trace.token_ids == alone
