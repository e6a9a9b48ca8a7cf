import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.events import CancelCause, CancelKey, EngineStats
from tidegate_engine.metrics import EngineMetrics, Scrape
from tidegate_engine.policy_board import PolicyInForce
from tidegate_engine.server.schema import DEFAULT_COMPLETION_TOKENS
from tidegate_policies.snapshot import UNKNOWN_TENANT, PreemptionMode, PreemptionRule
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import MODEL, RunningEngine, a_keyed_tenant, a_running_engine
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
    text = EngineMetrics(POOL).scrape(stats, rates_are_alone=False).render().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


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
        eventually(lambda: engine.sample("tidegate_swap_blocks_total", direction="out"), "a swap")
        held = engine.sample("tidegate_kv_blocks", state="host_used")
        assert engine.sample("tidegate_swap_blocks_total", direction="out") == held
        assert engine.sample("tidegate_swap_blocks_total", direction="in") == 0
        assert engine.sample("tidegate_kv_blocks", state="host_free") == 64 - (held or 0)
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
    metrics = EngineMetrics(POOL)
    tenants = [f"tenant-{number}" for number in range(50)]
    policy = a_snapshot(*(a_keyed_tenant(name) for name in tenants))
    metrics.use_policy(PolicyInForce(snapshot=policy, revision=1, digest="", step=1, at=0.0))
    observed = metrics.latencies("tenant-7")
    assert observed is not None
    observed.queue.observe(1)
    lines = metrics.scrape(stats_of(), rates_are_alone=False).render().decode().splitlines()
    counts = Counter(re.findall(r'tenant="([^"]*)"', "\n".join(lines)))
    assert set(counts) == {*tenants, UNKNOWN_TENANT}
    assert counts["tenant-7"] > 2 * counts["tenant-8"]
    assert counts["tenant-8"] <= 16


def test_a_scrape_shows_the_moment_in_which_it_was_taken() -> None:
    metrics = EngineMetrics(POOL)
    before = metrics.scrape(stats_of(), rates_are_alone=False)
    metrics.count_refusal(UNKNOWN_TENANT, "shed")
    after = metrics.scrape(stats_of(), rates_are_alone=False)
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


def test_a_tenant_that_is_gone_is_not_observed() -> None:
    metrics = EngineMetrics(POOL)
    policy = a_snapshot(a_keyed_tenant("acme"))
    in_force = PolicyInForce(snapshot=policy, revision=1, digest="", step=1, at=0.0)
    metrics.use_policy(in_force)
    assert metrics.latencies("acme") is not None
    other = a_snapshot(a_keyed_tenant("zeta"))
    metrics.use_policy(PolicyInForce(snapshot=other, revision=2, digest="", step=1, at=0.0))
    assert metrics.latencies("acme") is None
    metrics.use_policy(in_force)
    assert metrics.latencies("acme") is not None
