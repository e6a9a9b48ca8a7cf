from prometheus_client import generate_latest

from tidegate_operator.metrics import ENGINE_STATES, Metrics


def test_age_of_the_watch_is_asked_for_at_each_scrape() -> None:
    metrics, ages = Metrics(), iter([1.0, 2.5])
    metrics.watch_age_from(lambda: next(ages))
    metrics.engines.labels("team/chat", "ready").set(2)
    pages = [generate_latest(metrics.registry).decode() for _ in range(2)]
    assert 'tidegate_engines{pool="team/chat",state="ready"} 2.0' in pages[0]
    assert "tidegate_watch_age_seconds 1.0" in pages[0]
    assert "tidegate_watch_age_seconds 2.5" in pages[1]


def test_a_pool_that_is_gone_leaves_no_series() -> None:
    metrics = Metrics()
    for pool in ("team/chat", "team/batch"):
        for state in ENGINE_STATES:
            metrics.engines.labels(pool, state).set(1)
        metrics.compile_seconds.labels(pool).observe(0.01)
        metrics.propagation_seconds.labels(pool).observe(0.1)
        metrics.published.labels(pool).inc()
    metrics.forget("team/chat")
    metrics.forget("never/there")
    page = generate_latest(metrics.registry).decode()
    assert "team/chat" not in page
    assert page.count('pool="team/batch"') > len(ENGINE_STATES) + 2


def test_an_operator_that_does_not_lead_says_nothing_of_redis() -> None:
    metrics = Metrics()
    assert "tidegate_redis_reachable NaN" in generate_latest(metrics.registry).decode()
    metrics.redis_reachable.set(False)
    assert "tidegate_redis_reachable 0.0" in generate_latest(metrics.registry).decode()
