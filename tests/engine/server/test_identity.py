import hashlib
import hmac

import pytest

from tidegate_engine.policy_board import PolicyInForce
from tidegate_engine.server.errors import (
    InvalidApiKeyError,
    NoPolicyError,
    TenantHeaderNotAllowedError,
)
from tidegate_engine.server.identity import Identities
from tidegate_policies.rules import UNKNOWN_TENANT, UnknownAction, UnknownTenantsRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.engines import a_keyed_tenant, digest_of
from tidegate_testing.policies import a_snapshot

ADMIT = UnknownTenantsRule(action=UnknownAction.ADMIT, tier="standard")


def identities(policy: PolicySnapshot) -> Identities:
    known = Identities()
    known.use_policy(
        PolicyInForce(snapshot=policy, revision=1, digest=policy.digest, step=1, at=0.0)
    )
    return known


def test_without_a_policy_nobody_is_known() -> None:
    with pytest.raises(NoPolicyError):
        Identities().tenant_of("Bearer sk-acme")


def test_the_holder_of_a_key_is_its_tenant() -> None:
    known = identities(a_snapshot(a_keyed_tenant("acme"), a_keyed_tenant("zeta")))
    assert known.tenant_of("Bearer sk-acme") == "acme"
    assert known.tenant_of("bearer  sk-zeta ") == "zeta"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer sk-nobody", "Basic sk-acme", "sk-acme"]
)
def test_everybody_else_is_refused_or_unknown(header: str | None) -> None:
    with pytest.raises(InvalidApiKeyError):
        identities(a_snapshot(a_keyed_tenant())).tenant_of(header)
    open_to_all = a_snapshot(a_keyed_tenant(), unknown_tenants=ADMIT)
    assert identities(open_to_all).tenant_of(header) == UNKNOWN_TENANT


def test_the_digest_of_a_key_is_no_key() -> None:
    with pytest.raises(InvalidApiKeyError):
        identities(a_snapshot(a_keyed_tenant())).tenant_of(f"Bearer {digest_of('sk-acme')}")


def test_an_empty_key_is_nobodys_even_when_the_policy_names_it() -> None:
    policy = a_snapshot(a_keyed_tenant(key_digests=(digest_of(""),)))
    with pytest.raises(InvalidApiKeyError):
        identities(policy).tenant_of("Bearer ")


def test_keys_may_hold_any_bytes() -> None:
    policy = a_snapshot(a_keyed_tenant(key_digests=(digest_of("schlüssel"),)))
    sent = "Bearer schlüssel".encode().decode("latin-1")
    assert identities(policy).tenant_of(sent) == "acme"


def test_a_key_may_end_with_what_is_a_space_in_latin_1() -> None:
    policy = a_snapshot(a_keyed_tenant(key_digests=(digest_of("sk-à"),)))
    sent = "Bearer sk-à \t".encode().decode("latin-1")
    assert identities(policy).tenant_of(sent) == "acme"


def test_keys_are_looked_up_under_a_secret_of_the_process_alone() -> None:
    # Else how long a look-up takes would tell of digests: a dict compares what it finds with ==.
    def looked_up(known: Identities) -> set[object]:
        return {key for table in vars(known).values() if isinstance(table, dict) for key in table}

    policy = a_snapshot(a_keyed_tenant("acme"), a_keyed_tenant("zeta"))
    one, other = looked_up(identities(policy)), looked_up(identities(policy))
    assert (len(one), len(other), len(one & other)) == (2, 2, 0)
    for key in ("sk-acme", "sk-zeta"):
        digest = hashlib.sha256(key.encode())
        plain = {digest.digest(), digest.hexdigest(), digest.hexdigest().encode()}
        assert not plain & one


def test_the_gateways_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    known = identities(a_snapshot(a_keyed_tenant("acme")))
    known.trust_gateway("the-token")
    assert known.tenant_of("Bearer the-token", ["acme"]) == "acme"
    monkeypatch.setattr(hmac, "compare_digest", lambda *_: False)
    with pytest.raises(TenantHeaderNotAllowedError):
        known.tenant_of("Bearer the-token", ["acme"])


def test_a_new_policy_replaces_all_keys() -> None:
    known = identities(a_snapshot(a_keyed_tenant("acme")))
    policy = a_snapshot(a_keyed_tenant("zeta"))
    known.use_policy(PolicyInForce(snapshot=policy, revision=2, digest="", step=1, at=0.0))
    assert known.tenant_of("Bearer sk-zeta") == "zeta"
    with pytest.raises(InvalidApiKeyError):
        known.tenant_of("Bearer sk-acme")
