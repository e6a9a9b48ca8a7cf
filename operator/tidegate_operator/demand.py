"""How many engines a pool's load asks for, from what its engines report; pure.

Every signal is brought to a number of engines, and the largest counts. Without traffic all of them
are 0: how few engines there may be is the autoscaler's to say.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tidegate_operator.progress import Engines
from tidegate_operator.resources import Autoscaling, EnginePool, duration_seconds
from tidegate_operator.usage import queue_time_p99
from tidegate_policies.wire import EngineReport

MAX_GROWTH = 2.0
"""A target that is missed, however far, asks for at most so many times the engines."""

_LEAST_MISS_RATIO = 0.001
"""Stands for the share of misses that is allowed where that is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The signals by which a pool is scaled, over all of its engines, by the names of its series.

    Attributes:
        desired_replicas: Engines that all the others ask for.
        kv_utilization_ratio: KV blocks in use, of all, in [0, 1].
        queue_time_p99_seconds: Of the last minute.
        slo_miss_ratio: Requests that missed their service levels, of those that have one, in
            [0, 1].
        waiting_tokens: Prompt tokens of requests that were never admitted.
    """

    desired_replicas: int = 0
    kv_utilization_ratio: float = 0.0
    queue_time_p99_seconds: float = 0.0
    slo_miss_ratio: float = 0.0
    waiting_tokens: int = 0


def demand(pool: EnginePool, engines: Engines) -> Demand:
    """Return what the load of a pool asks for.

    Args:
        pool: Its `spec.autoscaling` has the targets; without, KV is aimed at the low watermark.
        engines: Only those that are ready count; of these, the silent ones are taken for needed.
    """
    reports = engines.ready_reports
    blocks = sum(report.kv_blocks for report in reports)
    used = sum(report.kv_used_blocks for report in reports)
    attainments = [
        counters.attainment
        for report in reports
        for counters in report.tenants
        if counters.attainment is not None
    ]
    requests = sum(attainment.requests for attainment in attainments)
    missed = requests - sum(attainment.met for attainment in attainments)
    found = Demand(
        kv_utilization_ratio=used / blocks if blocks else 0.0,
        queue_time_p99_seconds=queue_time_p99(reports),
        slo_miss_ratio=missed / requests if requests else 0.0,
        waiting_tokens=sum(report.waiting_tokens for report in reports),
    )
    wanted = max(_for_kv(pool, reports), *_for_targets(pool.spec.autoscaling, found, len(reports)))
    # Not a whole engine more for what rounding leaves.
    num_silent = len(engines.ready) - len(reports)
    return replace(found, desired_replicas=math.ceil(wanted - 1e-6) + num_silent)


def _for_kv(pool: EnginePool, reports: Sequence[EngineReport]) -> float:
    """Return the engines that hold the KV in use and that of the queue, filled as aimed at."""
    scaling = pool.spec.autoscaling
    percent = scaling.kv_utilization_percent if scaling is not None else None
    fill = (percent or pool.spec.kv.watermarks.low_percent) / 100
    blocks = sum(report.kv_blocks for report in reports)
    needed = sum(report.kv_used_blocks + _waiting_blocks(report) for report in reports)
    return len(reports) * needed / (blocks * fill) if blocks else 0.0


def _waiting_blocks(report: EngineReport) -> int:
    return math.ceil(report.waiting_tokens / report.block_size) if report.block_size else 0


def _for_targets(
    scaling: Autoscaling | None, found: Demand, num_engines: int
) -> tuple[float, float]:
    """Return the engines that latency and service levels ask for: none while they are good."""
    wait = ratio = 0.0
    if scaling is not None and scaling.queue_time_p99 is not None:
        wait = found.queue_time_p99_seconds / max(duration_seconds(scaling.queue_time_p99), 1e-3)
    if scaling is not None and scaling.slo_attainment_percent is not None:
        allowed = max(1 - scaling.slo_attainment_percent / 100, _LEAST_MISS_RATIO)
        ratio = found.slo_miss_ratio / allowed
    return _grown(wait, num_engines), _grown(ratio, num_engines)


def _grown(ratio: float, num_engines: int) -> float:
    return num_engines * min(ratio, MAX_GROWTH) if ratio > 1 else 0.0
