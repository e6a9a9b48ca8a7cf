"""The admin API: what is in force, why things happened, and an end of taking work."""

import asyncio
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import openai
import pytest

from tidegate_engine.server.admin import DEFAULT_DECISIONS, create_admin_app
from tidegate_policies.rules import BatchingRule, PreemptionMode, PreemptionRule, StopPolicy
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import (
    MODEL,
    RunningEngine,
    a_keyed_tenant,
    a_running_engine,
    key_of,
    waiting_requests,
)
from tidegate_testing.policies import a_snapshot

TOKEN = "an-admin-token-of-the-test"
AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}


def ask(
    engine: RunningEngine,
    path: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] = AUTHORIZED,
) -> httpx.Response:
    """Call the admin API in the engine's event loop."""

    async def call() -> httpx.Response:
        app = create_admin_app(engine.service, token=TOKEN)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run_coroutine_threadsafe(call(), engine.event_loop).result(timeout=30)


def decisions(engine: RunningEngine, query: str = "") -> list[dict[str, Any]]:
    answer = ask(engine, f"/admin/decisions{query}")
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}"]
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/admin/policy"),
        ("POST", "/admin/drain"),
        ("GET", "/admin/decisions"),
        ("GET", "/admin/requests/x"),
    ],
)
def test_nobody_comes_in_without_the_token(
    engine: RunningEngine, method: str, path: str, header: str | None
) -> None:
    headers = {} if header is None else {"authorization": header}
    refused = ask(engine, path, method=method, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_admin_token")
    assert refused.headers["x-tidegate-reason"] == "invalid_admin_token"
    assert not engine.service.generations.is_draining


def test_the_token_is_compared_in_constant_time(
    engine: RunningEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(engine, "/admin/policy").status_code == 200
    monkeypatch.setattr(hmac, "compare_digest", lambda *_: False)
    assert ask(engine, "/admin/policy").status_code == 401


def test_two_tokens_open_nothing(engine: RunningEngine) -> None:
    twice = httpx.Headers([*AUTHORIZED.items(), *AUTHORIZED.items()])
    refused = ask(engine, "/admin/policy", headers=twice)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "authorization")


def test_a_tenants_key_opens_nothing(engine: RunningEngine) -> None:
    headers = {"authorization": f"Bearer {key_of('acme')}"}
    assert ask(engine, "/admin/policy", headers=headers).status_code == 401


def test_what_the_admin_api_does_not_have_is_an_error_object(engine: RunningEngine) -> None:
    assert ask(engine, "/v1/models").json()["error"]["code"] == "unknown_path"
    assert ask(engine, "/admin/drain").json()["error"]["code"] == "method_not_allowed"
    assert engine.http().get("/admin/policy").json()["error"]["code"] == "unknown_path"


def test_before_the_first_policy_there_is_none() -> None:
    with a_running_engine(has_policy=False) as engine:
        answer = ask(engine, "/admin/policy").json()
    assert (answer["revision"], answer["since"], answer["snapshot"]) == (0, None, None)


def test_the_policy_in_force_is_told_without_its_keys() -> None:
    before = datetime.now(UTC)
    policy = a_snapshot(
        a_keyed_tenant("acme", weight=300, kv_nominal_percent=20),
        a_keyed_tenant("zeta", stop=StopPolicy.HOLD),
        batching=BatchingRule(max_num_seqs=7),
    )
    with a_running_engine(policy) as engine:
        engine.apply(policy)
        raw = ask(engine, "/admin/policy")
        answer = raw.json()
    assert (answer["revision"], answer["digest"], answer["step"]) == (2, policy.digest, 1)
    since = datetime.fromisoformat(answer["since"])
    assert before - timedelta(seconds=1) < since < datetime.now(UTC) + timedelta(seconds=1)
    assert answer["snapshot"]["batching"]["max_num_seqs"] == 7
    assert [(t["tenant"], t["weight"], t["stop"]) for t in answer["snapshot"]["tenants"]] == [
        ("acme", 300, "None"),
        ("zeta", 100, "Hold"),
    ]
    for rule in policy.tenants:
        assert rule.key_digests[0] not in raw.text


def test_a_drain_lets_what_runs_end_and_refuses_the_rest_for_good() -> None:
    with a_running_engine(step_seconds=0.001) as engine:
        completions = engine.openai().completions
        stream = completions.create(model=MODEL, prompt="Hello", max_tokens=300, stream=True)
        next(iter(stream))
        begun = ask(engine, "/admin/drain", method="POST").json()
        assert begun == {"draining": True, "running": 1, "drained": False}
        assert engine.http().get("/readyz").json()["lacking"] == ["not draining"]
        with pytest.raises(openai.InternalServerError) as caught:
            completions.create(model=MODEL, prompt="Hello")
        assert (caught.value.status_code, caught.value.code) == (503, "engine_draining")
        assert list(stream)[-1].choices[0].finish_reason == "length"

        def drained() -> bool:
            return bool(ask(engine, "/admin/drain", method="POST").json()["drained"])

        eventually(drained, "the end of the drain")
        assert engine.http().get("/healthz").status_code == 200
        assert engine.http().get("/readyz").status_code == 503


def test_a_requests_life_can_be_read_in_order() -> None:
    yields = PreemptionRule(mode=PreemptionMode.RECOMPUTE, min_quantum_tokens=0)
    policy = a_snapshot(
        a_keyed_tenant("batch", tier="low", preemption=yields),
        a_keyed_tenant("gold", tier="high"),
        tiers={"high": 10, "low": 0},
    )
    with a_running_engine(policy, max_num_seqs=1, step_seconds=0.001) as engine:
        batch = engine.openai("batch").completions.create(
            model=MODEL,
            prompt="Hello",
            max_tokens=2000,
            stream=True,
            extra_headers={"x-request-id": "night-run"},
        )
        first = next(iter(batch))
        gold = engine.openai("gold").completions.create(model=MODEL, prompt="Hi", max_tokens=2)
        eventually(
            lambda: any(d["verdict"] == "resumed" for d in decisions(engine)), "batch is resumed"
        )
        batch.close()
        eventually(
            lambda: any(d["verdict"] == "cancelled" for d in decisions(engine)), "the cancel"
        )
        everything = decisions(engine)
        of_batch = decisions(engine, f"?request_id={first.id}")
        assert decisions(engine, "?request_id=night-run") == of_batch
        assert decisions(engine, f"?request_id={first.id}.0") == of_batch
        of_gold = decisions(engine, "?tenant=gold")
        assert decisions(engine, "?limit=1") == everything[-1:]
        assert decisions(engine, "?request_id=unheard-of") == []
    verdicts = [d["verdict"] for d in of_batch]
    assert verdicts[:2] == ["admitted", "preempted"]
    assert verdicts[-2:] == ["resumed", "cancelled"]
    preempted = of_batch[1]
    assert (preempted["reason"], preempted["beneficiary"]) == ("displaced", f"{gold.id}.0")
    assert [(d["request_id"], d["verdict"]) for d in of_gold] == [(f"{gold.id}.0", "admitted")]
    assert {d["revision"] for d in everything} == {1}
    assert {d["watermark"] for d in everything} == {"green"}
    times = [datetime.fromisoformat(d["time"]) for d in everything]
    assert times == sorted(times)


def test_refusals_are_among_the_decisions_and_counted() -> None:
    policy = a_snapshot(
        a_keyed_tenant("acme", stop=StopPolicy.HOLD, max_queued=1),
        a_keyed_tenant("zeta", stop=StopPolicy.DRAIN),
    )
    with a_running_engine(policy) as engine, waiting_requests(engine, ("acme", "first")):
        bodies = {"model": MODEL, "prompt": "Hello"}
        full = engine.http("acme").post("/v1/completions", json=bodies)
        stopped = engine.http("zeta").post("/v1/completions", json=bodies)
        wrong = engine.http("acme").post("/v1/completions", json={**bodies, "n": "one"})
        assert (full.status_code, stopped.status_code, wrong.status_code) == (429, 403, 400)
        eventually(lambda: len(decisions(engine)) == 3, "all refusals")
        found = decisions(engine)
        assert [(d["tenant"], d["verdict"], d["reason"]) for d in found] == [
            ("acme", "refused", "tenant_queue_full"),
            ("zeta", "refused", "tenant_stopped"),
            ("acme", "refused", "invalid_value"),
        ]
        assert found[0]["request_id"] == full.headers["x-request-id"] + ".0"
        assert found[1]["request_id"] == stopped.headers["x-request-id"]
        for tenant, reason in (("acme", "tenant_queue_full"), ("zeta", "tenant_stopped")):
            assert engine.sample("tidegate_shed_total", tenant=tenant, reason=reason) == 1


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?limit=0", "limit"),
        ("?limit=many", "limit"),
        ("?limit=100000", "limit"),
        ("?teanant=acme", "teanant"),
    ],
)
def test_a_wrong_query_is_refused_by_name(engine: RunningEngine, query: str, param: str) -> None:
    refused = ask(engine, f"/admin/decisions{query}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_an_answer_has_a_hundred_decisions_unless_more_are_wanted() -> None:
    with a_running_engine() as engine:
        completions = engine.openai().completions
        for _ in range(2):
            completions.create(model=MODEL, prompt="Hello", max_tokens=1, n=60)
        eventually(lambda: len(decisions(engine, "?limit=1000")) >= 120, "all decisions")
        assert len(decisions(engine)) == DEFAULT_DECISIONS
