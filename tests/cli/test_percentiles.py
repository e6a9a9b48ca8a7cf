import pytest

from tidegate_cli.percentiles import percentile


@pytest.mark.parametrize(
    ("percent", "expected"), [(1, 1), (50, 50), (99, 99), (99.5, 100), (100, 100)]
)
def test_a_percentile_is_a_value_that_was_measured(percent: float, expected: float) -> None:
    assert percentile(range(100, 0, -1), percent) == expected


def test_a_single_value_is_every_percentile() -> None:
    assert percentile([7.0], 1) == percentile([7.0], 99) == 7.0


def test_nothing_measured_has_no_percentile() -> None:
    assert percentile([], 50) is None


@pytest.mark.parametrize("percent", [0, 101])
def test_a_percent_out_of_range_is_refused(percent: float) -> None:
    with pytest.raises(ValueError, match=r"in \(0, 100\]"):
        percentile([1.0], percent)
