from prometheus_client import generate_latest

from tidegate_operator.metrics import Metrics


def test_age_of_the_watch_is_asked_for_at_each_scrape() -> None:
    metrics, ages = Metrics(), iter([1.0, 2.5])
    metrics.watch_age_from(lambda: next(ages))
    metrics.engines.labels("team/chat", "ready").set(2)
    pages = [generate_latest(metrics.registry).decode() for _ in range(2)]
    assert 'tidegate_engines{pool="team/chat",state="ready"} 2.0' in pages[0]
    assert "tidegate_watch_age_seconds 1.0" in pages[0]
    assert "tidegate_watch_age_seconds 2.5" in pages[1]
