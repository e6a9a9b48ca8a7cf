import json
from pathlib import Path

import pytest
from rich.console import Console

from tidegate_cli.bench.errors import BenchError
from tidegate_cli.bench.scheduler import (
    SchedulerSettings,
    SteadyScheduler,
    policy_of,
    run_scheduler,
)


def test_every_key_is_measured_and_written(tmp_path: Path) -> None:
    settings = SchedulerSettings(
        running=8, many_running=16, waiting=60, tenants=5, steps=20, cancels=10, policy_rounds=2
    )

    run_scheduler(
        Console(quiet=True),
        settings=settings,
        progress=lambda _line: None,
        json_file=tmp_path / "result.json",
    )

    document = json.loads((tmp_path / "result.json").read_text())
    assert set(document["results"]) == {
        "plan_commit_us",
        "plan_commit_us_idle_queue",
        "waiting_ratio",
        "plan_commit_us_1000",
        "cancel_us",
        "policy_apply_ms",
    }
    assert document["results"]["plan_commit_us"] > 0
    assert len(document["series"]["plan_commit_us"]) == 20
    assert document["settings"]["waiting"] == 60
    assert document["settings"]["is_gc_enabled"]
    assert document["machine"]["load_average_1min"] >= 0


def test_everybody_decodes_and_all_others_wait() -> None:
    steady = SteadyScheduler(running=8, waiting=60, tenants=5)

    for _ in range(40):
        steady.step()

    stats = steady.scheduler.stats()
    assert (stats.running, stats.waiting) == (8, 60)
    assert sum(tenant.output_tokens for tenant in stats.tenants.values()) > 8 * 40


def test_a_timed_cancel_takes_the_request_out() -> None:
    steady = SteadyScheduler(running=4, waiting=10, tenants=2)

    assert steady.cancel_us(steady.waiting_ids[3]) > 0

    assert steady.scheduler.stats().waiting == 9


def test_a_timed_policy_is_in_force() -> None:
    steady = SteadyScheduler(running=4, waiting=0, tenants=2)

    assert steady.policy_us(policy_of(2, added_weight=5)) > 0

    assert steady.scheduler.revision == 2


def test_a_batch_that_does_not_decode_as_a_whole_is_not_measured() -> None:
    steady = SteadyScheduler(running=4, waiting=0, tenants=2)
    steady.scheduler.cancel("request-000001", 0.0)

    with pytest.raises(BenchError, match="3 rows instead of 4 decodes"):
        steady.step()
