import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tidegate_cli.bench.errors import BenchError
from tidegate_cli.bench.preemption import PreemptionSettings, run_preemption
from tidegate_testing.models import one_torch_thread

__all__ = ["one_torch_thread"]

pytestmark = pytest.mark.model

TINY = PreemptionSettings(
    victims=2,
    victim_prompt_tokens=24,
    victim_output_tokens=40,
    waves=1,
    wave_requests=2,
    wave_prompt_tokens=60,
    wave_output_tokens=3,
    context_tokens=48,
    swaps=3,
    resumes=1,
)


def test_every_key_is_measured_and_written(tmp_path: Path) -> None:
    console = Console(record=True, width=200, quiet=True)
    file = tmp_path / "result.json"

    run_preemption(console, settings=TINY, progress=lambda _line: None, json_file=file)

    document = json.loads(file.read_text())
    results, series = document["results"], document["series"]
    assert set(results) == {
        "recomputed_fraction_swap",
        "recomputed_fraction_recompute",
        "swap_over_memcpy",
        "resume_swap_over_recompute",
        "outputs_identical",
    }
    assert results["outputs_identical"] == 1
    assert results["recomputed_fraction_swap"] < results["recomputed_fraction_recompute"] < 1
    assert results["swap_over_memcpy"] > 0
    assert results["resume_swap_over_recompute"] > 0
    assert sum(series["preemptions_Swap"]) > 0
    assert sum(series["preemptions_Recompute"]) > 0
    # Three blocks of 16 tokens of 30 layers with keys and values of 3 heads of 64 floats.
    assert series["swap_bytes"] == [3 * 16 * 30 * 2 * 3 * 64 * 4]
    assert 0 < series["compared_tokens"][0] <= series["output_tokens"][0] == 2 * (2 * 40 + 2 * 3)
    assert document["settings"]["context_tokens"] == 48


def test_a_load_that_preempts_nobody_is_not_measured() -> None:
    with pytest.raises(BenchError, match="nobody was preempted by Swap"):
        run_preemption(
            Console(quiet=True),
            settings=replace(TINY, waves=0),
            progress=lambda _line: None,
            json_file=None,
        )
