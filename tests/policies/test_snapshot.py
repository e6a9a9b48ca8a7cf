import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policies.snapshot import (
    PolicySnapshot,
    SnapshotError,
    TenantRule,
    TierRule,
    UnknownAction,
    UnknownTenantsRule,
    WatermarkRule,
)
from tidegate_testing.policies import POOL, a_snapshot, a_tenant


def test_a_snapshot_survives_its_text() -> None:
    snapshot = a_snapshot(a_tenant("a", weight=3, key_digests=("ab" * 32,)), a_tenant("b"))
    assert PolicySnapshot.from_json(snapshot.to_json()) == snapshot


@given(st.permutations(["a", "b", "c"]), st.permutations(["high", "low", "mid"]))
def test_the_digest_depends_on_content_alone(tenants: list[str], tiers: list[str]) -> None:
    values = {"high": 10, "mid": 5, "low": 5}
    snapshot = PolicySnapshot.of(
        POOL,
        tiers=[TierRule(name=t, value=values[t]) for t in tiers],
        tenants=[a_tenant(t, tier="mid") for t in tenants],
    )
    assert [t.name for t in snapshot.tiers] == ["high", "low", "mid"]
    assert snapshot.digest == a_snapshot(*map(_mid, "abc"), tiers=values).digest


def _mid(name: str) -> TenantRule:
    return a_tenant(name, tier="mid")


def test_any_change_changes_the_digest() -> None:
    one = a_snapshot(a_tenant(weight=1))
    assert one.digest != a_snapshot(a_tenant(weight=2)).digest


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{}", "pool"),
        ("nonsense", "JSON"),
        (a_snapshot(a_tenant(weight=7)).to_json().replace("7", "-7"), "tenants.0.weight"),
        (a_snapshot(a_tenant(weight=7)).to_json().replace("7", "1000001"), "1000000"),
        (a_snapshot().to_json().replace('"low_percent":80', '"low_percent":95'), "low 95"),
        (a_snapshot().to_json().replace("standard", "gone", 1), "not in the snapshot"),
        (a_snapshot().to_json().replace('"weight"', '"burst":1,"weight"', 1), "burst"),
    ],
)
def test_a_bad_text_is_refused_by_the_name_of_its_field(text: str, named: str) -> None:
    with pytest.raises(SnapshotError, match=named):
        PolicySnapshot.from_json(text)


def test_contradictions_are_refused() -> None:
    with pytest.raises(SnapshotError, match="'acme' appears twice"):
        a_snapshot(a_tenant(), a_tenant())
    with pytest.raises(SnapshotError, match="kept for undeclared tenants"):
        a_snapshot(a_tenant("unknown"))
    with pytest.raises(SnapshotError, match="sum up to 90"):
        a_snapshot(a_tenant("a", kv_nominal_percent=45), a_tenant("b", kv_nominal_percent=45))
    with pytest.raises(SnapshotError, match="key_digests"):
        a_snapshot(a_tenant("a", key_digests=("ab" * 32,)), a_tenant("b", key_digests=("ab" * 32,)))
    with pytest.raises(SnapshotError, match="unknown_tenants: tier 'none'"):
        a_snapshot(
            unknown_tenants=UnknownTenantsRule(action=UnknownAction.ADMIT, tier="none"),
        )
    with pytest.raises(SnapshotError, match="0 < low < high < 100"):
        a_snapshot(watermarks=WatermarkRule(low_percent=0, high_percent=10))


def test_a_key_leads_to_its_tenant() -> None:
    snapshot = a_snapshot(a_tenant("a", key_digests=("0a" * 32, "0b" * 32)))
    assert snapshot.tenant_by_key_digest == {"0a" * 32: "a", "0b" * 32: "a"}
