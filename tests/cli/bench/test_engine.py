import base64
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tidegate_cli.bench.engine import EngineSettings, replay_bare, run_engine_bench
from tidegate_cli.bench.engine_bare import BareWork
from tidegate_cli.bench.engine_part import Part
from tidegate_cli.bench.engine_process import OneTenant
from tidegate_cli.bench.errors import BenchError
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.engines import a_running_engine, key_of

SMALL = EngineSettings(
    executor="simulated",
    threads=1,
    max_requests=6,
    max_output_tokens=6,
    rate=20.0,
    padded_requests=10,
    padded_longest=6,
    padded_slots=2,
)
POISSON_KEYS = {"poisson_ttft_p99_s", "poisson_itl_p99_ms"}
STATIC_KEYS = {"continuous_over_static", "padding_bound"}
BURST_CLIENT_KEYS = {"burst_output_tokens_per_s", "burst_ttft_p99_s", "burst_itl_p99_ms"}
BURST_KEYS = {
    *BURST_CLIENT_KEYS,
    "bound_output_tokens_per_s",
    "of_bound",
    "batch_size_mean",
    "queue_p99_s",
    "scheduler_fraction",
    "http_cpu_fraction",
    "burst_cpu_s",
    "burst_client_cpu_s",
    "foreign_cpus",
}
KEYS = {
    *BURST_KEYS,
    *POISSON_KEYS,
    *STATIC_KEYS,
    "rss_mb",
    *(f"peer_{key}" for key in BURST_CLIENT_KEYS | POISSON_KEYS),
}


def runs(name: str) -> set[str]:
    """Return the series that a run has."""
    return {
        f"{name}_{series}"
        for series in (
            "ttft_seconds",
            "ttft_seconds_p50_p90_p99",
            "itl_seconds_p50_p90_p99",
            "seconds_and_output_tokens",
        )
    }


async def test_an_engine_and_a_peer_are_measured_alike_and_every_key_is_written(
    tmp_path: Path,
) -> None:
    console = Console(record=True, width=150, quiet=True)
    with a_running_engine(step_seconds=0.01) as peer:
        url = peer.base_url.replace("://", f"://:{key_of('acme')}@")
        await run_engine_bench(
            console,
            settings=replace(SMALL, peers=(url,)),
            progress=lambda _line: None,
            json_file=tmp_path / "result.json",
        )

    document = json.loads((tmp_path / "result.json").read_text())
    assert set(document["results"]) == KEYS
    results = document["results"]
    assert 0 < results["of_bound"] <= 1.0
    assert results["continuous_over_static"] > 0
    assert results["padding_bound"] > 1.0
    assert 1 <= results["batch_size_mean"] <= 6
    assert results["rss_mb"] > 20
    assert len(document["series"]["burst_ttft_seconds"]) == 6
    assert len(document["series"]["peer_poisson_ttft_seconds"]) == 6
    assert document["series"]["padded_static_seconds_and_output_tokens"][1] > 10
    # The key of a peer is nobody's business.
    assert key_of("acme") not in json.dumps(document)
    assert key_of("acme") not in console.export_text()


@pytest.mark.parametrize(
    ("part", "keys", "series"),
    [
        (Part.BURST, BURST_KEYS, {"bare_step_seconds", *runs("burst")}),
        (Part.POISSON, POISSON_KEYS, runs("poisson")),
        (Part.STATIC, STATIC_KEYS, {*runs("padded_continuous"), *runs("padded_static")}),
    ],
)
async def test_a_part_is_measured_by_itself(
    tmp_path: Path, part: Part, keys: set[str], series: set[str]
) -> None:
    await run_engine_bench(
        Console(quiet=True),
        settings=replace(SMALL, parts=(part,)),
        progress=lambda _line: None,
        json_file=tmp_path / "result.json",
    )

    document = json.loads((tmp_path / "result.json").read_text())
    assert document["settings"]["parts"] == [part]
    assert document["results"].keys() == keys | {"rss_mb"}
    assert document["series"].keys() == series


async def test_prompts_have_a_target_and_take_turns_while_arrivals_are_poisson(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delivered: list[PolicySnapshot] = []
    deliver = OneTenant.deliver

    def note(self: OneTenant, policy: PolicySnapshot) -> int:
        delivered.append(policy)
        return deliver(self, policy)

    monkeypatch.setattr(OneTenant, "deliver", note)
    await run_engine_bench(
        Console(quiet=True),
        settings=replace(SMALL, parts=(Part.POISSON,)),
        progress=lambda _line: None,
        json_file=None,
    )

    at_once, poisson = delivered
    assert at_once.batching.max_partial_prefills is None
    assert at_once.tenants[0].service.itl_seconds is None
    assert poisson.batching.max_partial_prefills == SMALL.poisson_partial_prefills
    assert poisson.tenants[0].service.itl_seconds == SMALL.poisson_itl_seconds


async def test_steps_are_replayed_without_an_engine() -> None:
    work = BareWork(
        warm_up=[([1, 2, 3], 1)],
        timed=[([1, 2, 3], 4), ([4, 5, 6], 2)],
        max_num_seqs=2,
        temperature=0.0,
        profiles=False,
    )

    steps = await replay_bare(work, environment(TIDEGATE_SIMULATED_STEP_SECONDS="0.02"))

    assert steps.output_tokens == 6
    assert len(steps.step_seconds) == 4
    assert sum(steps.step_seconds) >= 4 * 0.02
    assert steps.output_tokens_per_s == pytest.approx(6 / sum(steps.step_seconds))


async def test_a_replay_that_fails_says_why() -> None:
    work = BareWork(warm_up=[], timed=[], max_num_seqs=1, temperature=0.0, profiles=False)

    with pytest.raises(BenchError, match="TIDEGATE_KV_BLOCKS"):
        await replay_bare(work, environment(TIDEGATE_KV_BLOCKS="none"))


def test_quick_settings_keep_what_is_measured_and_shorten_the_rest() -> None:
    quick = EngineSettings(dtype="bfloat16", peers=("http://peer",)).quick()

    assert (quick.dtype, quick.peers) == ("bfloat16", ("http://peer",))
    assert quick.max_requests < 64
    assert quick.padded_requests < 512


def environment(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "TIDEGATE_POOL": "bench/engine",
        "TIDEGATE_REDIS_URL": "redis://127.0.0.1:1",
        "TIDEGATE_VERIFY_KEY": base64.b64encode(bytes(32)).decode(),
        "TIDEGATE_EXECUTOR": "simulated",
        **more,
    }
