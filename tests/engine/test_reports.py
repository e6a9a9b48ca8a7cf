import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tidegate_devcluster.redis_server import RedisServer
from tidegate_engine import reports
from tidegate_engine.fleet.rates import FleetRates
from tidegate_engine.policy_source import PolicySource, ed25519_verifier
from tidegate_engine.reports import Reporter, TenantBooks
from tidegate_engine.server.service import Service, assemble
from tidegate_engine.state_file import StateFile
from tidegate_engine.tasks import cancel_all
from tidegate_policies.attainment import NEVER
from tidegate_policies.rules import ServiceRule, StopPolicy
from tidegate_policies.wire import (
    Attainment,
    EngineReport,
    LatencyCounts,
    TenantCounters,
    report_key,
    reports_channel,
)
from tidegate_testing.control import Publisher, until
from tidegate_testing.engines import (
    StepGate,
    a_paced_executor,
    a_scheduler_of,
    a_served_model,
    rates_of,
)
from tidegate_testing.policies import POOL, a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request

POD = "engine-0"


@dataclass
class ReportingEngine:
    """An engine without its API."""

    service: Service
    redis: Redis
    rates: FleetRates


@asynccontextmanager
async def a_reporting_engine(
    publisher: Publisher,
    folder: Path,
    *,
    incarnation: str = "first",
    gate: StepGate | None = None,
    step_seconds: float = 0.0,
) -> AsyncIterator[ReportingEngine]:
    gate = gate or StepGate()
    executor = a_paced_executor(gate, blocks=64, host_blocks=16, step_seconds=step_seconds)
    leasing = Redis.from_url(publisher.url)
    rates = rates_of(leasing)
    service = assemble(
        pool=publisher.pool,
        scheduler=a_scheduler_of(executor),
        executor=executor,
        model=a_served_model(),
        rates=rates,
        clock=time.monotonic,
        max_waiting=1000,
    )
    service.engine.start()

    async with Redis.from_url(publisher.url) as redis:
        source = PolicySource(
            pool=publisher.pool,
            redis=redis,
            verify=ed25519_verifier(publisher.verify_key),
            board=service.board,
            state=StateFile(folder / "policy.json"),
        )
        reporter = Reporter(
            pod=POD,
            pool=publisher.pool,
            incarnation=incarnation,
            redis=redis,
            board=service.board,
            source=source,
            rates=rates,
            engine=service.engine,
            tenants=TenantBooks(levels=service.levels, metrics=service.metrics),
        )
        tasks = {asyncio.create_task(source.run()), asyncio.create_task(reporter.run())}
        try:
            yield ReportingEngine(service, redis, rates)
        finally:
            gate.open()
            await cancel_all(tasks)
            await asyncio.to_thread(service.engine.stop)
            await leasing.aclose()


@pytest.fixture
def publisher(redis_server: RedisServer) -> Publisher:
    return Publisher(redis_server.url)


