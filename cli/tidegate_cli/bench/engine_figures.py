"""What `tidegate bench engine` makes of its measurements: results by key, and what it prints."""

from collections.abc import Mapping, Sequence
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
class ServedFigures:
    """Our engine under workload W.

    Attributes:
        steps: Of the burst.
        cpu: Of the burst.
        resident_mb: The most it had, from its start to the end of both runs.
    """

    burst: RunFigures
    poisson: RunFigures
    steps: StepUse
    cpu: CpuUse
    resident_mb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigures:
    """Another server under the same workload.

    Attributes:
        url: Without its key.
    """

    url: str
    model: str
    takes_token_ids: bool
    burst: RunFigures
    poisson: RunFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """Everything that one run measured.

    Attributes:
        continuous: The padded trace, on the engine that served W.
        static: The same trace with the same kernels, batched statically.
        padding_bound: See `engine_workload.padding_bound`.
        max_batched_tokens: Of a step.
        poisson_itl_seconds: Target in the policy while arrivals were Poisson.
    """

    served: ServedFigures
    bare: BareSteps
    continuous: RunFigures
    static: RunFigures
    padded: ScaledTrace
    padding_bound: float
    max_batched_tokens: int
    poisson_itl_seconds: float
    peers: Sequence[PeerFigures] = ()

    def results(self) -> dict[str, float]:
        """Return the numbers by the keys that the documentation names."""
        served, bound = self.served, self.bare.output_tokens_per_s
        results = {
            **_client_results("", served.burst, served.poisson),
            "bound_output_tokens_per_s": bound,
            "of_bound": served.burst.output_tokens_per_s / bound,
            "batch_size_mean": served.steps.batch_size_mean,
            "queue_p99_s": served.steps.queue_p99,
            "rss_mb": served.resident_mb,
            "scheduler_fraction": served.steps.scheduler_fraction,
            "http_cpu_fraction": served.cpu.http_fraction,
            "burst_cpu_s": served.cpu.engine,
            "burst_client_cpu_s": served.cpu.bench,
            "foreign_cpus": served.cpu.foreign_cpus,
            "continuous_over_static": (
                self.continuous.output_tokens_per_s / self.static.output_tokens_per_s
            ),
            "padding_bound": self.padding_bound,
            **self.bare.quality,
        }
        for number, peer in enumerate(self.peers, start=1):
            results |= _client_results(_peer_prefix(number), peer.burst, peer.poisson)
        return results

    def series(self) -> dict[str, Sequence[float]]:
        """Return what was measured one by one, and quantiles of it."""
        series: dict[str, Sequence[float]] = {"bare_step_seconds": self.bare.step_seconds}
        runs = {
            "burst": self.served.burst,
            "poisson": self.served.poisson,
            "padded_continuous": self.continuous,
            "padded_static": self.static,
        }
        for number, peer in enumerate(self.peers, start=1):
            runs[f"{_peer_prefix(number)}burst"] = peer.burst
            runs[f"{_peer_prefix(number)}poisson"] = peer.poisson
        for name, run in runs.items():
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
    if figures.bare.profile:
        percents = {part: 100 * share for part, share in figures.bare.profile.items()}
        console.print(report.figures_table("Where the time of a step goes, in %", percents))


def _remarks(figures: EngineFigures) -> list[str]:
    served, bare, lengths = figures.served, figures.bare, figures.padded.lengths
    lines = [
        f"W: {len(served.burst.ttft_seconds)} requests, {served.burst.prompt_tokens} prompt and"
        f" {served.burst.output_tokens} output tokens, in {served.burst.seconds:.1f} s and"
        f" {served.steps.steps} steps; clients run on the same machine.",
        f"A step has up to {figures.max_batched_tokens} tokens. With Poisson arrivals the policy"
        f" sets a target of {1000 * figures.poisson_itl_seconds:g} ms for ITL, which bounds the"
        " prompts in it; W at once has none.",
        f"Of the time of the burst, executing steps took"
        f" {100 * served.steps.step_seconds / served.burst.seconds:.1f} %, planning and committing"
        f" them {100 * served.steps.scheduler_seconds / served.burst.seconds:.2f} %.",
        f"The bound is W's output tokens over the time of executing its {len(bare.step_seconds)}"
        f" steps alone, {sum(bare.step_seconds):.1f} s: the same plans, settings and kernels, with"
        " no HTTP, no clients and no planning.",
        f"Continuous and static batching: the first {lengths.count} requests of {PADDED_TRACE}, all"
        f" at once, prompts times {figures.padded.prompt_factor:.3g} (p50 {lengths.prompt_p50}, p95"
        f" {lengths.prompt_p95}), outputs times {figures.padded.output_factor:.3g} (p50"
        f" {lengths.output_p50}, p95 {lengths.output_p95});"
        f" {figures.continuous.output_tokens_per_s:.1f} and"
        f" {figures.static.output_tokens_per_s:.1f} output tokens/s. Padding of outputs alone"
        f" allows a factor of {figures.padding_bound:.3g}.",
    ]
    lines += [
        f"{_peer_prefix(number)}*: {peer.url} serves {peer.model}; prompts as"
        f" {'token ids' if peer.takes_token_ids else 'text'}, {peer.burst.prompt_tokens} tokens by"
        " its count."
        for number, peer in enumerate(figures.peers, start=1)
    ]
    if served.cpu.foreign_cpus > _NOTEWORTHY_CPUS:
        lines.append(
            f"Others took {served.cpu.foreign_cpus:.2f} cores during the burst: steps of several"
            " threads lose far more by that than its share."
        )
    return lines


def _client_results(prefix: str, burst: RunFigures, poisson: RunFigures) -> Mapping[str, float]:
    return {
        f"{prefix}burst_output_tokens_per_s": burst.output_tokens_per_s,
        f"{prefix}burst_ttft_p99_s": burst.ttft_p99,
        f"{prefix}burst_itl_p99_ms": burst.itl_p99_ms,
        f"{prefix}poisson_ttft_p99_s": poisson.ttft_p99,
        f"{prefix}poisson_itl_p99_ms": poisson.itl_p99_ms,
    }


def _peer_prefix(number: int) -> str:
    return "peer_" if number == 1 else f"peer{number}_"
