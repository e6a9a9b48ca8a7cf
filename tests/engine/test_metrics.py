import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.events import CancelCause, CancelKey, EngineStats
from tidegate_engine.executor.base import Capacity
from tidegate_engine.metrics import EngineMetrics, Scrape
from tidegate_engine.policy_board import PolicyInForce
from tidegate_engine.server.schema import DEFAULT_COMPLETION_TOKENS
from tidegate_policies.rules import (
    UNKNOWN_TENANT,
    PreemptionMode,
    PreemptionRule,
    ServiceRule,
    WatermarkRule,
)
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import (
    BLOCK_BYTES,
    MODEL,
    RunningEngine,
    a_keyed_tenant,
    a_running_engine,
)
from tidegate_testing.policies import POOL, a_snapshot

TENANT_HISTOGRAMS = ("queue", "ttft", "itl", "e2e")


def tokens(engine: RunningEngine, tenant: str, kind: str) -> float | None:
    return engine.sample("tidegate_tokens_total", tenant=tenant, kind=kind)


def stats_of(
    *,
    step_costs: ExecutorCosts | None = None,
    cancelled: dict[CancelKey, int] | None = None,
) -> EngineStats:
    """Count an engine that is idle."""
    scheduler = Scheduler(num_blocks=64, block_size=16, limits=EngineLimits())
    return EngineStats(
        scheduler=scheduler.stats(),
        cancelled=cancelled or {},
        tokens_after_cancel=0,
        step_costs=step_costs or ExecutorCosts(),
    )


