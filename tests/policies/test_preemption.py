from tidegate_policies.preemption import VictimCandidate, choose_victim


def candidate(
    name: str, *, tier: int = 0, weight: int = 1, borrowed: int = 1, admission: int = 1
) -> VictimCandidate:
    return VictimCandidate(
        request_id=name,
        tier_value=tier,
        weight=weight,
        borrowed_blocks=borrowed,
        admission=admission,
    )


def chosen(*candidates: VictimCandidate) -> str:
    return choose_victim(candidates).request_id


def test_the_lowest_tier_yields_first() -> None:
    assert chosen(candidate("high", tier=5, borrowed=90), candidate("low", tier=-1)) == "low"


def test_inside_a_tier_the_most_over_share_yields_by_weight() -> None:
    heavy = candidate("heavy", weight=10, borrowed=50)
    light = candidate("light", weight=1, borrowed=6)
    assert chosen(heavy, light) == "light"
    assert chosen(heavy, light, candidate("spare", weight=0)) == "spare"


def test_among_equals_the_newest_yields() -> None:
    assert chosen(candidate("old", admission=3), candidate("new", admission=9)) == "new"
