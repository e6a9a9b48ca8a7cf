import asyncio
import json
from pathlib import Path

import pytest
from rich.console import Console

from tidegate_cli.bench.propagation import PropagationSettings, run_propagation
from tidegate_cli.bench.propagation_crowd import InForce
from tidegate_cli.bench.propagation_engines import WeightsInForce
from tidegate_cli.bench.propagation_part import Part
from tidegate_cli.errors import NotReadyError
from tidegate_engine.policy_board import PolicyInForce
from tidegate_policies.rules import TenantRule, TierRule
from tidegate_policies.snapshot import PolicySnapshot

KEYS = {
    "p50_ms",
    "p99_ms",
    "programmed_p50_ms",
    "programmed_p99_ms",
    "burst_p99_ms",
    "compile_ms",
    "compile_from_scratch_ms",
    "objects",
    "operator_rss_mb",
    "idle_writes_per_min",
    "idle_cpu_percent",
    "restart_s",
}


@pytest.mark.cluster
async def test_a_change_is_timed_until_every_engine_obeys_it_and_rest_is_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is on this machine is reached past any proxy.
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    settings = PropagationSettings(policies=20, engines=4, changes=5, idle_seconds=3.0)
    told: list[str] = []

    await run_propagation(
        Console(quiet=True),
        settings=settings,
        progress=told.append,
        json_file=tmp_path / "figures.json",
    )

    document = json.loads((tmp_path / "figures.json").read_text())
    results, series = document["results"], document["series"]
    assert results.keys() == KEYS
    assert len(series["burst_ms"]) == 20
    in_force, programmed = series["apply_to_in_force_ms"], series["apply_to_programmed_ms"]
    # The operator waits for 50 ms of quiet, and hears of it after the engines obey.
    assert len(in_force) == 5
    assert all(50 <= one < other for one, other in zip(in_force, programmed, strict=True))
    assert results["idle_writes_per_min"] == 0
    assert results["compile_ms"] > 0
    assert results["restart_s"] > 0
    assert "starting the operator anew" in told


@pytest.mark.cluster
async def test_a_part_is_measured_by_itself(tmp_path: Path) -> None:
    settings = PropagationSettings(policies=4, engines=2, parts=(Part.BURST,))

    await run_propagation(
        Console(quiet=True),
        settings=settings,
        progress=lambda _: None,
        json_file=tmp_path / "figures.json",
    )

    document = json.loads((tmp_path / "figures.json").read_text())
    always = {"objects", "operator_rss_mb", "compile_from_scratch_ms"}
    assert document["results"].keys() == always | {"burst_p99_ms"}
    assert document["series"].keys() == {"burst_ms"}
    assert document["results"]["objects"] == 2 * 4 + 2 + 3


def test_quick_is_smaller_in_everything() -> None:
    quick, full = PropagationSettings().quick(), PropagationSettings()

    assert quick.policies < full.policies
    assert quick.engines < full.engines
    assert quick.changes < full.changes
    assert quick.idle_seconds < full.idle_seconds


def test_weights_are_told_once_the_last_engine_of_the_process_obeys_them() -> None:
    told: list[tuple[float, dict[str, int]]] = []
    weights = WeightsInForce(2, lambda at, news: told.append((at, dict(news))))

    weights.note(0, in_force(1, at=1.0, one=100, two=100))
    assert told == []
    weights.note(1, in_force(1, at=2.0, one=100, two=100))
    weights.note(0, in_force(2, at=3.0, one=101, two=100))
    weights.note(0, in_force(3, at=4.0, one=101, two=102))
    # This one has never seen revision 2 by itself.
    weights.note(1, in_force(3, at=5.0, one=101, two=102))

    assert told == [(2.0, {"one": 100, "two": 100}), (5.0, {"one": 101, "two": 102})]


async def test_a_weight_is_in_force_when_the_last_process_says_so() -> None:
    book = InForce(num_processes=2)
    waiting = asyncio.create_task(book.when("one", 101, limit_seconds=10))

    book.note(0, 1.0, {"one": 100})
    book.note(1, 1.5, {"one": 100})
    book.note(0, 2.0, {"one": 101})
    await asyncio.sleep(0)
    assert not waiting.done()
    # Overtaken by a later weight there.
    book.note(1, 3.0, {"one": 102})
    book.note(0, 4.0, {"one": 102})

    assert await waiting == 3.0


async def test_a_weight_that_never_comes_is_named() -> None:
    book = InForce(num_processes=1)
    book.note(0, 1.0, {"one": 100})

    with pytest.raises(NotReadyError, match="weight 101 of tenant one in every engine"):
        await book.when("one", 101, limit_seconds=0.01)


def in_force(revision: int, *, at: float, **weights: int) -> PolicyInForce:
    snapshot = PolicySnapshot.of(
        "bench/chat",
        tiers=[TierRule(name="standard", value=0)],
        tenants=[
            TenantRule(tenant=name, policy=f"bench/{name}", tier="standard", weight=weight)
            for name, weight in weights.items()
        ],
    )
    return PolicyInForce(
        snapshot=snapshot, revision=revision, digest=snapshot.digest, step=1, at=at
    )
