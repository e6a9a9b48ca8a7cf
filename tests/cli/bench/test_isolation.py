import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tidegate_cli.bench import plots
from tidegate_cli.bench.batching import load_trace
from tidegate_cli.bench.errors import BenchError
from tidegate_cli.bench.isolation import (
    TRACE,
    IsolationBench,
    IsolationSettings,
    run_isolation,
)
from tidegate_cli.bench.isolation_fleet import FleetShape
from tidegate_cli.bench.isolation_load import Traffic
from tidegate_cli.bench.isolation_report import IsolationFigures
from tidegate_cli.bench.isolation_side import FCFS, TIDEGATE, SideName
from tidegate_cli.bench.isolation_simulated import SimulatedGround
from tidegate_cli.bench.isolation_torch import shortened

SMALL = FleetShape(
    engines=2,
    gpu="CPU-2-cores",
    model="SmolLM2-135M",
    max_num_seqs=16,
    max_batched_tokens=80,
    prefill_chunk_max=80,
    host_gigabytes=0.5,
)
KEYS = {
    "capacity_requests_per_s",
    "ttft_ratio",
    "itl_over_target",
    "max_share_error_points",
    "throughput_over_fcfs",
    "goodput_over_fcfs",
    "goodput_over_priority",
    "misbehaver_cost_points",
    "honouring_second_try_percent",
}


def small_settings(seed: int = 1) -> IsolationSettings:
    settings = IsolationSettings(shape=SMALL, seed=seed).quick()
    return replace(settings, shape=SMALL, honouring_seconds=10.0)


async def measure(
    settings: IsolationSettings, tell: Callable[[str], None] = lambda _line: None
) -> IsolationFigures:
    recorded, _ = shortened(load_trace(TRACE, None), seed=settings.seed)
    traffic = Traffic(recorded, seed=settings.seed)
    ground = SimulatedGround(settings.shape, traffic)
    return await IsolationBench(settings, ground, traffic, tell).run()


async def test_every_key_is_there_and_a_seed_always_gives_the_same_figures() -> None:
    first, again, other = [await measure(small_settings(seed)) for seed in (1, 1, 2)]

    assert set(first.results()) == KEYS
    assert first.results() == again.results()
    assert first.series() == again.series()
    assert first.results() != other.results()


async def test_only_the_sides_that_are_wanted_are_measured() -> None:
    figures = await measure(replace(small_settings(), sides=(SideName.TIDEGATE, SideName.FCFS)))

    assert set(figures.together) == {TIDEGATE, FCFS}
    assert set(figures.results()) == KEYS - {"goodput_over_priority"}


async def test_all_sides_take_turns_with_the_same_parts_of_the_record() -> None:
    settings = small_settings()
    settings = replace(settings, scale=replace(settings.scale, rounds=2, seconds=4.0))
    told: list[str] = []
    figures = await measure(settings, tell=told.append)

    turns = [line for line in told if "misbehaves" not in line and "honour" not in line]
    assert turns[: len(turns) // 2] == [line.replace("2 of", "1 of") for line in turns[5:]]
    runs = [figures.alone, *figures.together.values()]
    assert {tuple(run.windows) for run in runs} == {((3.0, 5.0), (8.0, 10.0))}
    sent = [
        [
            (one.request_id, one.at_seconds, one.prompt_tokens)
            for one in (experience.request for experience in run.experiences)
            if one.tenant == figures.gold.tenant
        ]
        for run in runs
    ]
    assert all(one == sent[0] for one in sent)
    assert len({request_id for request_id, *_ in sent[0]}) == len(sent[0])


async def test_the_command_prints_its_conditions_and_writes_files(tmp_path: Path) -> None:
    console = Console(record=True, width=122, file=StringIO())
    settings = replace(small_settings(), sides=(SideName.TIDEGATE,), honouring_seconds=1.0)
    settings = replace(settings, shape=FleetShape(engines=1), honouring_engines=1)
    settings = replace(
        settings,
        scale=replace(
            settings.scale, lead_in_seconds=0.5, seconds=1.5, misbehaving_seconds=0.5, queued=20
        ),
    )

    await run_isolation(
        console,
        settings=settings,
        progress=lambda _line: None,
        json_file=tmp_path / "out.json",
        plot_directory=tmp_path / "plots",
    )

    said = " ".join(console.export_text().split())
    assert "our own labelling" in said
    assert "Capacity:" in said
    assert "1000 requests" in said
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["bench"] == "isolation"
    assert written["settings"]["seed"] == 1
    assert written["settings"]["lengths"]["count"] == 1000
    assert "versions" in written["machine"]
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {
        "isolation-ttft.png",
        "isolation-ttft.svg",
    }


async def test_a_plot_is_refused_before_anything_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda _name: None)
    told: list[str] = []

    with pytest.raises(BenchError, match="matplotlib"):
        await run_isolation(
            Console(quiet=True),
            settings=IsolationSettings(),
            progress=told.append,
            json_file=None,
            plot_directory=tmp_path,
        )

    assert told == []
