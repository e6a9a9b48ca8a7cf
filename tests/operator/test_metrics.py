from urllib.request import urlopen

from tidegate_devcluster.processes import free_port
from tidegate_operator.metrics import Metrics


def test_metrics_are_served_and_the_age_is_asked_for_at_each_scrape() -> None:
    metrics, ages = Metrics(), iter([1.0, 2.5])
    metrics.watch_age_from(lambda: next(ages))
    metrics.engines.labels("team/chat", "ready").set(2)
    port = free_port("127.0.0.1")
    stop = metrics.serve("127.0.0.1", port)
    try:
        pages = [urlopen(f"http://127.0.0.1:{port}/metrics").read().decode() for _ in range(2)]
    finally:
        stop()
    assert 'tidegate_engines{pool="team/chat",state="ready"} 2.0' in pages[0]
    assert "tidegate_watch_age_seconds 1.0" in pages[0]
    assert "tidegate_watch_age_seconds 2.5" in pages[1]
