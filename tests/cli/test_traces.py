import csv
import itertools
from pathlib import Path

import pytest

from tidegate_cli.errors import TraceError
from tidegate_cli.traces import (
    TraceRequest,
    arena_trace,
    label_clients,
    read_trace,
    scale_gaps,
    scale_lengths,
    service_per_second,
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
    scaled = scale_lengths(
        [request(prompt=100, output=400), request(prompt=1, output=1)], 0.25, {"a": "gold"}
    )

    assert [(r.tenant, r.prompt_tokens, r.output_tokens) for r in scaled] == [
        ("gold", 25, 100),
        ("gold", 1, 1),
    ]


def test_a_trace_asks_for_service_at_a_rate() -> None:
    # Twice 10 prompt tokens and 20 output tokens at double cost, in four seconds.
    assert service_per_second([request(at=1), request(at=5)]) == pytest.approx(25)


def test_requests_that_all_arrive_at_once_have_no_rate() -> None:
    with pytest.raises(TraceError, match="no rate"):
        service_per_second([request(at=1), request(at=1)])


def test_scaled_gaps_keep_their_proportions_and_the_trace_starts_again_at_its_end() -> None:
    trace = [request(at=10), request(at=11), request(at=14)]

    times = [r.at_seconds for r in itertools.islice(scale_gaps(trace, 2), 6)]

    assert times == [0, 2, 8, 12, 14, 20]


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
