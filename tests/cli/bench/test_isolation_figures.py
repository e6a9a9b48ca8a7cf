from math import inf

import pytest

from tidegate_cli.bench.isolation_figures import (
    End,
    Experience,
    Run,
    Targets,
    in_rounds,
    meets,
    share_errors,
    targets_of,
)
from tidegate_cli.bench.isolation_load import Label, Planned

GOLD = Label(tenant="gold", tier="gold", load=0.5, ttft_seconds=1.0)
TARGETS = {"gold": Targets(ttft_seconds=1.0, itl_seconds=0.1)}


def a_request(
    *times: float, at: float = 10.0, end: End = End.DONE, ended_at: float | None = None
) -> Experience:
    request = Planned(
        request_id="one", at_seconds=at, tenant="gold", prompt_tokens=5, output_tokens=5
    )
    ended = times[-1] if times and ended_at is None and end is End.DONE else ended_at
    return Experience(request=request, token_times=times, end=end, ended_at=ended)


def a_run(*experiences: Experience) -> Run:
    return Run(experiences=experiences, windows=[(10.0, 20.0)], service={"gold": 50.0})


@pytest.mark.parametrize("one", [a_request(10.9, 11.0, 11.1), a_request(10.5, 10.6, end=End.OPEN)])
def test_a_request_meets_its_targets_by_its_first_token_and_its_gaps(one: Experience) -> None:
    assert meets(one, TARGETS["gold"])


@pytest.mark.parametrize(
    "one",
    [
        a_request(11.1, 11.2),
        a_request(10.5, 10.7),
        a_request(10.5, 10.6, end=End.CUT),
        a_request(10.5, 10.6, end=End.LEFT),
        a_request(end=End.REFUSED),
        a_request(end=End.OPEN),
    ],
)
def test_who_is_late_or_slow_or_not_served_misses_them(one: Experience) -> None:
    assert not meets(one, TARGETS["gold"])


def test_one_gap_in_more_than_a_hundred_may_be_long() -> None:
    times = [10.5 + 0.01 * number for number in range(120)]

    assert meets(a_request(*times, times[-1] + 1.0), TARGETS["gold"])
    assert not meets(a_request(*times[:50], times[49] + 1.0), TARGETS["gold"])


def test_who_never_got_a_token_waits_for_ever_and_who_came_too_late_is_not_counted() -> None:
    run = a_run(a_request(10.5), a_request(end=End.REFUSED), a_request(at=19.5, end=End.OPEN))

    assert run.ttft_seconds(GOLD) == [0.5, inf]
    assert run.attainment_percent(["gold"], TARGETS) == 50.0
    assert run.attainment_percent(["nobody"], TARGETS) is None


def test_only_what_comes_between_begin_and_end_is_counted() -> None:
    run = a_run(
        a_request(9.0, 9.1, 9.2, at=8.5),
        a_request(9.95, 10.04, 10.13, at=9.5),
        a_request(19.95, 20.05, at=19.5, end=End.OPEN),
    )

    assert run.output_tokens_per_s == pytest.approx(0.3)
    assert run.goodput(TARGETS) == pytest.approx(0.1)
    assert run.service_per_s == 5.0
    assert run.itl_seconds(GOLD) == pytest.approx([0.09, 0.09])
    assert run.counts(GOLD)[End.DONE] == 2


def test_shares_are_held_against_weights() -> None:
    heavy = Label(tenant="heavy", tier="silver", load=1.0, ttft_seconds=1.0, weight=300)
    light = Label(tenant="light", tier="silver", load=1.0, ttft_seconds=1.0, weight=100)

    errors = share_errors([heavy, light], {"heavy": 70.0, "light": 30.0, "gold": 900.0})

    assert errors == pytest.approx({"heavy": -5.0, "light": 5.0})


def test_targets_between_tokens_are_multiples_of_golds() -> None:
    silver = Label(tenant="silver", tier="silver", load=1.0, ttft_seconds=5.0, itl_factor=2.0)

    assert targets_of([silver], 0.1) == {"silver": Targets(ttft_seconds=5.0, itl_seconds=0.2)}


def test_rounds_count_together_each_in_its_own_window() -> None:
    first = a_run(a_request(10.5, 10.6), a_request(end=End.REFUSED))
    second = a_run(a_request(11.0, 11.05, at=10.2), a_request(20.5, at=19.5, end=End.OPEN))
    both = in_rounds([first, second], seconds=25.0)

    assert both.seconds == 20.0
    assert both.windows == [(10.0, 20.0), (35.0, 45.0)]
    assert [one.request.at_seconds for one in both.experiences] == [10.0, 10.0, 35.2, 44.5]
    assert both.ttft_seconds(GOLD) == pytest.approx([0.5, inf, 0.8])
    assert both.itl_seconds(GOLD) == pytest.approx([0.1, 0.05])
    assert both.output_tokens_per_s == pytest.approx(4 / 20)
    assert both.goodput(TARGETS) == pytest.approx(2 / 20)
    assert both.attainment_percent(["gold"], TARGETS) == pytest.approx(200 / 3)
    assert both.service == {"gold": 100.0}
