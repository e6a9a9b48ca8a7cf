"""`tidegate bench batching`: continuous batching against static and bucketed, simulated.

All three get the same GPU, model, KV pool, slots and token budget, and every request runs to its
recorded length. Throughputs are compared with all requests there from the start: as recorded, the
traffic asks for less than any of the three can give, and only latencies differ.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from itertools import islice
from pathlib import Path
from statistics import fmean, pstdev

from rich import box
from rich.console import Console
from rich.table import Table

from tidegate_cli import report
from tidegate_cli.bench.errors import BenchError
from tidegate_cli.bench.plots import plot_sweep, require_plotting
from tidegate_cli.bench.result import BenchResult
from tidegate_cli.bench.simulation import BUCKETED, CONTINUOUS, STATIC, WAYS, Served, Simulation
from tidegate_cli.traces import TraceRequest, read_trace
from tidegate_engine.executor.hardware import GPUS, MODELS

TRACES = ("azure2023_conv", "azure2023_code", "servegen_mm-image_drawn")
"""Named as their files; the results' keys are of the first."""

DEVIATIONS = (0.0, 0.5, 1.0, 1.5, 2.0)
"""Coefficients of variation of the swept output lengths."""

_SWEPT = "sweep"


@dataclass(frozen=True, kw_only=True)
class BatchingSettings:
    """What is simulated.

    Attributes:
        traces: Directory with whole windows (`NAME.csv.gz` or `NAME.csv`); None = their first
            thousand requests, as shipped.
        max_requests: Most requests of each trace; None = all.
        max_num_seqs: Slots of a batch.
        max_batched_tokens: Prompt tokens and decodes of a step.
        sweep_requests: Requests for each coefficient of variation.
        sweep_prompt_tokens: Length of all their prompts.
        sweep_output_tokens: Mean length of their outputs.
        seed: Draws the swept lengths.
    """

    gpu: str = "H100-80G"
    model: str = "Llama-3.1-8B"
    traces: Path | None = None
    max_requests: int | None = None
    max_num_seqs: int = 256
    max_batched_tokens: int = 2048
    sweep_requests: int = 4096
    sweep_prompt_tokens: int = 256
    sweep_output_tokens: int = 256
    seed: int = 1

    def quick(self) -> "BatchingSettings":
        """Return the same with fewer requests, and fewer slots so that several batches form."""
        return replace(
            self,
            max_requests=min(self.max_requests or 200, 200),
            max_num_seqs=min(self.max_num_seqs, 64),
            sweep_requests=min(self.sweep_requests, 192),
            sweep_output_tokens=min(self.sweep_output_tokens, 128),
        )


class BatchingBench:
    """One run: traces as recorded, traces all at once, and a sweep."""

    def __init__(self, settings: BatchingSettings, progress: Callable[[str], None]) -> None:
        """Prepare; `progress` is told what is simulated."""
        self._settings = settings
        self._tell = progress
        self._simulation = Simulation(
            gpu=GPUS[settings.gpu],
            model=MODELS[settings.model],
            max_num_seqs=settings.max_num_seqs,
            max_batched_tokens=settings.max_batched_tokens,
        )
        self.served: dict[tuple[str, str, str], Served] = {}
        """By trace, arrivals (`saturated` or `recorded`) and way of batching."""

    def run(self) -> BenchResult:
        """Simulate everything.

        Raises:
            TraceError: A trace can't be read.
            BenchError: A request did not get its output, or not the same from all three.
        """
        lengths: dict[str, list[float]] = {}
        for name, trace in self._traces():
            lengths[f"{name}/requests_and_output_mean"] = [len(trace), _mean_output(trace)]
            for arrivals in ("saturated", "recorded"):
                self._compare(name, trace, arrivals)
        for deviation in DEVIATIONS:
            trace = swept_lengths(self._settings, deviation)
            outputs = [one.output_tokens for one in trace]
            name = f"{_SWEPT}{cv_suffix(deviation)}"
            lengths[f"{name}/output_mean_and_cv"] = [
                fmean(outputs),
                pstdev(outputs) / fmean(outputs),
            ]
            self._compare(name, trace, "saturated")
        return BenchResult(
            bench="batching",
            settings=self._described(),
            results=self._results(),
            series={**lengths, **self._series()},
        )

    def ratio(self, name: str, other: str) -> float:
        """Return the saturated throughput of continuous batching over that of another way."""
        ours, theirs = (self.served[name, "saturated", way] for way in (CONTINUOUS, other))
        return ours.output_tokens_per_s / theirs.output_tokens_per_s

    def sweep_curves(self) -> dict[str, list[float]]:
        """Return what a plot of the sweep shows, by label: a value for each of `DEVIATIONS`."""
        names = [_SWEPT + cv_suffix(deviation) for deviation in DEVIATIONS]
        return {
            "continuous over static": [self.ratio(name, STATIC) for name in names],
            "continuous over bucketed": [self.ratio(name, BUCKETED) for name in names],
            "slots that static batching holds, over those it uses": [
                self.served[name, "saturated", STATIC].slot_bound for name in names
            ],
        }

    def _traces(self) -> Iterator[tuple[str, Sequence[TraceRequest]]]:
        for name in TRACES:
            trace = load_trace(name, self._settings.traces)
            yield name, tuple(islice(trace, self._settings.max_requests))

    def _compare(self, name: str, trace: Sequence[TraceRequest], arrivals: str) -> None:
        for way in WAYS:
            self._tell(f"{name}, {arrivals}: {way}")
            served = self._simulation.serve(way, trace, at_once=arrivals == "saturated")
            self.served[name, arrivals, way] = served
            if served.outputs_hash != self.served[name, arrivals, WAYS[0]].outputs_hash:
                raise BenchError(f"{name}, {arrivals}: {way} gives other tokens than {WAYS[0]}")

    def _results(self) -> dict[str, float]:
        recorded = TRACES[0]
        results = {
            "continuous_over_static": self.ratio(recorded, STATIC),
            "continuous_over_bucketed": self.ratio(recorded, BUCKETED),
            "slot_bound": self.served[recorded, "saturated", STATIC].slot_bound,
        }
        for other in (STATIC, BUCKETED):
            for suffix in map(cv_suffix, DEVIATIONS):
                results[f"continuous_over_{other}{suffix}"] = self.ratio(_SWEPT + suffix, other)
        return results

    def _series(self) -> dict[str, Sequence[float]]:
        series: dict[str, Sequence[float]] = {}
        for key, served in self.served.items():
            name = "/".join(key)
            series[f"{name}/output_tokens_per_s"] = [served.output_tokens_per_s]
            series[f"{name}/ttft_seconds_p50_p90_p99"] = served.ttft_seconds
            series[f"{name}/itl_seconds_p50_p90_p99"] = served.itl_seconds
            series[f"{name}/decodes_mean"] = [served.decodes_mean]
            series[f"{name}/padding_share"] = [served.padding_share]
            series[f"{name}/preemptions"] = [served.num_preemptions]
            if key[-1] != CONTINUOUS:
                series[f"{name}/slot_bound"] = [served.slot_bound]
        return series

    def _described(self) -> dict[str, object]:
        capacity = self._simulation.capacity
        return {
            **asdict(self._settings),
            "traces": str(self._settings.traces or "shipped"),
            "kv_blocks": capacity.num_blocks,
            "block_size": capacity.block_size,
            "arrivals_of_results": "all at once",
        }


