"""What `tidegate bench isolation` makes of its runs: results by key, tables, what a plot shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tidegate_cli import report
from tidegate_cli.bench.figures import quantiles
from tidegate_cli.bench.isolation_figures import End, Run, Targets, p99, share_errors
from tidegate_cli.bench.isolation_honouring import Honouring
from tidegate_cli.bench.isolation_load import PATIENCE, SILVER, Label
from tidegate_cli.bench.isolation_side import FCFS, PRIORITY, TIDEGATE
from tidegate_cli.percentiles import percentile

ALONE = "gold alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationFigures:
    """Everything that one run measured.

    Attributes:
        capacity: Of the fleet, in requests a second.
        labels: The tenants of the overload, gold first.
        targets: By tenant.
        alone: Gold with nobody else.
        together: The overload, by side.
        beside: The tenants beside the one that misbehaves.
        misbehaving: By way; under the empty name it behaves.
        honouring: None = not measured on this fleet.
    """

    capacity: float
    labels: Sequence[Label]
    targets: Mapping[str, Targets]
    alone: Run
    together: Mapping[str, Run]
    beside: Sequence[Label]
    misbehaving: Mapping[str, Run]
    honouring: Honouring | None

    @property
    def gold(self) -> Label:
        """The tenant that comes first."""
        return self.labels[0]

    @property
    def silver(self) -> list[Label]:
        """The backlogged tenants of one tier."""
        return [label for label in self.labels if label.tier == SILVER]

    def results(self) -> dict[str, float]:
        """Return the numbers by the keys that the documentation names."""
        results = {"capacity_requests_per_s": self.capacity}
        ours = self.together.get(TIDEGATE)
        if ours is not None:
            results |= self._of_ours(ours)
        for side in (FCFS, PRIORITY):
            if ours is not None and side in self.together:
                results |= self._over(side, ours)
        results["misbehaver_cost_points"] = max(map(self.cost_points, self._ways))
        if self.honouring is not None:
            results["honouring_second_try_percent"] = self.honouring.second_try_percent
        return results

    def _of_ours(self, ours: Run) -> dict[str, float]:
        gold = self.gold
        return {
            "ttft_ratio": self._ttft_p99(ours) / self._ttft_p99(self.alone),
            "itl_over_target": p99(ours.itl_seconds(gold)) / self.targets[gold.tenant].itl_seconds,
            "max_share_error_points": max(
                map(abs, share_errors(self.silver, ours.service).values())
            ),
        }

    def _ttft_p99(self, run: Run) -> float:
        """Return gold's; whoever lost patience counts with that."""
        return min(p99(run.ttft_seconds(self.gold)), PATIENCE * self.gold.ttft_seconds)

    def _over(self, side: str, ours: Run) -> dict[str, float]:
        theirs = self.together[side]
        good = theirs.goodput(self.targets)
        # Where nothing was good, one request counts: the ratio is then no less than what is said.
        over = {f"goodput_over_{side}": ours.goodput(self.targets) / (good or 1 / theirs.seconds)}
        if side == FCFS:
            over["throughput_over_fcfs"] = ours.output_tokens_per_s / theirs.output_tokens_per_s
        return over

    @property
    def _ways(self) -> list[str]:
        return [way for way in self.misbehaving if way]

    def attainments(self, way: str) -> dict[str, float | None]:
        """Return how many of each other tenant's requests met all targets, in percent."""
        run = self.misbehaving[way]
        return {
            label.tenant: run.attainment_percent([label.tenant], self.targets)
            for label in self.beside
        }

    def cost_points(self, way: str) -> float:
        """Return by how much a way of misbehaving lowers the attainment of all others together."""
        others = [label.tenant for label in self.beside]
        before, after = (
            self.misbehaving[name].attainment_percent(others, self.targets) for name in ("", way)
        )
        return 0.0 if before is None or after is None else before - after

    def series(self) -> dict[str, Sequence[float]]:
        """Return what stands behind the results."""
        series: dict[str, Sequence[float]] = {}
        for name, run in {ALONE: self.alone, **self.together}.items():
            series |= self._run_series(name.replace(" ", "_"), run)
        for way in self.misbehaving:
            for tenant, percent in self.attainments(way).items():
                key = f"rogue/{way or 'behaves'}/{tenant}/attainment_percent"
                series[key] = [] if percent is None else [percent]
            if way:
                series[f"rogue/{way}/cost_points"] = [self.cost_points(way)]
        if self.honouring is not None:
            one = self.honouring
            series["honouring/sent_refused_succeeded_in_time"] = [
                one.sent,
                one.refused,
                one.succeeded,
                one.in_time,
            ]
            series["honouring/told_seconds_p50_p90_p99"] = quantiles(one.waits_seconds)
        return series

    def _run_series(self, name: str, run: Run) -> dict[str, Sequence[float]]:
        series: dict[str, Sequence[float]] = {
            f"{name}/output_tokens_per_s": [run.output_tokens_per_s],
            f"{name}/service_per_s": [run.service_per_s],
            f"{name}/goodput_per_s": [run.goodput(self.targets)],
            f"{name}/preemptions": [run.preemptions],
        }
        for label in self.labels_of(run):
            key = f"{name}/{label.tenant}"
            series[f"{key}/sent_done_refused_left_cut_open"] = _counts(run, label)
            series[f"{key}/ttft_seconds_p50_p90_p99"] = [
                value for value in quantiles(run.ttft_seconds(label)) if value < inf
            ]
            series[f"{key}/itl_seconds_p50_p90_p99"] = quantiles(run.itl_seconds(label))
            percent = run.attainment_percent([label.tenant], self.targets)
            series[f"{key}/attainment_percent"] = [] if percent is None else [percent]
        if name == TIDEGATE:
            for tenant, points in share_errors(self.silver, run.service).items():
                series[f"{name}/{tenant}/share_error_points"] = [points]
        return series

    def labels_of(self, run: Run) -> Sequence[Label]:
        """Return who takes part in one of the runs of the overload."""
        return [self.gold] if run is self.alone else self.labels

    def curves(self) -> dict[str, Sequence[float]]:
        """Return what a plot shows: gold's times to the first token, by side; ascending."""
        runs = {ALONE: self.alone, **self.together}
        return {name: sorted(run.ttft_seconds(self.gold)) for name, run in runs.items()}