def rendered(
    *,
    step_costs: ExecutorCosts | None = None,
    cancelled: dict[CancelKey, int] | None = None,
) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Scrape an engine that has nothing but this to show."""
    stats = stats_of(step_costs=step_costs, cancelled=cancelled)
    text = scraped(some_metrics(), stats).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def some_metrics() -> EngineMetrics:
    """Begin to measure an engine of 64 blocks."""
    capacity = Capacity(num_blocks=64, num_host_blocks=0, block_size=16)
    return EngineMetrics(POOL, model=MODEL, capacity=capacity)


def scraped(metrics: EngineMetrics, stats: EngineStats | None = None, *, at: float = 0.0) -> bytes:
    """Scrape an engine that is idle, unless `stats` say otherwise."""
    return metrics.scrape(
        stats or stats_of(), miss_ratios={}, rates_are_alone=False, at=at
    ).render()


def values(text: bytes) -> dict[tuple[str, str], float]:
    """Return the samples that have a tenant, summed over their other labels."""
    found: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found[sample.name, sample.labels.get("tenant", "")] += sample.value  # type: ignore[assignment]
    return dict(found)


def a_policy_in_force(policy: PolicySnapshot, *, revision: int = 1) -> PolicyInForce:
    return PolicyInForce(snapshot=policy, revision=revision, digest="", step=1, at=0.0)


def test_tokens_are_counted_exactly() -> None:
    with a_running_engine() as engine:
        completions = engine.openai().completions
        completions.create(model=MODEL, prompt="Hello", max_tokens=7)
        completions.create(model=MODEL, prompt="Hello", n=2)
        assert tokens(engine, "acme", "prompt") == 3 * len("Hello")
        assert tokens(engine, "acme", "output") == 7 + 2 * DEFAULT_COMPLETION_TOKENS
        assert tokens(engine, "acme", "recomputed") == 0
        expected = 3 * len("Hello") + 2 * (7 + 2 * DEFAULT_COMPLETION_TOKENS)
        weighted = engine.sample("tidegate_virtual_counter", tenant="acme")
        assert weighted == pytest.approx(expected / 100)


def test_latencies_are_observed_once_a_request_and_gap() -> None:
    with a_running_engine() as engine:
        engine.openai().completions.create(model=MODEL, prompt="Hello", max_tokens=7, n=2)
        counts = {
            name: engine.sample(f"tidegate_{name}_seconds_count", tenant="acme")
            for name in TENANT_HISTOGRAMS
        }
    assert counts == {"queue": 2, "ttft": 2, "itl": 12, "e2e": 2}


def test_steps_are_measured() -> None:
    with a_running_engine() as engine:
        engine.openai().completions.create(model=MODEL, prompt="Hello", max_tokens=7)
        samples = engine.samples()
        assert samples["tidegate_step_seconds_count", frozenset()] == 7
        assert samples["tidegate_step_batch_size_sum", frozenset()] == 7
        assert samples["tidegate_scheduler_seconds_count", frozenset()] == 7
        assert engine.sample("tidegate_step_tokens_sum", kind="prefill") == len("Hello")
        assert engine.sample("tidegate_step_tokens_sum", kind="decode") == 6
        assert engine.sample("tidegate_tokens_after_cancel_total") == 0
        assert samples["tidegate_scheduler_overhead_ratio", frozenset()] == pytest.approx(
            samples["tidegate_scheduler_seconds_sum", frozenset()]
            / samples["tidegate_step_seconds_sum", frozenset()]
        )


def test_requests_and_blocks_are_shown_while_they_are_held() -> None:
    with a_running_engine(blocks=64, max_num_seqs=1, step_seconds=0.002) as engine:
        stream = engine.openai().completions.create(
            model=MODEL, prompt="x" * 30, max_tokens=1000, stream=True, n=2
        )
        next(iter(stream))
        samples = {
            (name, dict(labels).get("state")): value
            for (name, labels), value in engine.samples().items()
            if dict(labels).get("tenant") in {None, "acme"}
        }
        stream.close()
    assert samples["tidegate_requests", "running"] == 1
    assert samples["tidegate_requests", "waiting"] == 1
    assert samples["tidegate_requests", "swapped"] == 0
    blocks = {state: samples["tidegate_kv_blocks", state] for state in ("used", "cached", "free")}
    assert blocks["used"] >= 2
    assert sum(blocks.values()) == 64


def test_a_displacement_is_counted_by_its_mode_and_cause_and_its_blocks_by_direction() -> None:
    swaps = PreemptionRule(mode=PreemptionMode.SWAP, min_quantum_tokens=0)
    policy = a_snapshot(
        a_keyed_tenant("batch", tier="low", preemption=swaps),
        a_keyed_tenant("gold", tier="high"),
        tiers={"high": 10, "low": 0},
    )
    with a_running_engine(policy, host_blocks=64, max_num_seqs=1, step_seconds=0.001) as engine:
        options = {"model": MODEL, "prompt": "x" * 40, "max_tokens": 10_000, "stream": True}
        batch = engine.openai("batch").completions.create(**options)  # type: ignore[call-overload]
        next(iter(batch))
        gold = engine.openai("gold").completions.create(**options)  # type: ignore[call-overload]
        next(iter(gold))
        eventually(lambda: engine.sample("tidegate_swap_bytes_total", direction="out"), "a swap")
        held = engine.sample("tidegate_kv_blocks", state="host_used") or 0
        moved = held * BLOCK_BYTES
        assert engine.sample("tidegate_swap_bytes_total", direction="out") == moved
        assert engine.sample("tidegate_swap_bytes_total", direction="in") == 0
        assert engine.sample("tidegate_kv_blocks", state="host_free") == 64 - held
        assert engine.sample("tidegate_requests", tenant="batch", state="swapped") == 1
        preemptions = {
            (dict(labels)["tenant"], dict(labels)["mode"], dict(labels)["cause"]): value
            for (name, labels), value in engine.samples().items()
            if name == "tidegate_preemptions_total" and value
        }
        assert preemptions == {("batch", "swap", "displaced"): 1}
        batch.close()
        gold.close()


def test_a_prompt_seen_before_is_counted_as_cached() -> None:
    prompt = "x" * 100
    with a_running_engine() as engine:
        completions = engine.openai().completions
        completions.create(model=MODEL, prompt=prompt, max_tokens=1)
        assert tokens(engine, "acme", "cached") == 0
        completions.create(model=MODEL, prompt=prompt, max_tokens=1)
        cached, computed = tokens(engine, "acme", "cached"), tokens(engine, "acme", "prompt")
        assert cached is not None
        assert cached >= 5 * 16
        assert (computed or 0) + cached == 200
        assert (engine.sample("tidegate_kv_blocks", state="cached") or 0) >= 6


def test_what_a_step_costs_is_shown_by_its_parts() -> None:
    costs = ExecutorCosts(step_seconds=0.5, swap_block_seconds=0.25)
    shown = {
        dict(labels)["part"]: value
        for (name, labels), value in rendered(step_costs=costs).items()
        if name == "tidegate_step_cost_seconds"
    }
    assert shown == {
        "step": 0.5,
        "prefill_token": costs.prefill_token_seconds,
        "decode": costs.decode_seconds,
        "context_token": 0,
        "prefill_pair": 0,
        "swap_block": 0.25,
    }


def test_cancels_are_shown_by_cause_and_state_for_declared_tenants_alone() -> None:
    cancelled = {
        CancelKey(tenant=UNKNOWN_TENANT, cause=cause, state="swapped"): number
        for number, cause in enumerate(CancelCause, start=1)
    }
    gone = CancelKey(tenant="gone", cause=CancelCause.DELETE, state="running")
    shown = [
        (dict(labels)["cause"], dict(labels)["state"], value)
        for (name, labels), value in rendered(cancelled={**cancelled, gone: 7}).items()
        if name == "tidegate_cancelled_total"
    ]
    assert sorted(shown) == sorted(
        (key.cause.value, "swapped", count) for key, count in cancelled.items()
    )


def test_before_the_first_step_nothing_is_divided() -> None:
    assert rendered()["tidegate_scheduler_overhead_ratio", frozenset({("pool", POOL)})] == 0


def test_series_exist_without_traffic_and_follow_the_policy() -> None:
    with a_running_engine(a_snapshot(a_keyed_tenant("acme"))) as engine:
        assert tokens(engine, "acme", "output") == 0
        assert tokens(engine, UNKNOWN_TENANT, "output") == 0
        assert tokens(engine, "zeta", "output") is None
        shown = [name for name, _ in engine.samples()].count("tidegate_preemptions_total")
        assert shown == 2 * 2 * 3  # of two tenants, by mode and cause
        engine.openai().completions.create(model=MODEL, prompt="Hello", max_tokens=1)
        engine.apply(a_snapshot(a_keyed_tenant("zeta")))
        tenants = {dict(labels).get("tenant") for _, labels in engine.samples()}
        assert tenants == {None, "zeta", UNKNOWN_TENANT}
        assert engine.sample("tidegate_policy_revision") == 2
        assert engine.sample("tidegate_policy_apply_seconds_count") == 2


def test_tenants_have_few_buckets() -> None:
    policy = a_snapshot(a_keyed_tenant("acme"))
    with a_running_engine(policy) as engine:
        engine.openai().completions.create(model=MODEL, prompt="Hello", max_tokens=1)
        samples = engine.samples()
        for name in TENANT_HISTOGRAMS:
            buckets = [
                labels
                for sample, labels in samples
                if sample == f"tidegate_{name}_seconds_bucket" and ("tenant", "acme") in labels
            ]
            assert 1 < len(buckets) <= 8


def test_a_tenant_without_traffic_takes_few_lines() -> None:
    metrics = some_metrics()
    tenants = [f"tenant-{number}" for number in range(50)]
    policy = a_snapshot(*(a_keyed_tenant(name) for name in tenants))
    metrics.use_policy(a_policy_in_force(policy))
    metrics.latencies("tenant-7").first_token(1)
    lines = scraped(metrics).decode().splitlines()
    counts = Counter(re.findall(r'tenant="([^"]*)"', "\n".join(lines)))
    assert set(counts) == {*tenants, UNKNOWN_TENANT}
    assert counts["tenant-7"] > 2 * counts["tenant-8"]
    assert counts["tenant-8"] <= 20


def test_a_scrape_shows_the_moment_in_which_it_was_taken() -> None:
    metrics = some_metrics()
    before = metrics.scrape(stats_of(), miss_ratios={}, rates_are_alone=False, at=0.0)
    metrics.count_refusal(UNKNOWN_TENANT, "shed")
    after = metrics.scrape(stats_of(), miss_ratios={}, rates_are_alone=False, at=0.0)
    assert b'reason="shed"' not in before.render()
    assert b'reason="shed"' in after.render()


def test_while_metrics_are_written_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, released = threading.Event(), threading.Event()
    render = Scrape.render

    def render_later(scrape: Scrape) -> bytes:
        begun.set()
        assert released.wait(timeout=10)
        return render(scrape)

    monkeypatch.setattr(Scrape, "render", render_later)
    with a_running_engine() as engine, ThreadPoolExecutor() as scrapers:
        answer = scrapers.submit(engine.http().get, "/metrics")
        try:
            assert begun.wait(timeout=10)
            assert engine.http().get("/healthz", timeout=5).status_code == 200
        finally:
            released.set()
        assert "tidegate_kv_blocks" in answer.result().text


def test_a_tenant_that_is_gone_is_observed_in_the_pool_alone() -> None:
    metrics = some_metrics()
    policy = a_snapshot(a_keyed_tenant("acme", service=ServiceRule(ttft_seconds=1)))
    metrics.use_policy(a_policy_in_force(policy))
    acme = metrics.latencies("acme")
    acme.first_token(1)
    assert b'tenant="acme"' in scraped(metrics)
    metrics.use_policy(a_policy_in_force(a_snapshot(a_keyed_tenant("zeta")), revision=2))
    acme.first_token(1)
    metrics.latencies("acme").first_token(1)
    text = scraped(metrics)
    assert b'tenant="acme"' not in text
    assert b'tidegate_pool_ttft_seconds_count{pool="serving/main"} 3\n' in text


def test_nothing_that_was_counted_is_lost_over_a_policy_change() -> None:
    metrics = some_metrics()
    rule = a_keyed_tenant("acme", service=ServiceRule(ttft_seconds=1))
    metrics.use_policy(a_policy_in_force(a_snapshot(rule)))
    metrics.latencies("acme").first_token(2)
    metrics.count_refusal("acme", "rate_limited")
    changed = replace(rule, weight=7, service=ServiceRule(ttft_seconds=3))
    metrics.use_policy(a_policy_in_force(a_snapshot(changed), revision=2))
    metrics.latencies("acme").first_token(2)
    shown = values(scraped(metrics))
    assert shown["tidegate_ttft_seconds_count", "acme"] == 2
    assert shown["tidegate_shed_total", "acme"] == 1
    assert shown["tidegate_slo_observed_total", "acme"] == 2
    assert shown["tidegate_slo_missed_total", "acme"] == 1
    assert shown["tidegate_slo_target_seconds", "acme"] == 3
    assert shown["tidegate_tenant_weight", "acme"] == 7


def test_what_has_no_target_counts_against_none() -> None:
    metrics = some_metrics()
    rule = a_keyed_tenant("acme", service=ServiceRule(itl_seconds=0.1, itl_percentile=95))
    metrics.use_policy(a_policy_in_force(a_snapshot(rule, a_keyed_tenant("free"))))
    metrics.latencies("acme").first_token(9)
    metrics.latencies("acme").next_token(0.1)
    metrics.latencies("free").next_token(9)
    text = scraped(metrics).decode()
    assert re.findall(r"^tidegate_slo_.*$", text, re.MULTILINE) == [
        f'tidegate_slo_{name}{{pool="{POOL}",tenant="acme",objective="itl"}} {value}'
        for name, value in (
            ("target_seconds", 0.1),
            ("objective_ratio", 0.95),
            ("observed_total", 1),
            ("missed_total", 0),
        )
    ]


def test_a_first_token_that_will_never_come_is_missed() -> None:
    metrics = some_metrics()
    rule = a_keyed_tenant("acme", service=ServiceRule(ttft_seconds=1))
    metrics.use_policy(a_policy_in_force(a_snapshot(rule)))
    metrics.latencies("acme").never_began()
    shown = values(scraped(metrics))
    assert shown["tidegate_slo_missed_total", "acme"] == 1
    assert shown["tidegate_slo_observed_total", "acme"] == 1


def test_miss_ratios_are_shown_by_tenant_and_objective() -> None:
    ratios = {("acme", "ttft"): 0.25, ("acme", "itl"): 0.0}
    scrape = some_metrics().scrape(stats_of(), miss_ratios=ratios, rates_are_alone=False, at=0.0)
    lines = scrape.render().decode().splitlines()
    for objective, value in (("ttft", 0.25), ("itl", 0.0)):
        labels = f'pool="{POOL}",tenant="acme",objective="{objective}"'
        assert f"tidegate_slo_miss_ratio{{{labels}}} {value}" in lines


def test_variances_are_shown_once_there_is_something_to_tell() -> None:
    metrics = some_metrics()
    metrics.use_policy(a_policy_in_force(a_snapshot(a_keyed_tenant("acme"))))
    for number in range(8):
        assert b"variance{" not in scraped(metrics, at=10.0)
        metrics.observe_length("prompt", 10 + 4 * (number % 2), at=10.0)
        metrics.latencies("acme").admitted(float(number % 2), at=10.0)
    text = scraped(metrics, at=10.0).decode()
    for window in ("5m", "1d"):
        labels = f'pool="serving/main",kind="prompt",window="{window}"'
        assert f"tidegate_length_variance{{{labels}}} 4.0" in text
        labels = f'pool="serving/main",tenant="acme",window="{window}"'
        assert f"tidegate_queue_time_variance{{{labels}}} 0.25" in text
    hours_later = scraped(metrics, at=7210.0).decode()
    assert 'window="5m"' not in hours_later


def test_lengths_and_queue_times_come_from_requests() -> None:
    with a_running_engine() as engine:
        completions = engine.openai().completions
        for number in range(10):
            completions.create(model=MODEL, prompt="x" * (4 + number % 2), max_tokens=1)
        assert engine.sample("tidegate_length_variance", kind="prompt", window="5m") == (
            pytest.approx(0.25)
        )
        assert engine.sample("tidegate_length_variance", kind="output", window="1d") == 0
        assert engine.sample("tidegate_queue_time_variance", tenant="acme", window="5m") is not None


def test_the_pools_histograms_are_finer_than_the_tenants_over_the_same_range() -> None:
    metrics = some_metrics()
    for name in ("admitted", "first_token", "next_token", "ended"):
        arguments = {"at": 0.0} if name == "admitted" else {}
        getattr(metrics.latencies(UNKNOWN_TENANT), name)(1.0, **arguments)
    text = scraped(metrics).decode()
    for name in TENANT_HISTOGRAMS:
        fine = re.findall(rf'tidegate_pool_{name}_seconds_bucket{{.*le="([^"]*)"', text)
        coarse = re.findall(rf'tidegate_{name}_seconds_bucket{{.*le="([^"]*)"', text)
        assert len(fine) > 2.5 * len(coarse)
        assert set(coarse) < set(fine)
        assert [float(bound) for bound in fine] == sorted({float(bound) for bound in fine})


def test_the_watermarks_in_force_are_shown() -> None:
    policy = a_snapshot(watermarks=WatermarkRule(low_percent=60, high_percent=75))
    with a_running_engine(policy) as engine:
        assert engine.sample("tidegate_kv_watermark_ratio", level="low") == 0.6
        assert engine.sample("tidegate_kv_watermark_ratio", level="high") == 0.75


def test_what_a_tenant_holds_of_the_kv_is_shown_beside_its_nominal() -> None:
    policy = a_snapshot(a_keyed_tenant("acme", kv_nominal_percent=5))
    with a_running_engine(policy, blocks=100, step_seconds=0.01) as engine:
        stream = engine.openai().completions.create(
            model=MODEL, prompt="x" * 16 * 9, max_tokens=1000, stream=True
        )
        next(iter(stream))
        shown = {
            dict(labels)["state"]: value
            for (name, labels), value in engine.samples().items()
            if name == "tidegate_tenant_kv_blocks" and ("tenant", "acme") in labels
        }
        stream.close()
    assert shown["nominal"] == 5
    assert shown["used"] >= 9
    assert shown["borrowed"] == shown["used"] - 5
