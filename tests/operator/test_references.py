"""What a policy refers to decides how it is served; a gap is named, costs that part, and heals."""

import pytest

from tidegate_operator.compiler import CompiledPool, compile_pool
from tidegate_operator.references import References, policy_references
from tidegate_operator.resources import PreemptionPolicy, Resource, ServiceLevel
from tidegate_policies.rules import PreemptionMode, PreemptionRule, ServiceRule, TenantRule
from tidegate_testing.objects import (
    a_preemption_policy,
    a_service_level,
    a_tenant_policy,
    a_view,
    an_engine_pool,
)

REFS = {"preemptionPolicyRef": {"name": "gentle"}, "serviceLevelRef": {"name": "interactive"}}
GENTLE = a_preemption_policy("gentle", maxPreemptionsPerRequest=1)
INTERACTIVE = a_service_level("interactive", ttft={"target": "500ms"})


def references(*objects: Resource, **spec: object) -> References:
    policy = a_tenant_policy(**spec)  # type: ignore[arg-type]
    return policy_references(a_view(an_engine_pool(), policy, *objects), policy)


def missing(found: References) -> list[str]:
    return [str(flaw.reason) for flaw in found.missing]


def compiled(*objects: Resource, **spec: object) -> CompiledPool:
    view = a_view(an_engine_pool(), a_tenant_policy(**spec), *objects)  # type: ignore[arg-type]
    return compile_pool(view, view.pools["team/chat"])


def rule_of(pool: CompiledPool) -> TenantRule:
    return pool.snapshot.tenant_rules["team/acme"]


def test_a_tenant_is_served_as_what_it_refers_to_says() -> None:
    rule = rule_of(compiled(GENTLE, INTERACTIVE, **REFS))
    assert rule.preemption == PreemptionRule(max_preemptions=1)
    assert rule.service == ServiceRule(ttft_seconds=0.5)


def test_a_tenant_is_served_as_it_says_itself() -> None:
    rule = rule_of(compiled(preemption={"mode": "Swap"}, serviceLevel={"queueTimeout": "30s"}))
    assert rule.preemption == PreemptionRule(mode=PreemptionMode.SWAP)
    assert rule.service == ServiceRule(queue_timeout_seconds=30.0)


def test_a_tenant_that_says_nothing_has_the_defaults_whatever_else_there_is() -> None:
    rule = rule_of(compiled(GENTLE, INTERACTIVE))
    assert (rule.preemption, rule.service) == (PreemptionRule(), ServiceRule())


@pytest.mark.parametrize(
    ("present", "reason", "preemption", "service"),
    [
        (INTERACTIVE, "PreemptionPolicyNotFound", PreemptionRule(), ServiceRule(ttft_seconds=0.5)),
        (GENTLE, "ServiceLevelNotFound", PreemptionRule(max_preemptions=1), ServiceRule()),
    ],
)
def test_a_gap_costs_its_own_part_alone_and_heals(
    present: PreemptionPolicy | ServiceLevel,
    reason: str,
    preemption: PreemptionRule,
    service: ServiceRule,
) -> None:
    before = compiled(present, **REFS)
    assert (rule_of(before).preemption, rule_of(before).service) == (preemption, service)
    verdict = before.verdicts["team/acme"]
    assert verdict.is_in_force
    assert [str(flaw.reason) for flaw in verdict.missing] == [reason]
    healed = compiled(GENTLE, INTERACTIVE, **REFS)
    assert healed.verdicts["team/acme"].missing == ()
    assert before.differing_verdicts(healed) == {"team/acme"}
    assert before.snapshot.digest != healed.snapshot.digest


def test_an_object_of_another_namespace_is_not_the_one_meant() -> None:
    found = references(
        a_preemption_policy("gentle", "other", maxPreemptionsPerRequest=1),
        a_service_level("interactive", "other", ttft={"target": "500ms"}),
        **REFS,
    )
    assert missing(found) == ["PreemptionPolicyNotFound", "ServiceLevelNotFound"]
    assert (found.preemption, found.service) == (PreemptionRule(), ServiceRule())
    assert all("namespace 'team'" in flaw.message for flaw in found.missing)


def test_of_a_stored_reference_beside_an_inline_part_the_part_holds() -> None:
    inline = {"preemption": {"mode": "Swap"}, "serviceLevel": {}}
    found = references(GENTLE, INTERACTIVE, **REFS, **inline)
    assert found.preemption == PreemptionRule(mode=PreemptionMode.SWAP)
    assert found.service == ServiceRule()
