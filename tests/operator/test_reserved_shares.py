"""The shares that the tiers of a pool reserve have to leave something to all the others."""

from tidegate_operator.compiler import CompiledPool, compile_pool, tier_flaws
from tidegate_operator.resources import Resource
from tidegate_testing.objects import a_tenant_policy, a_tier, a_view, an_engine_pool


def compile_of(*objects: Resource) -> CompiledPool:
    view = a_view(*objects)
    (pool,) = view.pools.values()
    return compile_pool(view, pool)


def shares(compiled: CompiledPool) -> dict[str, int]:
    return {tier.name: tier.reserved_share_percent for tier in compiled.snapshot.tiers}


def test_newest_share_that_does_not_fit_becomes_zero_and_others_stay() -> None:
    tiers = [
        a_tier("first", 1, age=4, reservedSharePercent=50),
        a_tier("second", 2, age=3, reservedSharePercent=41),
        a_tier("third", 3, age=2, reservedSharePercent=40),
        a_tier("unused", 4, age=9, reservedSharePercent=90),
    ]
    policies = [a_tenant_policy(name, priorityTier=name) for name in ("first", "second", "third")]
    compiled = compile_of(an_engine_pool(), *policies, *tiers)
    assert shares(compiled) == {"first": 50, "second": 0, "third": 40}
    assert all(verdict.flaws == () for verdict in compiled.verdicts.values())
    assert list(compiled.tier_flaws) == ["second"]
    message = compiled.tier_flaws["second"].message
    assert "41 doesn't fit into pool 'team/chat'" in message
    assert "older ones have 50 (first 50)" in message


def test_all_ninety_percent_may_be_reserved() -> None:
    tiers = [a_tier("old", age=1, reservedSharePercent=60), a_tier("new", reservedSharePercent=30)]
    policies = [a_tenant_policy(name, priorityTier=name) for name in ("old", "new")]
    compiled = compile_of(an_engine_pool(), *policies, *tiers)
    assert (shares(compiled), dict(compiled.tier_flaws)) == ({"old": 60, "new": 30}, {})


def test_tier_of_admitted_unknown_tenants_takes_part() -> None:
    new = a_tier("new", reservedSharePercent=60)
    old = a_tier("old", age=1, reservedSharePercent=60)
    policy = a_tenant_policy(priorityTier="new")
    spec = {"action": "Admit", "priorityTier": "old"}
    compiled = compile_of(an_engine_pool(unknownTenants=spec), policy, new, old)
    assert shares(compiled) == {"old": 60, "new": 0}
    assert shares(compile_of(an_engine_pool(), policy, new, old)) == {"new": 60}


def test_tier_is_told_in_which_pools_its_share_does_not_fit() -> None:
    tiers = [a_tier("old", age=1, reservedSharePercent=60), a_tier("new", reservedSharePercent=60)]
    both = [
        a_tenant_policy(tier, priorityTier=tier, pools=["chat", "code"]) for tier in ("old", "new")
    ]
    lone = a_tenant_policy("lone", priorityTier="new", pools=["lone"])
    pools = [an_engine_pool(name) for name in ("code", "chat", "lone")]
    view = a_view(*pools, *both, lone, *tiers)
    compiled = [compile_pool(view, pool) for pool in pools]
    assert tier_flaws(view, "old", compiled) == ()
    in_chat, in_code = tier_flaws(view, "new", compiled)
    assert (in_chat.reason, in_code.reason) == ("TierConflict", "TierConflict")
    assert "pool 'team/chat'" in in_chat.message
    assert "pool 'team/code'" in in_code.message
    assert tier_flaws(view, "new", reversed(compiled)) == (in_chat, in_code)
