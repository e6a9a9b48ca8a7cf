import math
import os

import pytest

from tidegate_cli.bench.engine_usage import (
    CpuTimes,
    CpuUse,
    StepUse,
    histogram_quantile,
    peak_resident_mb,
)
from tidegate_cli.engine_metrics import EngineMetrics


def times(threads: dict[int, float], *, bench: float, machine: float) -> CpuTimes:
    return CpuTimes(
        pid=10, process=sum(threads.values()), threads=threads, bench=bench, machine=machine
    )


def test_threads_that_do_not_compute_work_for_http() -> None:
    first = times({10: 5.0, 11: 1.0}, bench=1.0, machine=100.0)
    # 11 and 12 compute; 10 is the event loop, 13 tokenises.
    last = times({10: 5.5, 11: 9.0, 12: 6.0, 13: 0.25}, bench=1.5, machine=116.25)

    use = CpuUse.between(first, last, seconds=10.0, num_compute_threads=2)

    assert use.engine == pytest.approx(14.75)
    assert use.http == pytest.approx(0.75)
    assert use.http_fraction == pytest.approx(0.75 / 14.75)
    assert use.bench == pytest.approx(0.5)
    assert use.foreign == pytest.approx(1.0)
    assert use.foreign_cpus == pytest.approx(0.1)


def test_a_process_is_read_while_it_runs() -> None:
    times = CpuTimes.read(os.getpid())

    assert times.threads[os.getpid()] > 0
    assert sum(times.threads.values()) <= times.process + 0.1
    assert times.process == pytest.approx(times.bench, abs=0.5)
    assert times.machine > times.bench
    assert peak_resident_mb(os.getpid()) > 10


@pytest.mark.parametrize(
    ("quantile", "value"),
    [
        (0.05, 0.5),
        (0.5, 3.0),
        # Above all finite limits nothing more is known.
        (0.99, 5.0),
    ],
)
def test_a_quantile_lies_in_its_bucket(quantile: float, value: float) -> None:
    buckets = [(1.0, 10.0), (5.0, 90.0), (math.inf, 100.0)]

    assert histogram_quantile(buckets, quantile) == pytest.approx(value)


def test_a_histogram_without_values_has_no_quantile() -> None:
    assert histogram_quantile([(1.0, 0.0), (math.inf, 0.0)], 0.99) == 0.0


def test_steps_are_told_apart_from_those_before() -> None:
    before, after = (
        EngineMetrics(
            f'tidegate_step_batch_size_count{{pool="p"}} {count}\n'
            f'tidegate_step_batch_size_sum{{pool="p"}} {rows}\n'
            f'tidegate_step_seconds_sum{{pool="p"}} {seconds}\n'
            f'tidegate_scheduler_seconds_sum{{pool="p"}} {planning}\n'
            f'tidegate_queue_seconds_bucket{{tenant="a",le="0.01"}} {count}\n'
            f'tidegate_queue_seconds_bucket{{tenant="a",le="+Inf"}} {count}\n'
            f'tidegate_tokens_total{{tenant="a",kind="cached"}} {cached}\n'
        )
        for count, rows, seconds, planning, cached in ((3, 30, 5.0, 1.0, 7), (13, 70, 9.0, 1.5, 8))
    )

    steps = StepUse.between(before, after)

    assert steps.steps == 10
    assert steps.batch_size_mean == pytest.approx(4.0)
    assert steps.scheduler_fraction == pytest.approx(0.5 / 4.0)
    assert 0 < steps.queue_p99 <= 0.01
    assert steps.cached_tokens == 1
