"""What tenants get is counted by every engine of a pool, and judged over all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tidegate_devcluster.redis_server import RedisServer
from tidegate_operator.service_levels import Standing, standing
from tidegate_operator.usage import UsageMeter
from tidegate_operator.verdicts import Reason
from tidegate_policies.rules import ServiceRule, StopPolicy, TenantRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_policies.wire import Attainment
from tidegate_testing.cluster import eventually
from tidegate_testing.control import Publisher
from tidegate_testing.engine_process import EngineProcess, an_engine_process
from tidegate_testing.engines import MODEL, a_keyed_tenant
from tidegate_testing.policies import a_snapshot

PODS = ("engine-0", "engine-1")

EASY = ServiceRule(ttft_seconds=60.0, itl_seconds=60.0)
# Nothing that passes a socket is as fast.
HOPELESS = ServiceRule(ttft_seconds=1e-6, itl_seconds=1e-6)
BRIEF = ServiceRule(ttft_seconds=60.0, window_seconds=3.0)
IMPATIENT = ServiceRule(ttft_seconds=60.0, queue_timeout_seconds=0.1)


class Fleet:
    """Two engine processes of one pool, and what a control plane sees of them."""

    def __init__(self, publisher: Publisher, engines: list[EngineProcess]) -> None:
        self.publisher = publisher
        self.engines = engines
        self.revision = 0

    def publish(self, policy: PolicySnapshot) -> None:
        self.revision += 1
        self.publisher.publish(policy, self.revision)
        eventually(lambda: self.revisions() == {self.revision}, "the policy in force")

    def revisions(self) -> set[int]:
        reports = [self.publisher.report(pod) for pod in PODS]
        return {report.revision if report else 0 for report in reports}

    def ask(self, engine: int, tenant: str, *, times: int = 1, tokens: int = 5) -> None:
        for _ in range(times):
            self.engines[engine].openai(tenant).completions.create(
                model=MODEL, prompt="Hello", max_tokens=tokens, extra_body={"ignore_eos": True}
            )

    def attainments(self, tenant: str) -> tuple[Attainment, ...]:
        """Return what every engine has reported, as the operator takes it in."""
        reports = [report for pod in PODS if (report := self.publisher.report(pod))]
        meter = UsageMeter()
        meter.sample([], now=0.0)
        activity = meter.sample(reports, now=1.0)
        assert activity is not None
        mine = activity.tenants.get(tenant)
        return mine.attainments if mine else ()

    def judged(self, tenant: str, rule: ServiceRule, *, requests: int) -> Standing:
        """Return how the tenant stands once so many of its requests are reported."""
        eventually(
            lambda: sum(one.requests for one in self.attainments(tenant)) == requests,
            f"{requests} requests of {tenant} in reports",
        )
        return standing(rule, self.attainments(tenant), known={})

    def miss_ratios(self, tenant: str) -> list[dict[str, float]]:
        """Return what every engine shows, by objective."""
        found = []
        for engine in self.engines:
            answer = engine.get("/metrics")
            assert answer is not None
            samples = (
                sample
                for family in text_string_to_metric_families(answer.text)
                for sample in family.samples
            )
            found.append(
                {
                    sample.labels["objective"]: sample.value
                    for sample in samples
                    if sample.name == "tidegate_slo_miss_ratio"
                    and sample.labels["tenant"] == tenant
                }
            )
        return found


@pytest.fixture(scope="module")
def fleet(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    publisher = Publisher(redis_server.url)
    with ExitStack() as stack:
        engines = []
        for pod in PODS:
            folder: Path = tmp_path_factory.mktemp(pod)
            started = an_engine_process(publisher, folder, TIDEGATE_POD_NAME=pod)
            engines.append(stack.enter_context(started))
        fleet = Fleet(publisher, engines)
        fleet.publish(the_policy())
        for engine in engines:
            engine.wait_until_ready()
        yield fleet


def the_policy(*changed: TenantRule) -> PolicySnapshot:
    tenants = {
        "easy": a_keyed_tenant("easy", service=EASY),
        "hopeless": a_keyed_tenant("hopeless", service=HOPELESS),
        "relaxed": a_keyed_tenant("relaxed", service=HOPELESS),
        "brief": a_keyed_tenant("brief", service=BRIEF),
        "held": a_keyed_tenant("held", service=IMPATIENT, stop=StopPolicy.HOLD),
        "later": a_keyed_tenant("later", service=EASY),
        "silent": a_keyed_tenant("silent", service=EASY),
        "plain": a_keyed_tenant("plain"),
    }
    tenants |= {rule.tenant: rule for rule in changed}
    return a_snapshot(*tenants.values())


def reason_of(found: Standing) -> Reason:
    assert found.verdict is not None
    return found.verdict.reason


def test_what_all_engines_serve_in_time_is_met(fleet: Fleet) -> None:
    fleet.ask(0, "easy", times=3)
    fleet.ask(1, "easy", times=2)
    found = fleet.judged("easy", EASY, requests=5)
    assert reason_of(found) is Reason.SERVICE_LEVEL_MET
    assert found.figures is not None
    assert found.figures["attainmentPercent"] == 100
    assert {"ttft", "itl"} <= set(found.figures)
    # Of five tokens four gaps.
    gaps = [sum(n for _, n in one.itl.buckets) for one in fleet.attainments("easy") if one.itl]
    assert sorted(gaps) == [8, 12]
    assert fleet.miss_ratios("easy") == [{"ttft": 0.0, "itl": 0.0}] * 2


def test_one_slow_engine_is_enough_to_miss(fleet: Fleet) -> None:
    fleet.ask(0, "hopeless", times=2)
    found = fleet.judged("hopeless", HOPELESS, requests=2)
    assert reason_of(found) is Reason.MISSED
    assert found.verdict is not None
    assert "ttft: 0 % of 2 first tokens" in found.verdict.message
    assert "itl: 0 % of 8 times between two tokens" in found.verdict.message
    assert fleet.miss_ratios("hopeless") == [
        {"ttft": 1.0, "itl": 1.0},
        {"ttft": 0.0, "itl": 0.0},
    ]


def test_who_waits_in_vain_has_missed(fleet: Fleet) -> None:
    for engine in (0, 1):
        with pytest.raises(openai.APIStatusError, match="queue timeout"):
            fleet.ask(engine, "held")
    found = fleet.judged("held", IMPATIENT, requests=2)
    assert reason_of(found) is Reason.MISSED
    assert found.verdict is not None
    assert "p99 never, 2 never came" in found.verdict.message
    assert fleet.miss_ratios("held") == [{"ttft": 1.0}] * 2


def test_without_traffic_or_targets_nothing_is_reported_and_nothing_missed(fleet: Fleet) -> None:
    fleet.ask(0, "plain")
    fleet.ask(0, "later")
    fleet.judged("later", EASY, requests=1)
    assert fleet.attainments("silent") == fleet.attainments("plain") == ()
    assert fleet.miss_ratios("silent") == [{"ttft": 0.0, "itl": 0.0}] * 2
    assert fleet.miss_ratios("plain") == [{}, {}]


def test_who_hangs_up_before_the_first_token_does_not_count(fleet: Fleet) -> None:
    patient = ServiceRule(ttft_seconds=60.0, queue_timeout_seconds=60.0)
    waits = a_keyed_tenant("waits", service=patient, stop=StopPolicy.HOLD)
    fleet.publish(the_policy(waits))
    with pytest.raises(openai.APITimeoutError):
        fleet.engines[0].openai("waits").with_options(timeout=0.3).completions.create(
            model=MODEL, prompt="Hello", max_tokens=1
        )

    def cancelled() -> int:
        report = fleet.publisher.report(PODS[0])
        tenants = report.tenants if report else ()
        return sum(one.cancelled for one in tenants if one.tenant == "waits")

    eventually(cancelled, "the client's end in a report")
    assert fleet.attainments("waits") == ()


def test_a_new_target_is_judged_anew_at_once(fleet: Fleet) -> None:
    fleet.publish(the_policy())
    fleet.ask(0, "relaxed")
    assert reason_of(fleet.judged("relaxed", HOPELESS, requests=1)) is Reason.MISSED
    # What was counted says nothing about another target.
    assert standing(EASY, fleet.attainments("relaxed"), known={}) == Standing()
    fleet.publish(the_policy(a_keyed_tenant("relaxed", service=EASY)))
    assert fleet.miss_ratios("relaxed") == [{"ttft": 0.0, "itl": 0.0}] * 2
    fleet.ask(1, "relaxed", times=2)
    assert reason_of(fleet.judged("relaxed", EASY, requests=2)) is Reason.SERVICE_LEVEL_MET


def test_what_is_older_than_the_window_is_forgotten(fleet: Fleet) -> None:
    fleet.ask(0, "brief")
    fleet.judged("brief", BRIEF, requests=1)
    eventually(lambda: fleet.attainments("brief") == (), "an empty window")
    assert fleet.miss_ratios("brief") == [{"ttft": 0.0}] * 2


def test_a_stream_counts_while_it_runs(fleet: Fleet) -> None:
    steady = ServiceRule(itl_seconds=60.0)
    fleet.publish(the_policy(a_keyed_tenant("stream", service=steady)))
    stop = threading.Event()

    def read() -> None:
        stream = (
            fleet.engines[0]
            .openai("stream")
            .completions.create(
                model=MODEL,
                prompt="Hello",
                max_tokens=100_000,
                stream=True,
                extra_body={"ignore_eos": True},
            )
        )
        for _ in stream:
            if stop.is_set():
                stream.close()
                return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        (found,) = eventually(lambda: fleet.attainments("stream"), "gaps in a report")
        assert found.itl is not None
        assert found.itl.met > 0
        assert found.requests == 0
    finally:
        stop.set()
        reader.join(timeout=30)
    fleet.judged("stream", steady, requests=1)
