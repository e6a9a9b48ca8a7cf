"""The last minutes of each pool, for its charts; pure."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate_cli.console.views import PoolView

KEPT_SECONDS = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One pool at one moment.

    Attributes:
        at: Seconds of the epoch.
        kv_percent: By engine.
        running: By tenant.
        step_seconds: By engine, where known.
    """

    at: float
    kv_percent: Mapping[str, float]
    running: Mapping[str, int]
    step_seconds: Mapping[str, float]


class History:
    """The samples of the last `KEPT_SECONDS`, by pool."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[Sample]] = {}

    def add(self, pools: Sequence[PoolView], *, at: float) -> None:
        """Sample every pool; one that is gone is forgotten."""
        kept = {pool.name: self._samples.get(pool.name, deque()) for pool in pools}
        for pool in pools:
            samples = kept[pool.name]
            samples.append(_sample(pool, at))
            while samples[0].at < at - KEPT_SECONDS:
                samples.popleft()
        self._samples = kept

    def of(self, pool: str) -> Sequence[Sample]:
        """Return a pool's samples, the oldest first."""
        return tuple(self._samples.get(pool, ()))


def _sample(pool: PoolView, at: float) -> Sample:
    engines = [engine for engine in pool.engines if not engine.is_silent]
    return Sample(
        at=at,
        kv_percent={engine.pod: round(engine.kv_percent, 1) for engine in engines},
        running=dict(pool.batch),
        step_seconds={e.pod: e.step_seconds for e in engines if e.step_seconds is not None},
    )
