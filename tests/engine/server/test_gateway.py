"""A gateway that is trusted says for whom it calls; nobody else may."""

from collections.abc import Iterator

import httpx
import pytest

from tidegate_policies.rules import UNKNOWN_TENANT, UnknownAction, UnknownTenantsRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.engines import MODEL, RunningEngine, a_keyed_tenant, a_running_engine, key_of
from tidegate_testing.policies import a_snapshot

TOKEN = "the-gateways-own-token"
HOSTILE = [
    "",
    "nobody",
    "n" * 20_000,
    "Acme",
    "ac\tme",
    "é",
    "a\x7f",
    "acme,zeta",
]


def a_policy(*, admits: bool) -> PolicySnapshot:
    action = UnknownAction.ADMIT if admits else UnknownAction.REJECT
    return a_snapshot(
        a_keyed_tenant("acme"),
        a_keyed_tenant("größe"),
        unknown_tenants=UnknownTenantsRule(action=action, tier="standard"),
    )


@pytest.fixture
def engine() -> Iterator[RunningEngine]:
    with a_running_engine(a_policy(admits=False)) as running:
        running.service.identities.trust_gateway(TOKEN)
        yield running


def ask(engine: RunningEngine, key: str, *tenants: bytes, prompt: str = "Hi") -> httpx.Response:
    return httpx.post(
        f"{engine.base_url}/v1/completions",
        json={"model": MODEL, "prompt": prompt, "max_tokens": 1},
        headers=[
            (b"authorization", f"Bearer {key}".encode()),
            *[(b"x-tidegate-tenant", tenant) for tenant in tenants],
        ],
    )


@pytest.mark.parametrize("tenant", ["acme", "größe"])
def test_the_gateway_calls_for_whom_it_names(engine: RunningEngine, tenant: str) -> None:
    assert ask(engine, TOKEN, tenant.encode()).status_code == 200
    assert engine.stats().scheduler.tenants[tenant].finished == 1


def test_keys_are_good_beside_a_gateway(engine: RunningEngine) -> None:
    assert ask(engine, key_of("acme")).status_code == 200
    assert engine.stats().scheduler.tenants["acme"].finished == 1


@pytest.mark.parametrize("key", [key_of("acme"), "wrong", TOKEN[:-1], TOKEN + "x"])
def test_from_anybody_else_the_header_is_refused(engine: RunningEngine, key: str) -> None:
    refused = ask(engine, key, "größe".encode())
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (403, "tenant_header_not_allowed")
    assert error["param"] == "x-tidegate-tenant"


def test_without_a_gateway_the_header_is_refused_whatever_the_key() -> None:
    with a_running_engine(a_policy(admits=True)) as engine:
        for key in ("None", TOKEN, key_of("acme")):
            assert ask(engine, key, b"acme").json()["error"]["code"] == "tenant_header_not_allowed"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_is_nobodys_is_refused_and_found_nowhere(
    engine: RunningEngine, name: str
) -> None:
    refused = ask(engine, TOKEN, name.encode())
    assert (refused.status_code, refused.json()["error"]["code"]) in {
        (401, "invalid_api_key"),
        (400, "invalid_http"),  # control characters are no part of a header
    }
    assert not name or name not in refused.text
    assert not [labels for _, labels in engine.samples() if ("tenant", name) in labels]


def test_bytes_that_are_no_text_name_nobody(engine: RunningEngine) -> None:
    assert ask(engine, TOKEN, b"\xff\xfe").json()["error"]["code"] == "invalid_api_key"


def test_where_strangers_are_let_in_a_name_that_is_nobodys_is_one_of_theirs() -> None:
    with a_running_engine(a_policy(admits=True)) as engine:
        engine.service.identities.trust_gateway(TOKEN)
        assert [ask(engine, TOKEN, name).status_code for name in (b"nobody", b"x")] == [200, 200]
        assert ask(engine, TOKEN).status_code == 200
        assert engine.stats().scheduler.tenants[UNKNOWN_TENANT].finished == 3


def test_two_names_are_refused_as_a_client_may_have_put_one_of_them_in(
    engine: RunningEngine,
) -> None:
    refused = ask(engine, TOKEN, b"acme", "größe".encode())
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_header")
    assert refused.json()["error"]["param"] == "x-tidegate-tenant"
