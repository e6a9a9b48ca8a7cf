import math

import pytest

from tidegate_cli.console.words import count_text, counted, percent_text, seconds_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00042, "0.4 ms"),
        (0.0384, "38.4 ms"),
        (0.9996, "1 s"),
        (1.25, "1.25 s"),
        (210, "3.5 min"),
        (math.inf, "never"),
    ],
)
def test_durations_have_few_digits_and_a_unit(seconds: float, text: str) -> None:
    assert seconds_text(seconds).replace("\N{NO-BREAK SPACE}", " ") == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (982, "982"), (9999, "9999"), (14_200, "14.2k"), (3_810_000, "3.81M"), (2e9, "2G")],
)
def test_numbers_have_few_digits(count: float, text: str) -> None:
    assert count_text(count) == text


def test_a_small_percentage_is_not_nothing() -> None:
    said = [percent_text(percent).replace("\N{NO-BREAK SPACE}", " ") for percent in (0, 0.2, 41.6)]
    assert said == ["0 %", "<1 %", "42 %"]


def test_a_number_stays_with_what_it_counts() -> None:
    assert counted(12, "waiting") == "12\N{NO-BREAK SPACE}waiting"