def load_trace(name: str, directory: Path | None) -> tuple[TraceRequest, ...]:
    """Read a trace by its name, from a directory or from what is shipped.

    Raises:
        TraceError: It is not there or can't be read.
    """
    if directory is not None:
        compressed = directory / f"{name}.csv.gz"
        return read_trace(compressed if compressed.exists() else directory / f"{name}.csv")
    with resources.as_file(resources.files("tidegate_cli") / "recorded" / f"{name}.csv") as path:
        return read_trace(path)


def swept_lengths(settings: BatchingSettings, deviation: float) -> tuple[TraceRequest, ...]:
    """Draw output lengths from a gamma distribution of the settings' mean.

    Args:
        settings: How many, and their mean.
        deviation: The coefficient of variation; 0 = all alike.
    """
    mean, rng = settings.sweep_output_tokens, random.Random(settings.seed)
    shape = deviation**-2 if deviation else 0.0
    drawn = (
        rng.gammavariate(shape, mean / shape) if deviation else mean
        for _ in range(settings.sweep_requests)
    )
    return tuple(
        TraceRequest(
            at_seconds=0.0,
            tenant="",
            prompt_tokens=settings.sweep_prompt_tokens,
            output_tokens=max(1, round(length)),
        )
        for length in drawn
    )


def cv_suffix(deviation: float) -> str:
    """Write a coefficient of variation as the results' keys do: `_cv05` is 0.5."""
    return f"_cv{deviation:g}".replace(".", "")


def run_batching(
    console: Console,
    *,
    settings: BatchingSettings,
    progress: Callable[[str], None],
    json_file: Path | None,
    plot_directory: Path | None,
) -> None:
    """Simulate, print tables, write the JSON file and the plot.

    Raises:
        BenchError: A plot can't be drawn, or the three ways gave different tokens.
        TraceError: A trace can't be read.
    """
    if plot_directory is not None:
        require_plotting()
    bench = BatchingBench(settings, progress)
    result = bench.run()
    console.print(_served_table(bench))
    console.print(report.figures_table("bench batching", result.results))
    console.print(
        f"{settings.model} on {settings.gpu}, simulated; {settings.max_num_seqs} slots,"
        f" {result.settings['kv_blocks']} KV blocks of {result.settings['block_size']} tokens;"
        f" seed {settings.seed}. Ratios are of output tokens/s with all requests there at once."
    )
    if json_file is not None:
        result.write(json_file)
    if plot_directory is not None:
        for file in plot_sweep(plot_directory, DEVIATIONS, bench.sweep_curves()):
            progress(f"wrote {file}")


def _served_table(bench: BatchingBench) -> Table:
    table = Table(title="What each way of batching made of the traffic", box=box.SIMPLE_HEAD)
    for heading in ("trace", "arrivals", "batching"):
        table.add_column(heading, no_wrap=True)
    for heading in ("output\ntokens/s", "TTFT s\np50 p90 p99", "ITL ms\np50 p90 p99", "padding"):
        table.add_column(heading, justify="right", no_wrap=True)
    for (name, arrivals, way), served in bench.served.items():
        table.add_row(
            name,
            arrivals,
            way,
            f"{served.output_tokens_per_s:,.0f}",
            " ".join(f"{seconds:.3g}" for seconds in served.ttft_seconds),
            " ".join(f"{1000 * seconds:.3g}" for seconds in served.itl_seconds),
            f"{100 * served.padding_share:.0f} %",
            end_section=way == WAYS[-1],
        )
    return table


def _mean_output(trace: Sequence[TraceRequest]) -> float:
    return fmean(one.output_tokens for one in trace)
