"""Requests that ask for a tier by header: never a higher one, and really served in a lower one."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tidegate_policies.rules import UNKNOWN_TENANT, UnknownAction, UnknownTenantsRule
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import MODEL, RunningEngine, a_keyed_tenant, a_running_engine
from tidegate_testing.policies import a_snapshot
from tidegate_testing.raw_requests import a_raw_request

TIERS = {"gold": 10, "silver": 5, "bronze": -5}
POLICY = a_snapshot(
    a_keyed_tenant("acme", tier="silver", allowed_tiers=("bronze",)),
    a_keyed_tenant("zeta", tier="bronze"),
    tiers=TIERS,
    unknown_tenants=UnknownTenantsRule(action=UnknownAction.ADMIT, tier="bronze"),
)


def ask(
    engine: RunningEngine, tier: str | None, tenant: str = "acme", **headers: str
) -> httpx.Response:
    given = [] if tier is None else [(b"x-tidegate-tier", tier.encode())]
    return engine.http(tenant).post(
        "/v1/completions",
        json={"model": MODEL, "prompt": "Hello", "max_tokens": 1},
        headers=[*given, *[(name.encode(), value.encode()) for name, value in headers.items()]],
    )


def test_a_tenants_own_tier_and_its_allowed_ones_may_be_asked_for() -> None:
    with a_running_engine(POLICY) as engine:
        assert [ask(engine, tier).status_code for tier in ("silver", "bronze", None)] == [200] * 3
        assert ask(engine, "bronze", tenant="nobody").status_code == 200


@pytest.mark.parametrize("tier", ["gold", "", "none", "BRONZE", "é", "b" * 20_000])
def test_any_other_is_refused_naming_the_header_and_what_is_allowed(tier: str) -> None:
    with a_running_engine(POLICY) as engine:
        refused = ask(engine, tier, **{"x-request-id": "mine"})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (403, "tier_not_allowed")
        assert refused.headers["x-tidegate-reason"] == "tier_not_allowed"
        assert error["param"] == "x-tidegate-tier"
        assert "'silver', 'bronze'" in error["message"]
        assert len(error["message"]) < 200
        [decision] = engine.service.decisions.newest(1, request_id="mine")
        assert (decision.verdict, decision.reason) == ("refused", "tier_not_allowed")
        assert engine.sample("tidegate_shed_total", tenant="acme", reason="tier_not_allowed") == 1


def test_strangers_have_one_tier() -> None:
    with a_running_engine(POLICY) as engine:
        refused = ask(engine, "silver", tenant="nobody")
        assert refused.json()["error"]["code"] == "tier_not_allowed"
        counted = {"tenant": UNKNOWN_TENANT, "reason": "tier_not_allowed"}
        assert engine.sample("tidegate_shed_total", **counted) == 1


def test_a_request_in_a_lower_tier_waits_for_those_of_its_own_tenant() -> None:
    done: list[str | None] = []

    def run(engine: RunningEngine, tier: str | None) -> None:
        assert ask(engine, tier).status_code == 200
        done.append(tier)

    with (
        a_running_engine(POLICY, step_seconds=0.001, max_num_seqs=1) as engine,
        ThreadPoolExecutor() as clients,
    ):
        with a_raw_request(engine.port):
            eventually(lambda: engine.stats().scheduler.running == 1, "a running request")
            asked = []
            for tier in ("bronze", None):
                asked.append(clients.submit(run, engine, tier))
                num_waiting = len(asked)
                eventually(
                    lambda: engine.stats().scheduler.waiting == num_waiting,  # noqa: B023
                    "a queued request",
                )
        for one in asked:
            one.result(timeout=30)
    assert done == [None, "bronze"]
