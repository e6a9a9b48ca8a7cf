"""The `tidegate` command."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from tidegate_cli.bench.engine_part import Part as EnginePart
from tidegate_cli.bench.isolation_side import SideName
from tidegate_cli.bench.propagation_part import Part as PropagationPart
from tidegate_cli.console.command import add_console
from tidegate_cli.insight import add_insight
from tidegate_cli.running import compute_to_end, run_to_end
from tidegate_devcluster.progress import to_stderr

# Commands import what they need when they run: all of it together takes seconds.

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", dir_okay=False, help="Also write the figures to this file, as JSON."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Shorter and less precise, same figures.")]
Replicas = Annotated[int, typer.Option(min=1, max=64, help="Engine pods.")]

app = typer.Typer(
    name="tidegate",
    help="Multi-tenant LLM inference scheduling on Kubernetes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure; every benchmark prints a table.", no_args_is_help=True)
app.add_typer(bench, name="bench")
add_insight(app)
add_console(app)


@app.command()
def up(
    replicas: Replicas = 2,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Engines that compute nothing and start at once.")
    ] = False,
) -> None:
    """Run everything on this machine, with sample policies, until Ctrl-C."""
    from tidegate_cli.local import LocalSettings
    from tidegate_cli.up import stay_up

    local = LocalSettings(replicas=replicas, executor="simulated" if simulated else "torch")
    run_to_end(stay_up(_console(), local=local, progress=to_stderr), interrupted=0)


@app.command()
def demo(json_file: JsonFile = None, quick: Quick = False) -> None:
    """Show a policy change take effect under recorded traffic; ends by itself."""
    from tidegate_cli.demo import DemoSettings, run_demo

    settings = DemoSettings.quick() if quick else DemoSettings()
    run_to_end(run_demo(_console(), settings=settings, progress=to_stderr, json_file=json_file))


@app.command()
def crds(
    directory: Annotated[
        Path | None, typer.Option("--output", file_okay=False, help="Write one file per kind here.")
    ] = None,
) -> None:
    """Print the custom resource definitions, for `kubectl apply --server-side -f -`."""
    from tidegate_operator.crds import crd_files, write_crds

    if directory is not None:
        write_crds(directory)
    else:
        typer.echo("---\n".join(crd_files().values()), nl=False)


@bench.command()
def propagation(  # noqa: PLR0917 - typer passes options by name
    policies: Annotated[
        int, typer.Option(min=1, max=10_000, help="TenantPolicies of the pool.")
    ] = 1000,
    engines: Annotated[int, typer.Option(min=1, max=500, help="Simulated engines.")] = 100,
    changes: Annotated[int, typer.Option(min=1, max=10_000, help="Changes, one by one.")] = 100,
    part: Annotated[
        list[PropagationPart] | None,
        typer.Option(help="Measure only this; may come several times."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses the changed policies.")] = 1,
    json_file: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Measure the time from a change in the API to every engine, and the operator's needs."""
    from tidegate_cli.bench.propagation import PropagationSettings, run_propagation

    settings = PropagationSettings(
        policies=policies,
        engines=engines,
        changes=changes,
        parts=tuple(part or PropagationPart),
        seed=seed,
    )
    if quick:
        settings = settings.quick()
    run_to_end(
        run_propagation(_console(), settings=settings, progress=to_stderr, json_file=json_file)
    )


