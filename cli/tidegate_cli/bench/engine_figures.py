"""What `tidegate bench engine` makes of its measurements: results by key, and what it prints."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from tidegate_cli import report
from tidegate_cli.bench.engine_bare import BareSteps
from tidegate_cli.bench.engine_client import RunFigures
from tidegate_cli.bench.engine_usage import CpuUse, StepUse
from tidegate_cli.bench.engine_workload import PADDED_TRACE, ScaledTrace
from tidegate_cli.bench.figures import quantiles

_NOTEWORTHY_CPUS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstFigures:
    """Our engine under workload W at once."""

    run: RunFigures
    steps: StepUse
    cpu: CpuUse


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingFigures:
    """A recorded trace with the same kernels, batched continuously and statically.

    Attributes:
        padded: The trace.
        padding_bound: See `engine_workload.padding_bound`.
    """

    continuous: RunFigures
    static: RunFigures
    padded: ScaledTrace
    padding_bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigures:
    """Another server under the same workload.

    Attributes:
        url: Without its key.
    """

    url: str
    model: str
    takes_token_ids: bool
    burst: RunFigures | None
    poisson: RunFigures | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """Everything that one run measured; a part that was left out is None.

    Attributes:
        bare: The burst once more without an engine, where there was one.
        resident_mb: The most that the engine had, from its start to the end of W.
        max_batched_tokens: Of a step.
        poisson_itl_seconds: Target in the policy while arrivals were Poisson.
    """

    burst: BurstFigures | None
    bare: BareSteps | None
    poisson: RunFigures | None
    batching: BatchingFigures | None
    resident_mb: float
    max_batched_tokens: int
    poisson_itl_seconds: float
    peers: Sequence[PeerFigures] = ()

    def results(self) -> dict[str, float]:
        """Return the numbers by the keys that the documentation names."""
        results = _client_results("", self.burst.run if self.burst else None, self.poisson)
        results["rss_mb"] = self.resident_mb
        if self.burst and self.bare:
            results |= _burst_results(self.burst, self.bare)
        if self.batching:
            results["continuous_over_static"] = (
                self.batching.continuous.output_tokens_per_s
                / self.batching.static.output_tokens_per_s
            )
            results["padding_bound"] = self.batching.padding_bound
        for number, peer in enumerate(self.peers, start=1):
            results |= _client_results(_peer_prefix(number), peer.burst, peer.poisson)
        return results

    def series(self) -> dict[str, Sequence[float]]:
        """Return what was measured one by one, and quantiles of it."""
        series: dict[str, Sequence[float]] = {}
        if self.bare:
            series["bare_step_seconds"] = self.bare.step_seconds
        runs: dict[str, RunFigures | None] = {
            "burst": self.burst.run if self.burst else None,
            "poisson": self.poisson,
            "padded_continuous": self.batching.continuous if self.batching else None,
            "padded_static": self.batching.static if self.batching else None,
        }
        for number, peer in enumerate(self.peers, start=1):
            runs[f"{_peer_prefix(number)}burst"] = peer.burst
            runs[f"{_peer_prefix(number)}poisson"] = peer.poisson
        for name, run in runs.items():
            if run is None:
                continue
            series[f"{name}_ttft_seconds"] = run.ttft_seconds
            series[f"{name}_ttft_seconds_p50_p90_p99"] = quantiles(run.ttft_seconds)
            series[f"{name}_itl_seconds_p50_p90_p99"] = quantiles(run.itl_seconds)
            series[f"{name}_seconds_and_output_tokens"] = [run.seconds, run.output_tokens]
        return series


def print_figures(console: Console, figures: EngineFigures) -> None:
    """Print the table, and what a reader has to know to judge it."""
    console.print(report.figures_table("bench engine", figures.results()))
    for line in _remarks(figures):
        console.print(line, highlight=False, soft_wrap=True)
    if figures.bare and figures.bare.profile:
        percents = {part: 100 * share for part, share in figures.bare.profile.items()}
        console.print(report.figures_table("Where the time of a step goes, in %", percents))


def _remarks(figures: EngineFigures) -> list[str]:
    lines = [f"A step has up to {figures.max_batched_tokens} tokens."]
    if figures.burst and figures.bare:
        lines += _burst_remarks(figures.burst, figures.bare)
    if figures.poisson:
        lines.append(
            f"With Poisson arrivals the policy sets a target of"
            f" {1000 * figures.poisson_itl_seconds:g} ms for ITL, which bounds the prompts in a"
            " step; W at once has none."
        )
    if figures.batching:
        lines.append(_batching_remark(figures.batching))
    lines += [
        f"{_peer_prefix(number)}*: {peer.url} serves {peer.model}; prompts as"
        f" {'token ids' if peer.takes_token_ids else 'text'}"
        + (f", {peer.burst.prompt_tokens} tokens by its count." if peer.burst else ".")
        for number, peer in enumerate(figures.peers, start=1)
    ]
    return lines


def _burst_remarks(burst: BurstFigures, bare: BareSteps) -> list[str]:
    run, steps = burst.run, burst.steps
    lines = [
        f"W: {len(run.ttft_seconds)} requests, {run.prompt_tokens} prompt and"
        f" {run.output_tokens} output tokens, in {run.seconds:.1f} s and {steps.steps} steps;"
        " clients run on the same machine.",
        f"Of the time of the burst, executing steps took"
        f" {100 * steps.step_seconds / run.seconds:.1f} %, planning and committing them"
        f" {100 * steps.scheduler_seconds / run.seconds:.2f} %.",
        f"The bound is W's output tokens over the time of executing its {len(bare.step_seconds)}"
        f" steps alone, {sum(bare.step_seconds):.1f} s: the same plans, settings and kernels, with"
        " no HTTP, no clients and no planning.",
    ]
    if burst.cpu.foreign_cpus > _NOTEWORTHY_CPUS:
        lines.append(
            f"Others took {burst.cpu.foreign_cpus:.2f} cores during the burst: steps of several"
            " threads lose far more by that than its share."
        )
    return lines


def _batching_remark(figures: BatchingFigures) -> str:
    lengths = figures.padded.lengths
    return (
        f"Continuous and static batching: the first {lengths.count} requests of {PADDED_TRACE}, all"
        f" at once, prompts times {figures.padded.prompt_factor:.3g} (p50 {lengths.prompt_p50}, p95"
        f" {lengths.prompt_p95}), outputs times {figures.padded.output_factor:.3g} (p50"
        f" {lengths.output_p50}, p95 {lengths.output_p95});"
        f" {figures.continuous.output_tokens_per_s:.1f} and"
        f" {figures.static.output_tokens_per_s:.1f} output tokens/s. Padding of outputs alone"
        f" allows a factor of {figures.padding_bound:.3g}."
    )


def _burst_results(burst: BurstFigures, bare: BareSteps) -> dict[str, float]:
    return {
        "bound_output_tokens_per_s": bare.output_tokens_per_s,
        "of_bound": burst.run.output_tokens_per_s / bare.output_tokens_per_s,
        "batch_size_mean": burst.steps.batch_size_mean,
        "queue_p99_s": burst.steps.queue_p99,
        "scheduler_fraction": burst.steps.scheduler_fraction,
        "http_cpu_fraction": burst.cpu.http_fraction,
        "burst_cpu_s": burst.cpu.engine,
        "burst_client_cpu_s": burst.cpu.bench,
        "foreign_cpus": burst.cpu.foreign_cpus,
        **bare.quality,
    }


def _client_results(
    prefix: str, burst: RunFigures | None, poisson: RunFigures | None
) -> dict[str, float]:
    results = {}
    if burst:
        results[f"{prefix}burst_output_tokens_per_s"] = burst.output_tokens_per_s
        results[f"{prefix}burst_ttft_p99_s"] = burst.ttft_p99
        results[f"{prefix}burst_itl_p99_ms"] = burst.itl_p99_ms
    if poisson:
        results[f"{prefix}poisson_ttft_p99_s"] = poisson.ttft_p99
        results[f"{prefix}poisson_itl_p99_ms"] = poisson.itl_p99_ms
    return results


def _peer_prefix(number: int) -> str:
    return "peer_" if number == 1 else f"peer{number}_"
