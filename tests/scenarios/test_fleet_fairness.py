"""Several engines of one pool: a tenant's share doesn't depend on where it sends its requests."""

from itertools import count

import pytest

from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import Simulation, a_prompt, a_simulation

_numbers = count(1)


class Fleet:
    """Engines that tell each other once a second whom they served."""

    def __init__(self, policy: PolicySnapshot, *, engines: int) -> None:
        self.engines = [
            a_simulation(policy, blocks=2000, max_num_seqs=4, check_every=100)
            for _ in range(engines)
        ]
        self._told: dict[tuple[int, str], float] = {}

    def send(self, engine: int, tenant: str, *, times: int) -> None:
        for _ in range(times):
            self.engines[engine].accept(
                a_request(tenant, prompt=a_prompt(next(_numbers), 40), output=40)
            )

    def run(self, *, seconds: int, exchanges: bool = True) -> None:
        for _ in range(seconds):
            for engine in self.engines:
                engine.run_until(engine.clock.now() + 1.0)
            if exchanges:
                self._exchange()

    def service(self, tenant: str) -> float:
        return sum(service_of(engine, tenant) for engine in self.engines)

    def _exchange(self) -> None:
        given: list[dict[str, float]] = []
        for number, engine in enumerate(self.engines):
            stats = engine.scheduler.stats().tenants
            given.append(
                {n: s.service - self._told.get((number, n), 0.0) for n, s in stats.items()}
            )
            self._told |= {(number, n): s.service for n, s in stats.items()}
        for number, engine in enumerate(self.engines):
            others = [i for i in range(len(self.engines)) if i != number]
            names = {name: None for i in others for name in given[i]}
            engine.scheduler.note_elsewhere(
                {name: sum(given[i].get(name, 0.0) for i in others) for name in names},
                [n for n in names if any(has_work(self.engines[i], n) for i in others)],
            )


def service_of(engine: Simulation, tenant: str) -> float:
    return engine.scheduler.stats().tenants[tenant].service


def has_work(engine: Simulation, tenant: str) -> bool:
    return engine.scheduler.stats().accounts[tenant].competes


@pytest.mark.parametrize(("weight", "share"), [(100, 0.5), (300, 0.75)])
def test_who_sends_all_to_one_engine_and_who_spreads_are_served_by_weight(
    weight: int, share: float
) -> None:
    fleet = Fleet(a_snapshot(a_tenant("spread", weight=weight), a_tenant("single")), engines=2)
    for engine in (0, 1):
        fleet.send(engine, "spread", times=600)
    fleet.send(0, "single", times=600)
    fleet.run(seconds=60)
    spread, single = fleet.service("spread"), fleet.service("single")
    assert has_work(fleet.engines[0], "single")
    assert spread / (spread + single) == pytest.approx(share, abs=0.02)


def test_without_telling_each_other_the_shares_are_wrong() -> None:
    fleet = Fleet(a_snapshot(a_tenant("spread"), a_tenant("single")), engines=2)
    for engine in (0, 1):
        fleet.send(engine, "spread", times=600)
    fleet.send(0, "single", times=600)
    fleet.run(seconds=60, exchanges=False)
    spread, single = fleet.service("spread"), fleet.service("single")
    assert spread / (spread + single) > 0.7


def test_a_newcomer_gets_no_credit_for_what_others_had_elsewhere() -> None:
    fleet = Fleet(a_snapshot(a_tenant("old"), a_tenant("new")), engines=2)
    for engine in (0, 1):
        fleet.send(engine, "old", times=600)
    fleet.run(seconds=30)
    before = fleet.service("old")
    for engine in (0, 1):
        fleet.send(engine, "new", times=600)
    fleet.run(seconds=20)
    assert fleet.service("new") == pytest.approx(fleet.service("old") - before, rel=0.05)
