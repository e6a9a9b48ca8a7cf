"""What a dashboard is made of, apart from the form in which Grafana stores it."""

from dataclasses import dataclass

from tidegate_policies.fairness import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST

INTERVAL = "$__rate_interval"
"""Grafana's choice of the range over which a rate is taken."""

PROMPT_COST = f"{PROMPT_TOKEN_COST:g}"
OUTPUT_COST = f"{OUTPUT_TOKEN_COST:g}"

TOKENS_PER_SECOND = "si:tok/s"
LEGEND_POOL = "{{pool}}"


@dataclass(frozen=True)
class Query:
    """One PromQL expression of a panel.

    Attributes:
        legend: Name of its series, with `{{label}}` for labels.
        is_limit: Drawn as a dashed line: a target, a nominal, a watermark.
    """

    expr: str
    legend: str = ""
    is_limit: bool = False


@dataclass(frozen=True, kw_only=True)
class Step:
    """From `value` on a number is shown in `color`; None = from the start."""

    value: float | None
    color: str


GOOD_IS_ZERO = (Step(value=None, color="green"), Step(value=1, color="red"))


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One panel.

    Attributes:
        title: What it shows.
        description: What a reader should make of it.
        unit: As Grafana names it.
        kind: `lines`, `stacked` (parts of a whole), `number` (the newest value), `states`.
        steps: Colors by value.
        maximum: Upper end of the axis; None = that of what is shown.
        states: What the values of `states` are called, with their colors.
        width: In 24ths of the page.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "lines"
    steps: tuple[Step, ...] = ()
    maximum: float | None = None
    states: tuple[tuple[int, str, str], ...] = ()
    width: int = 8


@dataclass(frozen=True, kw_only=True)
class Section:
    """Panels under a heading."""

    title: str
    charts: tuple[Chart, ...]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A variable that people choose at the top of the page, from the values of a label.

    Attributes:
        name: `$name` in queries, and the label.
        series: Whose label it is, as a PromQL selector.
        is_single: Exactly one value; otherwise any number, all of them at first.
    """

    name: str
    label: str
    series: str
    is_single: bool = False


@dataclass(frozen=True, kw_only=True)
class Page:
    """One dashboard.

    Attributes:
        uid: Stays the same for ever: links point to it.
    """

    uid: str
    title: str
    description: str
    choices: tuple[Choice, ...]
    sections: tuple[Section, ...]


def rate(series: str, by: str) -> str:
    """Return the growth per second of a counter, by labels."""
    return f"sum by ({by}) (rate({series}[{INTERVAL}]))"


def quantile(share: float, histogram: str, selector: str, by: str, *, over: str = INTERVAL) -> str:
    """Return a quantile of a histogram, by labels.

    Args:
        share: From 0 to 1.
        histogram: Name without `_bucket`.
        selector: Label matchers, in braces.
        by: Labels, or nothing.
        over: How far back.
    """
    labels = f"{by}, le" if by else "le"
    buckets = f"rate({histogram}_bucket{selector}[{over}])"
    return f"histogram_quantile({share}, sum by ({labels}) ({buckets}))"


def quantiles(histogram: str, selector: str) -> tuple[Query, ...]:
    """Return median, p95 and p99 of a histogram."""
    return tuple(
        Query(quantile(share, histogram, selector, ""), name)
        for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    )


def selector(**labels: str) -> str:
    """Return label matchers in braces; a value that begins with `~` is a regular expression."""
    matchers = (
        f'{name}=~"{value[1:]}"' if value.startswith("~") else f'{name}="{value}"'
        for name, value in labels.items()
    )
    return f"{{{', '.join(matchers)}}}"
