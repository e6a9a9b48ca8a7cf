import csv
import itertools
from pathlib import Path

import pytest

from tidegate_cli.errors import TraceError
from tidegate_cli.traces import (
    TraceRequest,
    arena_trace,
    fit_window,
    label_clients,
    loop_window,
    read_trace,
    relabel,
    scale_lengths,
    summarize_lengths,
)


def request(at: float = 0.0, tenant: str = "a", prompt: int = 10, output: int = 20) -> TraceRequest:
    return TraceRequest(at_seconds=at, tenant=tenant, prompt_tokens=prompt, output_tokens=output)


def write_csv(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_the_shipped_window_is_long_tailed_and_has_many_clients() -> None:
    trace = arena_trace()

    lengths = summarize_lengths(trace)

    assert lengths.count == 713
    assert (lengths.prompt_p50, lengths.output_p50) == (43, 172)
    assert lengths.prompt_p95 > 10 * lengths.prompt_p50
    assert len({r.tenant for r in trace}) == 22
    assert [r.at_seconds for r in trace] == sorted(r.at_seconds for r in trace)


def test_the_shipped_window_comes_with_its_licence_and_attribution() -> None:
    import tidegate_cli

    folder = Path(tidegate_cli.__file__).parent / "recorded"

    assert "Sheng et al." in (folder / "README.md").read_text()
    assert "Apache License" in (folder / "LICENSES" / "Apache-2.0.txt").read_text()


def test_clients_are_shared_out_so_that_the_service_asked_for_splits_as_wanted() -> None:
    trace = arena_trace()

    labels = label_clients(trace, {"gold": 1, "silver": 2, "batch": 2})

    total = sum(r.service for r in trace)
    for tenant, wanted in {"gold": 0.2, "silver": 0.4, "batch": 0.4}.items():
        part = sum(r.service for r in trace if labels[r.tenant] == tenant) / total
        assert part == pytest.approx(wanted, abs=0.03)


def test_fewer_clients_than_tenants_are_refused() -> None:
    with pytest.raises(TraceError, match="1 clients can't be 2 tenants"):
        label_clients([request(tenant="a")], {"gold": 1, "silver": 1})


def test_one_factor_scales_all_lengths_and_leaves_at_least_one_token() -> None:
    scaled = scale_lengths([request(prompt=100, output=400), request(prompt=1, output=1)], 0.25)

    assert [(r.prompt_tokens, r.output_tokens) for r in scaled] == [(25, 100), (1, 1)]


def test_clients_become_tenants_and_nothing_else_changes() -> None:
    assert relabel([request(at=3, tenant="m1")], {"m1": "gold"}) == (request(at=3, tenant="gold"),)


def test_a_window_asks_for_the_wanted_service_in_the_wanted_time() -> None:
    # Each asks for 50 cost units: 10 prompt tokens, and 20 output tokens at double cost.
    trace = [request(at=at) for at in (10, 11, 14, 16, 30)]

    window = fit_window(trace, service=120, seconds=60)

    # Six seconds of trace, until the fourth request comes, are sixty.
    assert [r.at_seconds for r in window] == [0, 10, 40]


def test_a_trace_that_asks_for_too_little_starts_again_after_a_mean_gap() -> None:
    window = fit_window([request(at=5), request(at=7)], service=200, seconds=16)

    assert [r.at_seconds for r in window] == [0, 4, 8, 12]


def test_requests_that_all_arrive_at_once_can_not_be_stretched() -> None:
    with pytest.raises(TraceError, match="no gaps"):
        fit_window([request(at=1), request(at=1)], service=10, seconds=1)


def test_a_loop_begins_with_the_end_of_the_window_and_repeats_it() -> None:
    window = [request(at=1, tenant="a"), request(at=8, tenant="b")]

    looped = itertools.islice(loop_window(window, seconds=10, lead_in_seconds=4), 5)

    assert [(r.at_seconds, r.tenant) for r in looped] == [
        (2, "b"),
        (5, "a"),
        (12, "b"),
        (15, "a"),
        (22, "b"),
    ]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"gone\.csv: No such file"):
        read_trace(tmp_path / "gone.csv")


def test_a_missing_column_is_named_with_its_line(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", {"arrival_s": "0", "tenant": "a", "prompt_tokens": "1"})

    with pytest.raises(TraceError, match=r"t\.csv: line 2: no column 'output_tokens'"):
        read_trace(path)


def test_a_length_that_is_no_number_is_named_with_its_line(tmp_path: Path) -> None:
    good = {"arrival_s": "0", "tenant": "a", "prompt_tokens": "1", "output_tokens": "1"}
    path = write_csv(tmp_path / "t.csv", good, {**good, "prompt_tokens": "many"})

    with pytest.raises(TraceError, match=r"line 3: .*'many'"):
        read_trace(path)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,tenant,prompt_tokens,output_tokens\n")

    with pytest.raises(TraceError, match="holds no request"):
        read_trace(path)