def print_figures(
    console: Console, figures: IsolationFigures, described: Mapping[str, Any]
) -> None:
    """Print the tables, and what a reader has to know to judge them."""
    console.print(_tenants_table(figures))
    console.print(_rogue_table(figures))
    console.print(report.figures_table("bench isolation", figures.results()))
    for line in _remarks(figures, described):
        console.print(line, highlight=False, soft_wrap=True)


def _tenants_table(figures: IsolationFigures) -> Table:
    table = Table(title="What each tenant got, by whom it is served with", box=box.SIMPLE_HEAD)
    for heading in ("side", "tenant"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "sent",
        "done",
        "refused",
        "TTFT s\np50  p99",
        "ITL ms\np50  p99",
        "met all\ntargets",
        "output\ntokens/s",
        "good\nrequests/s",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for side, run in {ALONE: figures.alone, **figures.together}.items():
        labels = figures.labels_of(run)
        for number, label in enumerate(labels):
            sent, done, refused, *_ = _counts(run, label)
            of_all = (
                (f"{run.output_tokens_per_s:,.0f}", f"{run.goodput(figures.targets):,.3g}")
                if not number
                else ("", "")
            )
            table.add_row(
                "" if number else side,
                label.tenant,
                f"{sent:.0f}",
                f"{done:.0f}",
                f"{refused:.0f}",
                _pair(run.ttft_seconds(label), 1.0),
                _pair(run.itl_seconds(label), 1000.0),
                _percent(run.attainment_percent([label.tenant], figures.targets)),
                *of_all,
                end_section=label is labels[-1],
            )
    return table


def _rogue_table(figures: IsolationFigures) -> Table:
    table = Table(
        title="Requests that met all their targets beside a tenant that misbehaves",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("it")
    for label in figures.beside:
        table.add_column(label.tenant, justify="right")
    table.add_column("cost, points", justify="right")
    for way in figures.misbehaving:
        percents = figures.attainments(way).values()
        table.add_row(
            way or "behaves",
            *map(_percent, percents),
            f"{figures.cost_points(way):.2f}" if way else "",
        )
    return table


def _lengths(lengths: Mapping[str, float]) -> str:
    factors = (
        f"; prompts times {lengths['prompt_factor']:.3g}, outputs times"
        f" {lengths['output_factor']:.3g}"
        if "prompt_factor" in lengths
        else ""
    )
    return (
        f"The record has {lengths['count']} requests: prompts of {lengths['prompt_p50']} tokens at"
        f" p50 and {lengths['prompt_p95']} at p95, outputs of {lengths['output_p50']} and"
        f" {lengths['output_p95']}{factors}."
    )


def _remarks(figures: IsolationFigures, described: Mapping[str, Any]) -> list[str]:
    gold = figures.gold
    lines = [
        f"Requests and gaps are those of {described['trace']} ({described['traces']}), shortened or"
        " stretched alike for each tenant. Tiers and tenants are our own labelling: the record"
        " knows none.",
        _lengths(described["lengths"]),
        f"Capacity: {figures.capacity:.4g} requests/s, which the fleet finishes of this record,"
        " first come, first served, when far more is there than it can do. Together the tenants ask"
        f" for {sum(label.load for label in figures.labels):.3g} times that, gold for"
        f" {gold.load:.3g} of it.",
        f"Targets: gold's TTFT {gold.ttft_seconds:g} s, ITL"
        f" {1000 * figures.targets[gold.tenant].itl_seconds:.3g} ms, 2.5 times its p99 alone;"
        " clients hang up after twice their TTFT target without a token.",
        f"Seed {described['seed']}. All sides have the same scheduler, chunks, prefix cache and KV;"
        " fcfs is one tenant for everybody, priority a tenant a tier that takes nobody out.",
    ]
    if figures.honouring is not None:
        one = figures.honouring
        lines.append(
            f"Honouring clients: {one.refused} of {one.sent} were refused at first;"
            f" {one.succeeded} of these got their first token at their second try, {one.in_time}"
            " within the target."
        )
    return lines


def _counts(run: Run, label: Label) -> list[float]:
    counts = run.counts(label)
    ends = (End.DONE, End.REFUSED, End.LEFT, End.CUT, End.OPEN)
    return [sum(counts.values()), *(counts[end] for end in ends)]


def _percent(percent: float | None) -> str:
    return "-" if percent is None else f"{percent:.1f} %"


def _pair(values: Sequence[float], factor: float) -> str:
    found = [percentile(values, percent) for percent in (50, 99)]
    return "  ".join(
        "-" if value is None else "never" if value == inf else f"{factor * value:.3g}"
        for value in found
    )
