import gzip
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import fmean, pstdev

import pytest
from rich.console import Console

from tidegate_cli.bench import plots
from tidegate_cli.bench.batching import (
    DEVIATIONS,
    TRACES,
    BatchingBench,
    BatchingSettings,
    cv_suffix,
    load_trace,
    run_batching,
    swept_lengths,
)
from tidegate_cli.bench.errors import BenchError
from tidegate_cli.bench.simulation import Served
from tidegate_cli.errors import TraceError
from tidegate_cli.traces import TraceRequest

KEYS = {
    "continuous_over_static",
    "continuous_over_bucketed",
    "slot_bound",
    *(f"continuous_over_static_cv{cv}" for cv in ("0", "05", "1", "15", "2")),
    *(f"continuous_over_bucketed_cv{cv}" for cv in ("0", "05", "1", "15", "2")),
}


@pytest.fixture(scope="module")
def bench() -> BatchingBench:
    settings = BatchingSettings(
        max_requests=12,
        max_num_seqs=4,
        sweep_requests=16,
        sweep_prompt_tokens=32,
        sweep_output_tokens=24,
    )
    return BatchingBench(settings, lambda _line: None)


def test_every_key_is_there_for_every_trace_and_way(bench: BatchingBench) -> None:
    result = bench.run()

    assert set(result.results) == KEYS
    assert all(value > 0 for value in result.results.values())
    for name in TRACES:
        for arrivals in ("saturated", "recorded"):
            for way in ("static", "bucketed", "continuous"):
                assert len(result.series[f"{name}/{arrivals}/{way}/ttft_seconds_p50_p90_p99"]) == 3
    assert result.settings["seed"] == 1
    assert result.settings["kv_blocks"] == 26674


def test_the_more_output_lengths_differ_the_more_static_batching_loses(
    bench: BatchingBench,
) -> None:
    results = bench.run().results

    assert results["continuous_over_static_cv2"] > results["continuous_over_static_cv0"]
    assert results["continuous_over_static_cv2"] > 1.2


def test_ways_that_give_different_tokens_are_not_compared(
    bench: BatchingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = count()
    serve = bench._simulation.serve

    def serve_differently(way: str, trace: Sequence[TraceRequest], *, at_once: bool) -> Served:
        served = serve(way, trace, at_once=at_once)
        return replace(served, outputs_hash=next(hashes))

    monkeypatch.setattr(type(bench._simulation), "serve", staticmethod(serve_differently))

    with pytest.raises(BenchError, match="bucketed gives other tokens than static"):
        bench.run()


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_swept_lengths_have_their_mean_and_deviation(deviation: float) -> None:
    settings = BatchingSettings(sweep_requests=20_000)

    lengths = [one.output_tokens for one in swept_lengths(settings, deviation)]

    assert fmean(lengths) == pytest.approx(256, rel=0.05)
    assert pstdev(lengths) / fmean(lengths) == pytest.approx(deviation, rel=0.05)


def test_a_seed_always_draws_the_same_lengths() -> None:
    first, second, other = (
        swept_lengths(BatchingSettings(sweep_requests=50, seed=seed), 1.0) for seed in (1, 1, 2)
    )

    assert first == second
    assert first != other


@pytest.mark.parametrize(
    ("deviation", "suffix"), [(0.0, "_cv0"), (0.5, "_cv05"), (1.0, "_cv1"), (1.5, "_cv15")]
)
def test_a_deviation_is_written_without_a_point(deviation: float, suffix: str) -> None:
    assert cv_suffix(deviation) == suffix


@pytest.mark.parametrize("name", TRACES)
def test_a_thousand_requests_of_each_trace_are_shipped(name: str) -> None:
    trace = load_trace(name, None)

    assert len(trace) == 1000
    assert [one.at_seconds for one in trace] == sorted(one.at_seconds for one in trace)
    assert min(one.prompt_tokens for one in trace) >= 1
    assert min(one.output_tokens for one in trace) >= 1


def test_whole_windows_are_read_compressed_or_not(tmp_path: Path) -> None:
    text = "arrival_s,tenant,prompt_tokens,output_tokens\n1.5,,7,3\n"
    (tmp_path / "plain.csv").write_text(text)
    (tmp_path / "packed.csv.gz").write_bytes(gzip.compress(text.encode()))

    plain, packed = (load_trace(name, tmp_path) for name in ("plain", "packed"))

    assert plain == packed
    assert (packed[0].at_seconds, packed[0].prompt_tokens) == (1.5, 7)


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"azure2023_conv\.csv: No such file"):
        load_trace("azure2023_conv", tmp_path)


def test_a_plot_is_refused_before_anything_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda _name: None)
    told: list[str] = []

    with pytest.raises(BenchError, match="matplotlib"):
        run_batching(
            Console(quiet=True),
            settings=BatchingSettings(),
            progress=told.append,
            json_file=None,
            plot_directory=tmp_path,
        )

    assert told == []
