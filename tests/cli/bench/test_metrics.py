import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tidegate_cli.bench.metrics import MetricsSettings, run_metrics


async def test_scrapes_of_an_engine_whose_tenants_are_all_active_are_timed(tmp_path: Path) -> None:
    console = Console(record=True, width=150, quiet=True)
    small = MetricsSettings(tenants=5, callers=3, scrapes=3, pause_seconds=0.3, output_tokens=4)
    few, more = tmp_path / "few.json", tmp_path / "more.json"
    for settings, file in ((small, few), (replace(small, tenants=6), more)):
        await run_metrics(console, settings=settings, progress=lambda _line: None, json_file=file)
    results = json.loads(few.read_text())["results"]
    assert set(results) == {
        "scrape_p50_ms",
        "scrape_max_ms",
        "text_mb",
        "text_series",
        "itl_p99_ms",
        "itl_p99_ms_unscraped",
    }
    assert all(results.values())
    assert len(json.loads(few.read_text())["series"]["scrape_seconds"]) == 3
    # Each tenant has its four histograms of 8 buckets with sum and count, and its totals.
    added = json.loads(more.read_text())["results"]["text_series"] - results["text_series"]
    assert added > 4 * 10
