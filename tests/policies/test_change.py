"""A change leads to the very policy that was signed, or is not taken."""

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policies.change import ChangeError, LinedPolicy, PolicyChange
from tidegate_policies.envelope import seal, unseal
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import POOL, a_snapshot, a_tenant

weights = st.dictionaries(st.sampled_from(["a", "b", "c", "d", "é\n"]), st.integers(0, 5))
marks = st.sampled_from([0, 10])


def sign(message: bytes) -> str:
    return hashlib.sha256(b"secret" + message).hexdigest()


def a_policy(weight_by_tenant: dict[str, int], tier: int = 0) -> LinedPolicy:
    tenants = [a_tenant(name, weight=weight) for name, weight in weight_by_tenant.items()]
    snapshot = PolicySnapshot.of(
        POOL, tenants=tenants, tiers=a_snapshot(tiers={"standard": tier}).tiers
    )
    return LinedPolicy.of(snapshot)


def change_between(old: LinedPolicy, new: LinedPolicy) -> PolicyChange:
    envelope = seal(new.snapshot, pool_uid="u", revision=2, issued_at="now", sign=sign)
    return old.change_to(new, envelope)


@given(weights, marks, weights, marks)
def test_a_change_leads_from_any_policy_to_any_other(
    before: dict[str, int], tier: int, after: dict[str, int], other_tier: int
) -> None:
    old, new = a_policy(before, tier), a_policy(after, other_tier)
    change = PolicyChange.from_json(change_between(old, new).to_json())

    reached = old.changed_by(change)

    assert reached == new
    assert reached.digest == new.snapshot.digest
    # What an engine puts on its disk is as good as what the operator stored.
    stored = replace(change.envelope, body=reached.text)
    opened = unseal(
        stored, pool=POOL, newer_than=1, verify=lambda message, text: text == sign(message)
    )
    assert opened == new.snapshot


def test_a_change_holds_what_has_changed_and_nothing_else() -> None:
    old = a_policy({f"team-{number}": 1 for number in range(1000)})
    new = a_policy({f"team-{number}": 1 + (number == 7) for number in range(1000)})

    change = change_between(old, new)

    assert (change.pool, change.removed, change.envelope.body) == (None, (), "")
    (line,) = change.tenants
    assert '"tenant":"team-7"' in line
    assert len(change.to_json()) < 1000 < len(new.text) / 50


OLD, NEW = a_policy({"a": 1, "b": 1}), a_policy({"a": 2, "c": 1})
CHANGE = change_between(OLD, NEW)


@pytest.mark.parametrize(
    "spoilt",
    [
        replace(CHANGE, base="other"),
        replace(CHANGE, tenants=CHANGE.tenants[:1]),
        replace(CHANGE, removed=()),
        replace(CHANGE, removed=("a", "b")),
        replace(CHANGE, pool='{"pool":"serving/other"}'),
        replace(CHANGE, pool="nonsense"),
        replace(CHANGE, tenants=("nonsense",)),
        replace(CHANGE, tenants=tuple(line.replace(":2", ":3") for line in CHANGE.tenants)),
        replace(CHANGE, envelope=replace(CHANGE.envelope, digest="0" * 64)),
    ],
)
def test_a_change_that_leads_elsewhere_is_not_taken(spoilt: PolicyChange) -> None:
    assert spoilt != CHANGE
    with pytest.raises(ChangeError):
        OLD.changed_by(spoilt)


@pytest.mark.parametrize("text", ["", "7", "{}", CHANGE.to_json()[:-1]])
def test_what_is_no_change_is_told_from_one(text: str) -> None:
    with pytest.raises(ChangeError):
        PolicyChange.from_json(text)
