import json
from pathlib import Path

from tidegate_cli.bench.result import BenchResult


def test_a_result_is_written_with_the_machine_and_versions_it_depends_on(tmp_path: Path) -> None:
    result = BenchResult(
        bench="propagation",
        settings={"seed": 1},
        results={"p50_ms": 12.5},
        series={"apply_to_programmed_ms": (12.0, 13.0)},
    )
    path = tmp_path / "result.json"

    result.write(path)

    document = json.loads(path.read_text())
    assert list(document) == ["bench", "machine", "settings", "results", "series"]
    assert document["results"] == {"p50_ms": 12.5}
    assert document["series"] == {"apply_to_programmed_ms": [12.0, 13.0]}
    assert document["machine"]["cpus"] >= 1
    assert document["machine"]["versions"]["kopf"]
