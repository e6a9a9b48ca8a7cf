"""The charts of a pool."""

import re
from importlib import resources

import pytest

from tidegate_cli.console.charts import (
    COLOURS,
    HIGH_COLOUR,
    LOW_COLOUR,
    MOST_SERIES,
    OTHERS,
    batch_chart,
    charted_tenants,
    kv_chart,
    queue_chart,
    step_chart,
)
from tidegate_cli.console.history import KEPT_SECONDS, History, Sample
from tidegate_cli.console.views import EngineView, PoolView, TierQueue, Verdict
from tidegate_policies.rules import WatermarkRule

PANELS = re.findall(
    r"--panel: #(\w+)",
    resources.files("tidegate_cli.console").joinpath("style.css").read_text(encoding="utf-8"),
)


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG 2.2 defines it."""
    digits = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("colour", [*COLOURS, LOW_COLOUR, HIGH_COLOUR])
def test_lines_stand_out_from_light_and_dark_panels(colour: str) -> None:
    assert len(PANELS) == 2
    for panel in PANELS:
        low, high = sorted((luminance(colour.removeprefix("#")), luminance(panel)))
        assert (high + 0.05) / (low + 0.05) >= 3  # WCAG 2.2, 1.4.11, level AA


def a_pool(
    name: str = "serving/main", *, batch: dict[str, int] | None = None, **waiting: int
) -> PoolView:
    return PoolView(
        name=name,
        programmed=Verdict(is_good=True, word="Programmed"),
        ready="1/1",
        revision=1,
        watermarks=WatermarkRule(low_percent=70, high_percent=85),
        engines=(
            EngineView(pod="engine-0", kv_blocks=100, kv_used_blocks=40, step_seconds=0.02),
            EngineView(pod="engine-1", is_silent=True),
        ),
        batch=tuple((batch or {}).items()),
        queue=(
            TierQueue(tier="gold", waiting=()),
            TierQueue(tier="bronze", waiting=tuple(waiting.items())),
        ),
        output_tokens_per_second=None,
    )


def a_sample(at: float = 10.0, **running: int) -> Sample:
    return Sample(
        at=at, kv_percent={"engine-0": 40.0}, running=running, step_seconds={"engine-0": 0.02}
    )


def test_history_keeps_the_last_minutes_and_forgets_pools_that_are_gone() -> None:
    history = History()
    history.add([a_pool(batch={"acme": 2}), a_pool("serving/gone")], at=0.0)
    history.add([a_pool(batch={"acme": 3})], at=KEPT_SECONDS)
    history.add([a_pool(batch={"acme": 4})], at=KEPT_SECONDS + 1)
    samples = history.of("serving/main")
    assert [sample.running for sample in samples] == [{"acme": 3}, {"acme": 4}]
    assert samples[0].kv_percent == {"engine-0": 40.0}
    assert samples[0].step_seconds == {"engine-0": 0.02}
    assert history.of("serving/gone") == ()


def test_kv_is_drawn_with_the_watermarks_in_force() -> None:
    options = kv_chart(a_pool(), [a_sample(1.0), a_sample(2.0)])
    (line,) = options["series"]
    assert line["data"] == [[1000.0, 40.0], [2000.0, 40.0]]
    assert [mark["yAxis"] for mark in line["markLine"]["data"]] == [70, 85]


def test_the_batch_is_stacked_and_a_tenant_that_was_away_counts_zero() -> None:
    samples = [a_sample(1.0, zeta=5), a_sample(2.0, acme=2)]
    options = batch_chart(samples, charted_tenants(a_pool(), samples))
    values = {one["name"]: [value for _, value in one["data"]] for one in options["series"]}
    assert list(values.items()) == [("acme", [0, 2]), ("zeta", [5, 0])]
    assert {one["stack"] for one in options["series"]} == {"running"}


def test_of_many_tenants_the_busiest_have_a_series_and_the_rest_share_one() -> None:
    running = {f"tenant-{number:02}": number + 1 for number in range(MOST_SERIES + 3)}
    samples = [a_sample(**running)]
    tenants = charted_tenants(a_pool(), samples)
    assert len(tenants) == MOST_SERIES + 1
    assert tenants[-1] == OTHERS
    options = batch_chart(samples, tenants)
    drawn = {one["name"]: one["data"][0][1] for one in options["series"]}
    assert drawn[OTHERS] == 1 + 2 + 3
    assert sum(drawn.values()) == sum(running.values())


def test_the_queue_has_a_bar_for_every_tier_with_the_same_tenants_as_the_batch() -> None:
    pool = a_pool(acme=3, zeta=1)
    tenants = charted_tenants(pool, [a_sample(acme=1)])
    options = queue_chart(pool, tenants)
    assert options["yAxis"]["data"] == ["gold", "bronze"]
    assert {one["name"]: one["data"] for one in options["series"]} == {
        "acme": [0, 3],
        "zeta": [0, 1],
    }


def test_step_time_is_drawn_in_milliseconds() -> None:
    (line,) = step_chart([a_sample(1.0)])["series"]
    assert line["data"] == [[1000.0, 20.0]]
    assert step_chart([])["series"] == []
