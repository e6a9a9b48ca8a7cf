from tidegate_cli.bench.figures import quantiles


def test_quantiles_are_the_median_and_two_of_the_tail() -> None:
    assert quantiles(range(1, 101)) == [50, 90, 99]


def test_of_nothing_there_are_no_quantiles() -> None:
    assert quantiles([]) == []
