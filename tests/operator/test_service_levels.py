import math
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_operator.resources.tenant_policy_status import ServiceLevelAttainment
from tidegate_operator.service_levels import Standing, standing
from tidegate_operator.verdicts import Json, Reason, merge_conditions
from tidegate_policies.attainment import bucket_of
from tidegate_policies.rules import ServiceRule
from tidegate_policies.wire import Attainment, LatencyCounts

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RULE = ServiceRule(ttft_seconds=0.5, ttft_percentile=90, itl_seconds=0.04, itl_percentile=99)


def counts_of(seconds: Iterable[float], target: float) -> LatencyCounts:
    seconds = list(seconds)
    return LatencyCounts(
        target_seconds=target,
        met=sum(one <= target for one in seconds),
        buckets=tuple(sorted(Counter(map(bucket_of, seconds)).items())),
    )


def an_attainment(
    ttft: Iterable[float] = (), itl: Iterable[float] = (), *, requests: int = 0, met: int = 0
) -> Attainment:
    return Attainment(
        requests=requests,
        met=met,
        ttft=counts_of(ttft, 0.5),
        itl=counts_of(itl, 0.04),
    )


def judge(
    *attainments: Attainment, known: Json | None = None, rule: ServiceRule = RULE
) -> Standing:
    found = standing(rule, attainments, known=known or {})
    ServiceLevelAttainment.model_validate(found.figures or {})
    return found


def verdict_of(found: Standing) -> tuple[bool, Reason, str]:
    assert found.verdict is not None
    return found.verdict.holds, found.verdict.reason, found.verdict.message


def test_what_every_engine_met_is_met() -> None:
    engine = an_attainment([0.1] * 9 + [0.3], [0.02] * 99 + [0.03], requests=10, met=10)
    found = judge(engine, engine)
    holds, reason, message = verdict_of(found)
    assert (holds, reason) == (True, Reason.SERVICE_LEVEL_MET)
    assert message == "Every target with traffic in the last 5m is met."
    # p90 and p99, at most a tenth too high.
    assert found.figures == {
        "ttft": "100ms",
        "itl": "22ms",
        "attainmentPercent": 100,
        "window": "5m",
    }


def test_a_miss_says_which_target_by_how_much_and_of_how_many() -> None:
    good = an_attainment([0.1] * 80, [0.02] * 100, requests=80, met=80)
    bad = an_attainment([2.0] * 15 + [math.inf] * 5, [0.02] * 100, requests=20, met=0)
    found = judge(good, bad)
    holds, reason, message = verdict_of(found)
    assert (holds, reason) == (False, Reason.MISSED)
    assert message == (
        "In the last 5m, ttft: 80 % of about 100 first tokens met the target of 500ms, 90 % have"
        " to (p90 2155ms, 5 never came: refused or timed out)."
    )
    assert found.figures is not None
    assert (found.figures["ttft"], found.figures["attainmentPercent"]) == ("2155ms", 80)


def test_every_objective_that_is_missed_is_named() -> None:
    _, _, message = verdict_of(judge(an_attainment([1.0], [1.0], requests=1)))
    assert "ttft: 0 % of 1 first tokens" in message
    assert "itl: 0 % of 1 times between two tokens" in message


def test_a_percentile_that_never_came_has_no_figure() -> None:
    found = judge(an_attainment([math.inf], requests=1))
    assert found.figures == {"attainmentPercent": 0, "window": "5m"}
    assert "p90 never" in verdict_of(found)[2]


def test_a_percentile_at_its_target_is_not_said_to_be_above_it() -> None:
    assert (judge(an_attainment([0.49])).figures or {})["ttft"] == "500ms"
    # Its bucket ends a little above.
    assert (judge(an_attainment([0.5])).figures or {})["ttft"] == "500ms"


def test_attainment_is_rounded_down() -> None:
    found = judge(an_attainment([0.1] * 1000, requests=1000, met=999))
    assert (found.figures or {})["attainmentPercent"] == 99


def test_without_traffic_or_targets_there_is_nothing_to_say() -> None:
    assert judge() == Standing()
    assert judge(an_attainment([0.1]), rule=ServiceRule()) == Standing()
    # No engine has counted against the new target yet.
    assert judge(an_attainment([0.1]), rule=ServiceRule(ttft_seconds=0.7)) == Standing()


def test_until_it_is_measured_what_was_said_stays() -> None:
    for ttft in (0.1, 2.0):
        first = judge(an_attainment([ttft], requests=1))
        assert first.verdict is not None
        known = {
            "serviceLevel": first.figures,
            "conditions": merge_conditions((), [first.verdict], generation=1, now=NOW),
        }
        assert standing(RULE, None, known=known) == first
    assert standing(RULE, None, known={}) == Standing()


@given(st.lists(st.floats(0.105, 0.115), min_size=1, max_size=20))
def test_a_percentile_that_hovers_is_said_once(seconds: list[float]) -> None:
    known: Json = {}
    said = set()
    for one in seconds:
        known = {"serviceLevel": judge(an_attainment([one]), known=known).figures}
        said.add(known["serviceLevel"]["ttft"])
    assert len(said) == 1


def test_a_percentile_that_crosses_its_target_is_said_at_once() -> None:
    known = {"serviceLevel": judge(an_attainment([0.5])).figures}
    assert (judge(an_attainment([0.501]), known=known).figures or {})["ttft"] == "511ms"
    known = {"serviceLevel": {"ttft": "511ms"}}
    assert (judge(an_attainment([0.5]), known=known).figures or {})["ttft"] == "500ms"


@pytest.mark.parametrize(("number", "text"), [(99, "99"), (100, "about 100"), (1234, "about 1200")])
def test_numbers_keep_two_digits(number: int, text: str) -> None:
    _, _, message = verdict_of(judge(an_attainment([1.0] * number, requests=number)))
    assert f"0 % of {text} first tokens" in message
