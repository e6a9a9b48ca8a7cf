import pytest

from tidegate_engine.metrics import EngineMetrics
from tidegate_engine.policy_board import PolicyInForce
from tidegate_engine.server.schema import DEFAULT_COMPLETION_TOKENS
from tidegate_policies.snapshot import UNKNOWN_TENANT
from tidegate_testing.engines import MODEL, RunningEngine, a_keyed_tenant, a_running_engine
from tidegate_testing.policies import a_snapshot

TENANT_HISTOGRAMS = ("queue", "ttft", "itl", "e2e")


def tokens(engine: RunningEngine, tenant: str, kind: str) -> float | None:
    return engine.sample("tidegate_tokens_total", tenant=tenant, kind=kind)


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
    used, free = samples["tidegate_kv_blocks", "used"], samples["tidegate_kv_blocks", "free"]
    assert used >= 2
    assert used + free == 64


def test_series_exist_without_traffic_and_follow_the_policy() -> None:
    with a_running_engine(a_snapshot(a_keyed_tenant("acme"))) as engine:
        assert tokens(engine, "acme", "output") == 0
        assert tokens(engine, UNKNOWN_TENANT, "output") == 0
        assert tokens(engine, "zeta", "output") is None
        engine.openai().completions.create(model=MODEL, prompt="Hello", max_tokens=1)
        engine.apply(a_snapshot(a_keyed_tenant("zeta")))
        tenants = {dict(labels).get("tenant") for _, labels in engine.samples()}
        assert tenants == {None, "zeta", UNKNOWN_TENANT}
        assert engine.sample("tidegate_policy_revision") == 2
        assert engine.sample("tidegate_policy_apply_seconds_count") == 2


def test_tenants_have_few_buckets() -> None:
    policy = a_snapshot(a_keyed_tenant("acme"))
    with a_running_engine(policy) as engine:
        for name in TENANT_HISTOGRAMS:
            buckets = [
                labels
                for sample, labels in engine.samples()
                if sample == f"tidegate_{name}_seconds_bucket" and ("tenant", "acme") in labels
            ]
            assert 1 < len(buckets) <= 8


def test_a_tenant_that_is_gone_is_not_observed() -> None:
    metrics = EngineMetrics("serving/main")
    policy = a_snapshot(a_keyed_tenant("acme"))
    in_force = PolicyInForce(snapshot=policy, revision=1, digest="", step=1)
    metrics.use_policy(in_force)
    assert metrics.latencies("acme") is not None
    other = a_snapshot(a_keyed_tenant("zeta"))
    metrics.use_policy(PolicyInForce(snapshot=other, revision=2, digest="", step=1))
    assert metrics.latencies("acme") is None
    metrics.use_policy(in_force)
    assert metrics.latencies("acme") is not None
