from tidegate_engine.queue_times import SUB_WINDOW_SECONDS, SUB_WINDOWS, QueueTimes
from tidegate_policies.attainment import bucket_of


def test_times_are_counted_in_buckets_and_forgotten_after_a_minute() -> None:
    now = [1000.0]
    times = QueueTimes(lambda: now[0])
    assert times.buckets() == ()
    for seconds in (0.5, 0.5, 2.0):
        times.note(seconds)
    now[0] += SUB_WINDOW_SECONDS
    times.note(2.0)
    assert times.buckets() == ((bucket_of(0.5), 2), (bucket_of(2.0), 2))

    now[0] += SUB_WINDOW_SECONDS * (SUB_WINDOWS - 1)
    assert times.buckets() == ((bucket_of(2.0), 1),)
    now[0] += SUB_WINDOW_SECONDS
    assert times.buckets() == ()
