from pathlib import Path

import pytest

from tidegate_devcluster.redis_server import RedisServer
from tidegate_engine.policy_board import PolicyInForce
from tidegate_engine.server import leave as leave_module
from tidegate_engine.server.leave import Leave
from tidegate_engine.settings import Settings
from tidegate_policies.rules import DrainRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.cluster import eventually
from tidegate_testing.control import Publisher, until
from tidegate_testing.engine_process import POD, an_engine_process
from tidegate_testing.engines import a_keyed_tenant
from tidegate_testing.policies import a_snapshot
from tidegate_testing.raw_requests import a_raw_request, read_events


def draining(*engines: str, seconds: float | None = None) -> PolicySnapshot:
    return a_snapshot(a_keyed_tenant("acme"), drain=DrainRule(engines=engines, seconds=seconds))


def test_an_engine_that_the_policy_names_drains_and_goes_on_once_it_doesnt(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    publisher = Publisher(redis_server.url)
    publisher.publish(draining("another"), 1)
    with an_engine_process(publisher, tmp_path) as engine:
        engine.wait_until_ready()
        with a_raw_request(engine.port, stream=True, max_tokens=200) as reader:
            assert reader.recv(1)
            publisher.publish(draining("another", POD), 2)
            engine.wait_for("/readyz", 503)
            # A router may not know yet.
            with a_raw_request(engine.port, stream=True, max_tokens=1) as late:
                assert b"[DONE]" in read_events(late)
            publisher.publish(draining("another"), 3)
            engine.wait_until_ready()
            assert b"[DONE]" in read_events(reader)


def test_the_time_of_a_policy_counts_from_when_it_told_the_engine(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    publisher = Publisher(redis_server.url)
    publisher.publish(draining(POD, seconds=0.0), 1)
    with an_engine_process(publisher, tmp_path, TIDEGATE_DRAIN_SECONDS="1000") as engine:
        engine.wait_for("/readyz", 503)
        publisher.publish(draining(seconds=0.5), 2)
        engine.wait_until_ready()
        with a_raw_request(engine.port, stream=True, max_tokens=100_000) as reader:
            assert reader.recv(1)
            publisher.publish(draining(POD, seconds=0.5), 3)
            eventually(lambda: engine.status("/readyz") == 503, "an engine that drains")
            engine.terminate()
            assert b'"code":"engine_draining"' in read_events(reader)


class _Generations:
    is_leaving = False
    is_told = False

    def follow_drain(self, *, is_told: bool) -> None:
        self.is_told = is_told


def in_force(snapshot: PolicySnapshot) -> PolicyInForce:
    return PolicyInForce(snapshot=snapshot, revision=1, digest=snapshot.digest, step=1, at=0.0)


@pytest.fixture
def settings() -> Settings:
    return Settings(
        pool="serving/main",
        pod_name=POD,
        redis_url="redis://localhost",
        verify_key="A" * 43 + "=",
        drain_seconds=20.0,
    )


async def test_new_work_is_refused_once_routers_must_have_noticed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leave_module, "NOTICE_SECONDS", 0.05)
    generations = _Generations()
    leave = Leave(generations, settings, clock=lambda: 0.0)
    leave.use_policy(in_force(draining(POD)))
    assert (generations.is_leaving, generations.is_told) == (True, False)
    await until(lambda: generations.is_told, "a refusal")

    leave.use_policy(in_force(draining()))
    assert (generations.is_leaving, generations.is_told) == (False, False)


async def test_the_grace_is_what_is_left_of_the_policys_time_or_the_engines_own(
    settings: Settings,
) -> None:
    now = [100.0]
    leave = Leave(_Generations(), settings, clock=lambda: now[0])
    assert leave.grace_seconds() == 20

    leave.use_policy(in_force(draining(seconds=90.0)))
    assert leave.grace_seconds() == 90
    leave.use_policy(in_force(draining(POD, seconds=90.0)))
    now[0] = 130.0
    leave.use_policy(in_force(draining("b", POD, seconds=90.0)))
    assert leave.grace_seconds() == 60
    now[0] = 200.0
    assert leave.grace_seconds() == 0
    leave.use_policy(in_force(draining(POD)))
    assert leave.grace_seconds() == 20
