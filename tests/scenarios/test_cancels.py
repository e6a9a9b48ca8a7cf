"""A cancel takes a request out wherever it is, and gives back all that it held."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.request import Request
from tidegate_engine.core.sequence import Phase
from tidegate_engine.executor.step_cost import AffineCost
from tidegate_engine.replay.log import Outcome
from tidegate_policies.rules import KvEstimate, PreemptionMode, PreemptionRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import (
    BLOCK_SIZE,
    Simulation,
    a_prompt,
    a_simulation,
    output_alone,
)

STATES = ("queued", "prefilling", "decoding", "swapped", "copying")
TIERS = {"high": 10, "middle": 0, "low": -10}
TENANTS = {f"t{number}": [*TIERS][number % 3] for number in range(30)}
BLOCKS = 120
CANCELS = 1000
SLOW_COPIES = AffineCost(
    ExecutorCosts(swap_block_seconds=0.005)
)  # a victim is on its way for some steps
_SWAP = PreemptionRule(mode=PreemptionMode.SWAP, min_quantum_tokens=4, max_preemptions=100)


def a_policy() -> PolicySnapshot:
    return a_snapshot(
        *(a_tenant(name, tier=tier, preemption=_SWAP) for name, tier in TENANTS.items()),
        tiers=TIERS,
        kv_estimate=KvEstimate.OPTIMISTIC,
    )


def state_of(engine: Simulation, request_id: str) -> str:
    seq = engine.scheduler._live[request_id]
    if seq.phase is Phase.RUNNING:
        return "decoding" if seq.is_decoding else "prefilling"
    if seq.phase is Phase.WAITING:
        return "queued"
    return "copying" if seq.fence else "swapped"


@dataclass
class Cancelled:
    """A request that was cancelled.

    Attributes:
        num_tokens: Output tokens that it had by then.
        fence: Of the copy that was in flight for it; 0 = none.
    """

    request: Request
    num_tokens: int
    fence: int


@dataclass
class Traffic:
    """Tenants with one request each, of which some are cancelled.

    So a tenant holds KV blocks if its request does.
    """

    engine: Simulation
    draw: random.Random
    requests: dict[str, Request] = field(default_factory=dict)
    cancelled: dict[str, Cancelled] = field(default_factory=dict)
    by_state: Counter[str] = field(default_factory=Counter)
    in_midst: Counter[bool] = field(default_factory=Counter)
    copying: list[Cancelled] = field(default_factory=list)

    def live(self) -> dict[str, Request]:
        """Return the requests that are alive, by their tenants."""
        traces = self.engine.log.requests
        return {
            request.tenant: request
            for request in self.requests.values()
            if traces[request.request_id].ended_at is None
        }

    def arrive(self) -> None:
        """Let some of the tenants that have no request, and hold nothing, have one."""
        busy = {*self.live(), *(one.request.tenant for one in self.copying)}
        for tenant in TENANTS:
            if tenant not in busy and self.draw.random() < 0.3:
                request = a_request(
                    tenant,
                    prompt=a_prompt(len(self.requests), self.draw.randint(10, 200)),
                    output=self.draw.randint(10, 100),
                    request_id=f"r{len(self.requests)}",
                )
                self.requests[request.request_id] = request
                self.engine.accept(request)

    def cancel(self, *, in_midst: bool) -> None:
        """Cancel a request in that of the states which was met least so far."""
        by_state: dict[str, list[Request]] = {}
        for request in self.live().values():
            by_state.setdefault(state_of(self.engine, request.request_id), []).append(request)
        if not by_state or self.by_state.total() == CANCELS:
            return
        state = min(sorted(by_state), key=lambda state: self.by_state[state])
        request = self.draw.choice(by_state[state])
        self.by_state[state] += 1
        self.in_midst[in_midst] += 1
        self._cancel(request)

    def _cancel(self, request: Request) -> None:
        engine, request_id = self.engine, request.request_id
        seq = engine.scheduler._live[request_id]
        one = Cancelled(request, len(engine.output(request_id)), seq.fence)
        num_host_blocks, before = len(seq.host_table), engine.scheduler.stats()
        assert engine.cancel(request_id)
        assert not engine.cancel(request_id)
        after = engine.scheduler.stats()
        self.cancelled[request_id] = one
        if one.fence:
            assert before.kv_used_blocks == after.kv_used_blocks
            self.copying.append(one)
        else:
            assert engine.used_blocks(request.tenant) == 0
            assert after.host_used_blocks == before.host_used_blocks - num_host_blocks

    def step(self) -> None:
        """Go a step further; verify what is planned and what came free."""
        before = {*self.cancelled}
        plan = self.engine.step()
        swaps = (*plan.swap_out, *plan.swap_in)
        named = {*(row.request_id for row in plan.rows), *(swap.request_id for swap in swaps)}
        assert named.isdisjoint(before)
        still = [one for one in self.copying if one.fence in self.engine.executor.copying]
        for one in self.copying:
            if one not in still:
                assert self.engine.used_blocks(one.request.tenant) == 0
        self.copying = still


def test_a_thousand_random_cancels_in_every_state_leave_nothing_behind() -> None:
    engine = a_simulation(
        a_policy(),
        blocks=BLOCKS,
        host_blocks=BLOCKS,
        max_num_seqs=16,
        cost=SLOW_COPIES,
        check_every=2,
    )
    traffic = Traffic(engine, random.Random(13))
    while traffic.by_state.total() < CANCELS:
        traffic.arrive()
        engine.executor.at_execution = lambda: traffic.cancel(in_midst=True)
        traffic.step()
        engine.executor.at_execution = None
        traffic.step()
        traffic.cancel(in_midst=False)
    assert min(traffic.by_state[state] for state in STATES) >= 100, traffic.by_state
    assert min(traffic.in_midst.values()) >= 300
    while engine.scheduler.has_work:
        traffic.step()

    stats, log = engine.scheduler.stats(), engine.log.requests
    assert stats.kv_used_blocks == stats.host_used_blocks == 0
    assert sum(tenant.cancelled for tenant in stats.tenants.values()) == CANCELS
    for request_id, one in traffic.cancelled.items():
        assert log[request_id].outcome is Outcome.CANCELLED
        assert len(log[request_id].token_ids) == one.num_tokens
    finished = [r for r in traffic.requests.values() if r.request_id not in traffic.cancelled]
    assert all(log[request.request_id].is_finished for request in finished)
    assert sum(tenant.finished for tenant in stats.tenants.values()) == len(finished)
    for request in traffic.draw.sample(finished, 40):
        assert engine.output(request.request_id) == output_alone(
            request, blocks=BLOCKS, policy=a_policy()
        )


def replayed(request: Request, *output: int) -> Request:
    """Build a request whose prompt is that of another with some of its output."""
    prompt = (*request.prompt_ids, *output)
    return a_request(request.tenant, prompt=prompt, output=4, request_id="again")


@pytest.mark.parametrize("state", ["prefilling", "decoding", "swapped", "copying"])
def test_finished_blocks_of_a_cancelled_request_are_still_hit_in_the_prefix_cache(
    state: str,
) -> None:
    engine = a_simulation(
        a_policy(),
        blocks=BLOCKS,
        host_blocks=BLOCKS,
        max_num_seqs=1,
        max_batched_tokens=64,
        cost=SLOW_COPIES,
    )
    request = a_request("t2", prompt=a_prompt(1, 200), output=100, request_id="r")
    assert TENANTS["t2"] == "low"
    engine.accept(request)
    engine.steps(2 if state == "prefilling" else 40)
    if state in {"swapped", "copying"}:
        engine.accept(a_request("t0", prompt=a_prompt(2, 20), output=60, request_id="displacer"))
        engine.step()
        while state == "swapped" and engine.executor.copying:
            engine.step()
    assert state_of(engine, "r") == state
    computed = engine.scheduler._live["r"].computed_tokens
    assert computed >= 8 * BLOCK_SIZE
    engine.cancel("r")
    while engine.scheduler.has_work:
        engine.step()
    assert engine.scheduler.stats().kv_used_blocks == 0
    before = engine.scheduler.stats().tenants["t2"].cached_tokens
    engine.accept(replayed(request, *engine.output("r")))
    engine.drain()
    hit = engine.scheduler.stats().tenants["t2"].cached_tokens - before
    assert hit == computed // BLOCK_SIZE * BLOCK_SIZE
    assert engine.output("again")


def test_a_cancel_leaves_blocks_alone_that_others_share() -> None:
    engine = a_simulation(a_policy(), blocks=BLOCKS)
    prompt = a_prompt(1, 10 * BLOCK_SIZE)
    first, second = (
        a_request("t0", prompt=(*prompt, number), output=40, request_id=f"r{number}")
        for number in (1, 2)
    )
    engine.accept(first)
    engine.steps(2)
    engine.accept(second)
    engine.step()
    assert engine.used_blocks("t0") == 12
    engine.cancel("r1")
    assert engine.used_blocks("t0") == 11
    engine.drain()
    assert engine.output("r2") == output_alone(second, blocks=BLOCKS, policy=a_policy())
