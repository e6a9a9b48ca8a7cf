"""The charts of a pool, as ECharts wants them; pure.

Text and lines get their colour from the page's style sheet, so that one chart fits light and dark.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tidegate_cli.console.history import KEPT_SECONDS, Sample
from tidegate_cli.console.views import PoolView

Options = dict[str, Any]

MOST_SERIES = 7
"""Tenants with a colour of their own; the rest is one series."""

OTHERS = "others"

# Told apart by people with any colour vision, on white as on black: after Okabe and Ito.
COLOURS = ("#2f7ed8", "#c67a00", "#16a085", "#c2569b", "#7a6ff0", "#d1495b", "#5b8c2a", "#8a8f98")
LOW_COLOUR, HIGH_COLOUR = "#b7791f", "#d1495b"
_LINE = {"lineStyle": {"color": "rgba(128, 140, 155, 0.35)"}}
_AXIS = {"splitLine": _LINE, "axisLine": _LINE, "axisTick": _LINE}


def kv_chart(pool: PoolView, samples: Sequence[Sample]) -> Options:
    """KV fill of each engine over the last minutes, against the watermarks."""
    lines = _lines(samples, lambda sample: sample.kv_percent)
    marks = pool.watermarks
    for line in lines[:1]:
        line["markLine"] = {
            "symbol": "none",
            "silent": True,
            "animation": False,
            "label": {"position": "insideStartTop", "formatter": "{b}"},
            "data": [
                _mark(f"low {marks.low_percent} %", marks.low_percent, LOW_COLOUR),
                _mark(f"high {marks.high_percent} %", marks.high_percent, HIGH_COLOUR),
            ],
        }
    return _over_time(samples, lines, unit="%", most=100)


def charted_tenants(pool: PoolView, samples: Sequence[Sample]) -> list[str]:
    """Return the tenants that get a series, by name: those with most work of late."""
    work = Counter[str]()
    for sample in samples:
        work.update(sample.running)
    for queue in pool.queue:
        work.update(dict(queue.waiting))
    named = sorted(tenant for tenant, _ in work.most_common(MOST_SERIES))
    return [*named, OTHERS] if len(work) > len(named) else named


def batch_chart(samples: Sequence[Sample], tenants: Sequence[str]) -> Options:
    """Requests running, by tenant, over the last minutes.

    Args:
        samples: Of the pool.
        tenants: As `charted_tenants` has them.
    """
    lines = _lines(samples, lambda sample: _grouped(sample.running, tenants), names=tenants)
    for line in lines:
        line |= {"stack": "running", "areaStyle": {"opacity": 0.55}, "step": "end"}
    return _over_time(samples, lines, unit="", whole=True)


def step_chart(samples: Sequence[Sample]) -> Options:
    """Mean time of a step of each engine over the last minutes, in milliseconds."""
    lines = _lines(
        samples,
        lambda sample: {pod: round(1000 * s, 2) for pod, s in sample.step_seconds.items()},
    )
    return _over_time(samples, lines, unit=" ms")


def queue_chart(pool: PoolView, tenants: Sequence[str]) -> Options:
    """Requests waiting now, by tier, stacked by tenant.

    Args:
        pool: Its queue.
        tenants: As `charted_tenants` has them.
    """
    waiting = [_grouped(dict(queue.waiting), tenants) for queue in pool.queue]
    series = [
        {
            "name": tenant,
            "type": "bar",
            "stack": "waiting",
            "barMaxWidth": 28,
            "data": [by_tenant.get(tenant, 0) for by_tenant in waiting],
        }
        for tenant in tenants
    ]
    return {
        **_base(),
        "tooltip": {"trigger": "axis", "axisPointer": {"type": "shadow"}, "confine": True},
        "xAxis": {"type": "value", "minInterval": 1, "min": 0, **_AXIS},
        "yAxis": {
            "type": "category",
            "data": [queue.tier for queue in pool.queue],
            "inverse": True,
            **_AXIS,
            "splitLine": {"show": False},
        },
        "series": series,
    }


def _base() -> Options:
    return {
        "aria": {"enabled": True},
        "animation": False,
        "color": list(COLOURS),
        "grid": {"left": 8, "right": 16, "top": 14, "bottom": 34, "containLabel": True},
        "legend": {
            "type": "scroll",
            "bottom": 0,
            "icon": "roundRect",
            "itemHeight": 8,
            "pageIconColor": "#5f8fd0",
            "pageIconInactiveColor": "rgba(128, 140, 155, 0.5)",
        },
    }


def _over_time(
    samples: Sequence[Sample],
    lines: list[Options],
    *,
    unit: str,
    most: float | None = None,
    whole: bool = False,
) -> Options:
    newest = samples[-1].at if samples else 0.0
    label = {"formatter": "{value}" + unit}
    vertical: Options = {"type": "value", "min": 0, "axisLabel": label, **_AXIS}
    if whole:
        vertical["minInterval"] = 1
    return {
        **_base(),
        "tooltip": {"trigger": "axis", "confine": True},
        "xAxis": {
            "type": "time",
            "min": 1000 * (newest - KEPT_SECONDS),
            "max": 1000 * newest,
            "splitNumber": 3,
            "axisLabel": {
                "formatter": "{HH}:{mm}:{ss}",
                "hideOverlap": True,
                "showMinLabel": False,
                "showMaxLabel": False,
            },
            **_AXIS,
            "splitLine": {"show": False},
        },
        "yAxis": vertical if most is None else {**vertical, "max": most},
        "series": lines,
    }


def _lines(
    samples: Sequence[Sample],
    values: Callable[[Sample], Mapping[str, float]],
    *,
    names: Sequence[str] | None = None,
) -> list[Options]:
    """Return a line for each name; without `names`, for each that any sample has."""
    told = [(1000 * sample.at, values(sample)) for sample in samples]
    known = names if names is not None else sorted({name for _, found in told for name in found})
    missing = None if names is None else 0
    return [
        {
            "name": name,
            "type": "line",
            "showSymbol": False,
            "data": [[at, found.get(name, missing)] for at, found in told],
        }
        for name in known
    ]


def _mark(name: str, level: float, colour: str) -> Options:
    line = {"type": "dashed", "color": colour, "width": 1.5}
    return {"name": name, "yAxis": level, "lineStyle": line}


def _grouped(running: Mapping[str, int], named: Sequence[str]) -> dict[str, float]:
    grouped: dict[str, float] = {}
    for tenant, count in running.items():
        name = tenant if tenant in named else OTHERS
        grouped[name] = grouped.get(name, 0) + count
    return grouped