@bench.command()
def batching(  # noqa: PLR0917 - typer passes options by name
    traces: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            exists=True,
            help="Whole windows, NAME.csv.gz; without it their first thousand requests, shipped.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Draw the sweep into this directory, PNG and SVG."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the swept lengths.")] = 1,
    json_file: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Compare continuous batching with static and bucketed, on a simulated H100."""
    from tidegate_cli.bench.batching import BatchingSettings, run_batching

    settings = BatchingSettings(traces=traces, seed=seed)
    if quick:
        settings = settings.quick()
    compute_to_end(
        lambda: run_batching(
            _console(),
            settings=settings,
            progress=to_stderr,
            json_file=json_file,
            plot_directory=plot,
        )
    )


@bench.command()
def engine(  # noqa: PLR0913, PLR0917 - typer passes options by name
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of weights, activations and KV.")
    ] = "float32",
    quantization: Annotated[
        Literal["none", "int8"], typer.Option(help="Of the weights; int8 activations with it.")
    ] = "none",
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of a step; all cores without it.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="URL of an OpenAI-compatible server to measure as well; repeatable."),
    ] = None,
    part: Annotated[
        list[EnginePart] | None,
        typer.Option(help="Measure only this; may come several times."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses the words of the prompts.")] = 1,
    json_file: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Measure an engine under load over HTTP: throughput, latencies, what they are of the bound."""
    from tidegate_cli.bench.engine import EngineSettings, run_engine_bench

    settings = EngineSettings(
        dtype=dtype,
        quantization=quantization,
        temperature=temperature,
        threads=threads,
        peers=tuple(peer or ()),
        parts=tuple(part or EnginePart),
        seed=seed,
    )
    if quick:
        settings = settings.quick()
    run_to_end(
        run_engine_bench(_console(), settings=settings, progress=to_stderr, json_file=json_file)
    )


@bench.command()
def isolation(  # noqa: PLR0917 - typer passes options by name
    fleet: Annotated[
        Literal["simulated", "torch"],
        typer.Option(help="Eight H100s in virtual time, or an engine with the real model."),
    ] = "simulated",
    side: Annotated[
        list[SideName] | None,
        typer.Option(help="How everybody is served; repeatable, all three without it."),
    ] = None,
    traces: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            exists=True,
            help="Whole windows, NAME.csv.gz; without it their first thousand requests, shipped.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Draw gold's TTFT into this directory, PNG and SVG."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws who sends what, when, and to whom.")] = 1,
    json_file: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Measure what one tenant notices of the others, under our policy and under plainer ones."""
    from tidegate_cli.bench.isolation import IsolationSettings, run_isolation

    settings = replace(IsolationSettings.of_fleet(fleet), traces=traces, seed=seed)
    if side:
        settings = replace(settings, sides=tuple(dict.fromkeys(side)))
    if quick:
        settings = settings.quick()
    run_to_end(
        run_isolation(
            _console(),
            settings=settings,
            progress=to_stderr,
            json_file=json_file,
            plot_directory=plot,
        )
    )


@bench.command()
def cancel(
    seed: Annotated[int, typer.Option(help="Chooses ways, moments and prompts.")] = 1,
    json_file: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Measure the time from a client that leaves to its KV free, on the real model."""
    from tidegate_cli.bench.cancel import CancelSettings, run_cancel

    settings = CancelSettings(seed=seed)
    if quick:
        settings = settings.quick()
    compute_to_end(
        lambda: run_cancel(_console(), settings=settings, progress=to_stderr, json_file=json_file)
    )


@bench.command()
def metrics(
    tenants: Annotated[int, typer.Option(min=1, max=10_000, help="All of them active.")] = 1000,
    json_file: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Time scrapes of an engine with many tenants under traffic, and what its streams notice."""
    from tidegate_cli.bench.metrics import MetricsSettings, run_metrics

    settings = MetricsSettings(tenants=tenants)
    if quick:
        settings = settings.quick()
    run_to_end(run_metrics(_console(), settings=settings, progress=to_stderr, json_file=json_file))


@bench.command()
def preemption(
    seed: Annotated[int, typer.Option(help="Chooses prompts, and where blocks lie.")] = 1,
    json_file: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Compare preemption by swap with recompute, on this machine with SmolLM2."""
    from tidegate_cli.bench.preemption import PreemptionSettings, run_preemption

    settings = PreemptionSettings(seed=seed)
    if quick:
        settings = settings.quick()
    compute_to_end(
        lambda: run_preemption(
            _console(), settings=settings, progress=to_stderr, json_file=json_file
        )
    )


@bench.command()
def scheduler(
    seed: Annotated[int, typer.Option(help="Chooses who is cancelled.")] = 1,
    json_file: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Time the scheduler alone: a step, a cancel, a policy."""
    from tidegate_cli.bench.scheduler import SchedulerSettings, run_scheduler

    settings = SchedulerSettings(seed=seed)
    if quick:
        settings = settings.quick()
    compute_to_end(
        lambda: run_scheduler(
            _console(), settings=settings, progress=to_stderr, json_file=json_file
        )
    )


def _console() -> Console:
    from tidegate_cli.report import TABLE_WIDTH

    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    return console


def main() -> None:
    """Run the command line."""
    app()