@pytest.fixture
def rare_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave only events to cause a report in time."""
    monkeypatch.setattr(reports, "HEARTBEAT_SECONDS", 600.0)


async def reported(publisher: Publisher, *, revision: int) -> EngineReport:
    def ask() -> EngineReport | None:
        report = publisher.report(POD)
        return report if report is not None and report.revision == revision else None

    report = await until(ask, f"a report of revision {revision}")
    assert report is not None
    return report


@pytest.mark.usefixtures("rare_heartbeats")
async def test_an_applied_policy_is_acknowledged_at_once(
    publisher: Publisher, tmp_path: Path
) -> None:
    async with a_reporting_engine(publisher, tmp_path):
        first = await until(lambda: publisher.report(POD), "a first report")
        assert (first.revision, first.incarnation) == (0, "first")
        envelope = publisher.publish(a_snapshot(), 3)
        report = await reported(publisher, revision=3)
        assert (report.digest, report.step, report.refused) == (envelope.digest, 1, None)
        assert report.sequence > first.sequence
        assert not report.degraded


@pytest.mark.usefixtures("rare_heartbeats")
async def test_an_acknowledgement_waits_for_no_step(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "PATIENCE_SECONDS", 600.0)
    gate = StepGate()
    publisher.publish(a_snapshot(), 3)
    async with a_reporting_engine(publisher, tmp_path, gate=gate) as engine:
        await reported(publisher, revision=3)
        engine.service.engine.submit(a_request(output=10_000)).result()
        gate.shut()
        publisher.publish(a_snapshot(a_tenant("acme"), a_tenant("zeta")), 4)
        await until(lambda: engine.service.board.newest_revision == 4, "an offered policy")
        gate.let_one_pass()
        # Whoever counts now waits for the step that is held.
        assert (await reported(publisher, revision=4)).degraded is False
        assert gate.is_holding


@pytest.mark.usefixtures("rare_heartbeats")
async def test_a_refused_policy_is_reported_at_once(publisher: Publisher, tmp_path: Path) -> None:
    async with a_reporting_engine(publisher, tmp_path):
        publisher.publish(a_snapshot(), 3)
        await reported(publisher, revision=3)
        publisher.publish(a_snapshot(a_tenant("zeta")), 2)
        refused = await until(lambda: (publisher.report(POD) or first_of()).refused, "a refusal")
        assert (refused.revision, refused.reason) == (2, "StaleRevision")
        publisher.publish(a_snapshot(a_tenant("zeta")), 4)
        assert (await reported(publisher, revision=4)).refused is None


async def test_an_engine_that_cannot_lease_is_degraded_though_its_policy_comes_through(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.publish(a_snapshot(), 3)
    async with a_reporting_engine(publisher, tmp_path) as engine:
        await reported(publisher, revision=3)
        key = f"tidegate:{POOL}:rate-engines"
        await engine.redis.set(key, "of another kind")
        await engine.rates.renew()
        await until(lambda: (publisher.report(POD) or first_of()).degraded, "a degraded engine")
        assert engine.service.rate_gate.is_alone
        await engine.redis.delete(key)
        await engine.rates.renew()
        await until(lambda: not (publisher.report(POD) or first_of()).degraded, "all as before")


def first_of() -> EngineReport:
    return EngineReport(pool="", pod=POD, incarnation="", sequence=0)


async def test_reports_come_again_and_count_what_tenants_did(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.publish(a_snapshot(a_tenant("acme"), a_tenant("idle")), 1)
    async with a_reporting_engine(publisher, tmp_path) as engine:
        before = await reported(publisher, revision=1)
        assert before.tenants == ()
        assert (before.kv_blocks, before.kv_used_blocks, before.host_blocks) == (64, 0, 16)
        assert (before.steps, before.step_seconds) == (0, 0.0)
        engine.service.engine.submit(a_request("acme", prompt=4, output=3)).result()

        def ask() -> tuple[TenantCounters, ...]:
            report = publisher.report(POD)
            return () if report is None or report.running else report.tenants

        [tenant] = await until(ask, "counters")
        kv_seconds = tenant.kv_seconds
        assert 0 < kv_seconds < 60
        assert tenant == TenantCounters(
            tenant="acme",
            prompt_tokens=4,
            output_tokens=3,
            kv_seconds=kv_seconds,
            service=4 + 2 * 3,
        )
        after = publisher.report(POD)
        assert after is not None
        assert after.steps == 3
        assert 0 < after.step_seconds < 60


async def test_all_that_was_refused_of_a_tenant_is_reported_until_the_tenant_goes(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.publish(a_snapshot(a_tenant("acme", max_prompt_tokens=4)), 1)
    async with a_reporting_engine(publisher, tmp_path) as engine:
        await reported(publisher, revision=1)
        service = engine.service
        service.note_refusal("r", tenant="acme", reason="rate_limited")
        assert service.engine.submit(a_request("acme", prompt=5)).result() is not None

        def shed() -> int | None:
            report = publisher.report(POD)
            return sum(counters.shed for counters in report.tenants) if report else None

        await until(lambda: shed() == 2, "two refusals")
        publisher.publish(a_snapshot(a_tenant("acme", weight=7)), 2)
        await reported(publisher, revision=2)
        assert shed() == 2
        publisher.publish(a_snapshot(a_tenant("other")), 3)
        await reported(publisher, revision=3)
        publisher.publish(a_snapshot(a_tenant("acme")), 4)
        await reported(publisher, revision=4)
        assert shed() == 0


async def test_a_tenants_blocks_above_its_nominal_are_reported_as_borrowed(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.publish(a_snapshot(a_tenant("acme", kv_nominal_percent=3)), 1)
    async with a_reporting_engine(publisher, tmp_path, step_seconds=0.02) as engine:
        await reported(publisher, revision=1)
        engine.service.engine.submit(a_request("acme", prompt=4 * 16, output=900)).result()

        def ask() -> TenantCounters | None:
            report = publisher.report(POD)
            held = () if report is None else report.tenants
            return held[0] if held and held[0].kv_used_blocks else None

        counters = await until(ask, "blocks in use")
        # 3 % of 64 blocks is one whole block.
        assert counters.kv_borrowed_blocks == counters.kv_used_blocks - 1


async def test_requests_dropped_for_their_time_are_reported_as_cancelled(
    publisher: Publisher, tmp_path: Path
) -> None:
    held = a_tenant("acme", stop=StopPolicy.HOLD, service=ServiceRule(queue_timeout_seconds=0.001))
    publisher.publish(a_snapshot(held), 1)
    async with a_reporting_engine(publisher, tmp_path) as engine:
        await reported(publisher, revision=1)
        engine.service.engine.submit(a_request("acme")).result()

        def ask() -> bool:
            report = publisher.report(POD)
            return report is not None and report.tenants == (
                TenantCounters(tenant="acme", cancelled=1),
            )

        await until(ask, "a dropped request")


async def test_who_was_only_refused_is_reported_with_its_attainment(
    publisher: Publisher, tmp_path: Path
) -> None:
    service = ServiceRule(ttft_seconds=1.0, window_seconds=2.0)
    publisher.publish(a_snapshot(a_tenant("acme", service=service), a_tenant("zeta")), 1)
    async with a_reporting_engine(publisher, tmp_path) as engine:
        await reported(publisher, revision=1)
        assert tenants_of(publisher) == ()
        for tenant in ("acme", "zeta"):
            engine.service.note_refusal("1", tenant=tenant, reason="engine_overloaded")
        never = LatencyCounts(target_seconds=1.0, met=0, buckets=((NEVER, 1),))
        attainment = Attainment(requests=1, met=0, ttft=never)
        acme, zeta = (TenantCounters(tenant=tenant, shed=1) for tenant in ("acme", "zeta"))
        expected = (replace(acme, attainment=attainment), zeta)
        await until(lambda: tenants_of(publisher) == expected, "a refusal reported")
        await until(lambda: tenants_of(publisher) == (acme, zeta), "an empty window")


def tenants_of(publisher: Publisher) -> tuple[TenantCounters, ...]:
    report = publisher.report(POD)
    assert report is not None
    return report.tenants


async def test_reports_are_announced_in_order_and_expire(
    publisher: Publisher, tmp_path: Path
) -> None:
    async with a_reporting_engine(publisher, tmp_path) as engine:
        async with engine.redis.pubsub() as channel:
            await channel.subscribe(reports_channel(publisher.pool))
            sequences: list[int] = []
            async for message in channel.listen():
                if message["type"] == "message":
                    sequences.append(EngineReport.from_json(message["data"]).sequence)
                if len(sequences) == 3:
                    break
        assert sequences == list(range(sequences[0], sequences[0] + 3))
        remaining_ms = await engine.redis.pttl(report_key(publisher.pool, POD))
        assert 0 < remaining_ms <= 5000
