"""What a tenant sees with its key: its own numbers and requests, and nobody else's."""

import pytest

from tidegate_policies.rules import (
    ServiceRule,
    StopPolicy,
    UnknownAction,
    UnknownTenantsRule,
)
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.engines import (
    MODEL,
    RunningEngine,
    a_keyed_tenant,
    a_running_engine,
    waiting_requests,
)
from tidegate_testing.policies import a_snapshot

PATHS = ("/v1/tidegate/usage", "/v1/tidegate/queue")


def test_each_tenant_gets_its_own_numbers() -> None:
    policy = a_snapshot(
        a_keyed_tenant("acme", service=ServiceRule(ttft_seconds=5.0, itl_seconds=1.0)),
        a_keyed_tenant("zeta", weight=300),
    )
    with a_running_engine(policy) as engine:
        for _ in range(3):
            engine.openai("acme").completions.create(model=MODEL, prompt="Hello", max_tokens=4)
        engine.openai("zeta").completions.create(model=MODEL, prompt="Hi", max_tokens=2)
        refused = engine.http("acme").post(
            "/v1/completions", json={"model": MODEL, "prompt": "Hello", "n": "one"}
        )
        assert refused.status_code == 400
        acme = engine.http("acme").get("/v1/tidegate/usage").json()
        zeta = engine.http("zeta").get("/v1/tidegate/usage").json()
    assert (acme["tenant"], acme["tier"], zeta["weight"]) == ("acme", "standard", 300)
    assert (acme["requests"]["finished"], zeta["requests"]["finished"]) == (3, 1)
    assert (acme["requests"]["shed"], zeta["requests"]["shed"]) == (1, 0)
    assert (acme["tokens"]["output"], zeta["tokens"]["output"]) == (12, 2)
    assert acme["service"]["charged"] == acme["tokens"]["prompt"] + 2 * acme["tokens"]["output"]
    shares = acme["service"]["share_percent"] + zeta["service"]["share_percent"]
    assert shares == pytest.approx(100, abs=0.02)
    assert acme["attainment"]["requests"] == 3
    assert acme["attainment"]["percent"] == 100
    assert acme["attainment"]["ttft"]["target_seconds"] == 5
    assert zeta["attainment"] is None


def test_the_queue_holds_ones_own_requests_in_order_with_their_expected_waits() -> None:
    policy = a_snapshot(a_keyed_tenant("acme"), a_keyed_tenant("zeta"))
    with a_running_engine(policy, max_num_seqs=1, step_seconds=0.002) as engine:
        named = [("acme", "one"), ("zeta", "secret"), ("acme", "two"), ("acme", "three")]
        with waiting_requests(engine, *named):
            answer = engine.http("acme").get("/v1/tidegate/queue")
            usage = engine.http("acme").get("/v1/tidegate/usage").json()
        queue = answer.json()
    assert "secret" not in answer.text
    assert "zeta" not in answer.text
    assert queue["length"] == len(queue["data"]) == 2
    assert [one["position"] for one in queue["data"]] == [1, 2]
    assert ["-two-" in one["id"] for one in queue["data"]] == [True, False]
    assert {one["state"] for one in queue["data"]} == {"waiting"}
    waits = [one["first_token_in_seconds"] for one in queue["data"]]
    assert 0 < waits[0] < waits[1]
    assert all(
        one["predicted_ttft_seconds"] >= one["first_token_in_seconds"] for one in queue["data"]
    )
    assert (usage["requests"]["running"], usage["requests"]["waiting"]) == (1, 2)
    assert usage["kv"]["blocks"] > 0
    assert usage["kv"]["percent"] == pytest.approx(100 * usage["kv"]["blocks"] / 4096, abs=0.01)


def test_a_long_queue_is_told_by_its_length() -> None:
    policy = a_snapshot(a_keyed_tenant("acme", stop=StopPolicy.HOLD))
    with a_running_engine(policy) as engine, waiting_requests(engine, ("acme", "many"), n=128):
        queue = engine.http().get("/v1/tidegate/queue").json()
    assert (queue["length"], len(queue["data"])) == (128, 100)
    assert {one["waits_for"] for one in queue["data"]} == {"hold"}


@pytest.mark.parametrize("path", PATHS)
def test_a_key_of_nobody_is_refused_also_where_strangers_are_served(path: str) -> None:
    admitting = UnknownTenantsRule(action=UnknownAction.ADMIT, tier="standard")
    for policy in (a_policy(None), a_policy(admitting)):
        with a_running_engine(policy) as engine:
            for headers in ({}, {"authorization": "Bearer sk-of-nobody"}):
                refused = engine.http().get(path, headers={"authorization": "", **headers})
                assert refused.status_code == 401
                assert refused.json()["error"]["code"] == "invalid_api_key"


def a_policy(unknown: UnknownTenantsRule | None) -> PolicySnapshot:
    return a_snapshot(a_keyed_tenant("acme"), unknown_tenants=unknown)


@pytest.mark.parametrize("path", PATHS)
def test_a_tenant_that_is_named_without_the_gateways_token_is_refused(
    engine: RunningEngine, path: str
) -> None:
    refused = engine.http("acme").get(path, headers={"x-tidegate-tenant": "zeta"})
    assert refused.status_code == 403
