"""Why a request waits, and for whom it was taken out: without the names of other tenants."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tidegate_devcluster.redis_server import RedisServer
from tidegate_engine.server.admin import create_admin_app
from tidegate_policies.rules import PreemptionMode, PreemptionRule, RateRule
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import (
    MODEL,
    RunningEngine,
    a_keyed_tenant,
    a_running_engine,
    waiting_requests,
)
from tidegate_testing.policies import a_snapshot

YIELDING = PreemptionRule(mode=PreemptionMode.RECOMPUTE, min_quantum_tokens=0)
TOKEN = "an-admin-token-of-the-test"


def ask(engine: RunningEngine, path: str) -> httpx.Response:
    """Call the admin API in the engine's event loop."""

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(create_admin_app(engine.service, token=TOKEN))
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            return await client.get(path, headers=headers)

    return asyncio.run_coroutine_threadsafe(call(), engine.event_loop).result(timeout=30)


def explained(engine: RunningEngine, name: str, query: str = "") -> dict[str, Any]:
    """Return what is known of the only request that the name means."""
    answer = ask(engine, f"/admin/requests/{name}{query}")
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()["requests"]
    return dict(found)


@pytest.fixture
def tiered() -> Iterator[RunningEngine]:
    """An engine of one place, where gold displaces batch."""
    policy = a_snapshot(
        a_keyed_tenant("batch", tier="low", preemption=YIELDING),
        a_keyed_tenant("gold", tier="high", policy="vip/gold"),
        tiers={"high": 10, "low": 0},
    )
    with a_running_engine(policy, max_num_seqs=1, step_seconds=0.002) as engine:
        yield engine


def test_who_was_taken_out_is_told_when_and_for_which_tier_but_not_for_whom(
    tiered: RunningEngine,
) -> None:
    with waiting_requests(tiered, ("batch", "night"), ("gold", "secret")):
        eventually(lambda: explained(tiered, "night")["preempted"], "the preemption")
        night, secret = explained(tiered, "night"), explained(tiered, "secret")
        text = ask(tiered, "/admin/requests/night").text
    (preemption,) = night["preempted"]
    assert preemption["cause"] == "displaced"
    assert (preemption["tenant"], preemption["request_id"]) == (None, None)
    assert preemption["tier"] == "high"
    assert "secret" not in text
    assert "gold" not in text
    assert (night["state"], night["position"], night["waits_for"]) == ("waiting", 1, "slot")
    assert night["queued_since"] < preemption["time"]
    assert [one["verdict"] for one in night["decisions"]][:2] == ["admitted", "preempted"]
    assert (secret["state"], secret["tier"], secret["waits_for"]) == ("running", "high", None)


def test_a_request_that_yielded_to_its_own_tenant_is_told_its_name() -> None:
    policy = a_snapshot(
        a_keyed_tenant("acme", tier="high", allowed_tiers=("low",), preemption=YIELDING),
        tiers={"high": 10, "low": 0},
    )
    with a_running_engine(policy, max_num_seqs=1, step_seconds=0.002) as engine:
        stream = engine.openai().completions.create(
            model=MODEL,
            prompt="Hello",
            max_tokens=2000,
            stream=True,
            extra_headers={"x-tidegate-tier": "low", "x-request-id": "patient"},
        )
        next(iter(stream))
        with waiting_requests(engine, ("acme", "urgent")):
            eventually(lambda: explained(engine, "patient")["preempted"], "the preemption")
            (preemption,) = explained(engine, "patient")["preempted"]
        stream.close()
    assert preemption["tenant"] == "acme"
    assert "-urgent-" in preemption["request_id"]


def test_a_waiting_request_is_told_its_place_and_its_predicted_first_token(
    tiered: RunningEngine,
) -> None:
    with waiting_requests(tiered, ("gold", "one"), ("gold", "two"), ("gold", "three")):
        three = explained(tiered, "three")
    assert (three["position"], three["state"]) == (2, "waiting")
    assert three["predicted_ttft_seconds"] >= three["first_token_in_seconds"] > 0


def test_what_a_request_waits_for_is_told(redis_server: RedisServer) -> None:
    policy = a_snapshot(
        a_keyed_tenant("gold"),
        a_keyed_tenant("capped", max_running=1),
        a_keyed_tenant("rated", rate=RateRule(requests_per_minute=1, burst_percent=100)),
    )
    with a_running_engine(
        policy, max_num_seqs=2, step_seconds=0.002, redis_url=redis_server.url
    ) as engine:
        with waiting_requests(engine, ("capped", "first"), ("capped", "second")):
            assert explained(engine, "second")["waits_for"] == "quota"
        with waiting_requests(engine, ("gold", "one"), ("gold", "two"), ("rated", "three")):
            assert explained(engine, "three")["waits_for"] == "slot"
            refused = engine.http("rated").post(
                "/v1/completions",
                json={"model": MODEL, "prompt": "Hello"},
                headers={"x-request-id": "four"},
            )
            assert refused.status_code == 429
            four = explained(engine, "four")
    assert (four["state"], four["waits_for"]) == ("refused", "rate")


def test_who_is_gone_is_told_by_what_was_decided(tiered: RunningEngine) -> None:
    done = tiered.openai("gold").completions.create(model=MODEL, prompt="Hello", max_tokens=1)
    refused = tiered.http("gold").post(
        "/v1/completions",
        json={"model": MODEL, "prompt": "Hello", "n": "one"},
        headers={"x-request-id": "wrong"},
    )
    assert refused.status_code == 400
    assert explained(tiered, done.id)["state"] == "finished"
    wrong = explained(tiered, "wrong")
    assert (wrong["state"], wrong["reason"]) == ("refused", "invalid_value")
    with waiting_requests(tiered, ("gold", "left")):
        pass
    eventually(lambda: explained(tiered, "left")["state"] == "cancelled", "the cancel")
    unknown = ask(tiered, "/admin/requests/unheard-of")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")


def test_a_namespace_sees_the_requests_of_its_own_tenants_alone(tiered: RunningEngine) -> None:
    with waiting_requests(tiered, ("batch", "night"), ("gold", "secret")):
        eventually(lambda: explained(tiered, "night")["preempted"], "the preemption")
        assert explained(tiered, "night", "?namespace=teams")["tenant"] == "batch"
        assert ask(tiered, "/admin/requests/secret?namespace=teams").status_code == 404
        seen = ask(tiered, "/admin/decisions?namespace=teams")
        everything = ask(tiered, "/admin/decisions")
    assert {one["tenant"] for one in seen.json()["data"]} == {"batch"}
    assert "secret" not in seen.text
    assert "gold" not in seen.text
    assert "gold" in {one["beneficiary_tenant"] for one in everything.json()["data"]}


def test_one_name_may_mean_several_requests_and_all_choices_of_each(tiered: RunningEngine) -> None:
    with waiting_requests(tiered, ("batch", "same"), ("batch", "same"), n=2):
        answer = ask(tiered, "/admin/requests/same").json()
        assert len(answer["requests"]) == 4
        one = answer["requests"][0]["id"]
        assert explained(tiered, one)["id"] == one
    wrong = ask(tiered, "/admin/requests/same?nmespace=teams")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "nmespace")
