import pytest

from tidegate_cli.bench.isolation_plan import overloaded
from tidegate_cli.bench.isolation_policy import side_of
from tidegate_cli.bench.isolation_side import FCFS, PRIORITY, TIDEGATE, SideName
from tidegate_cli.bench.isolation_simulated import SCALE

LABELS = overloaded(SCALE)


@pytest.mark.parametrize("name", SideName)
def test_every_label_is_sent_as_a_tenant_of_the_policy(name: SideName) -> None:
    side = side_of(name, LABELS, itl_seconds=0.1)

    assert set(side.renamed) == {label.tenant for label in LABELS}
    assert set(side.renamed.values()) == set(side.policy.tenant_rules)


def test_first_come_first_served_knows_one_tenant() -> None:
    side = side_of(FCFS, LABELS, itl_seconds=0.1)

    assert len(side.policy.tenants) == len(side.policy.tiers) == 1


def test_plain_priority_has_a_tenant_a_tier_and_takes_nobody_out() -> None:
    policy = side_of(PRIORITY, LABELS, itl_seconds=0.1).policy

    assert [tier.name for tier in policy.tiers] == ["gold", "silver", "bronze"]
    assert not any(tier.preempts_lower for tier in policy.tiers)
    assert {rule.tenant: rule.tier for rule in policy.tenants} == {
        name: name for name in ("gold", "silver", "bronze")
    }
    assert not any(rule.preemption.reclaims or rule.service.sheds for rule in policy.tenants)


def test_our_side_has_everybodys_weights_and_targets() -> None:
    policy = side_of(TIDEGATE, LABELS, itl_seconds=0.1).policy

    for label in LABELS:
        rule = policy.tenant_rules[label.tenant]
        assert (rule.tier, rule.weight) == (label.tier, label.weight)
        assert rule.service.ttft_seconds == label.ttft_seconds
        assert rule.service.itl_seconds == pytest.approx(0.1 * label.itl_factor)


def test_without_a_target_nobody_has_one() -> None:
    policy = side_of(TIDEGATE, LABELS[:1], itl_seconds=None).policy

    assert policy.tenants[0].service.itl_seconds is None


def test_each_tenant_has_a_key_of_its_own() -> None:
    side = side_of(PRIORITY, LABELS, itl_seconds=None)
    digests = {name: str(number) * 64 for number, name in enumerate(side.policy.tenant_rules)}

    policy = side.with_keys(digests)

    assert policy.tenant_by_key_digest == {digest: name for name, digest in digests.items()}
