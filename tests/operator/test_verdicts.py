from datetime import UTC, datetime, timedelta

from tidegate_operator.verdicts import (
    MAX_MESSAGE_CHARACTERS,
    ConditionType,
    Flaw,
    Reason,
    Verdict,
    accepted,
    merge_conditions,
    ready,
    resolved_refs,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)
GOOD = [accepted([]), resolved_refs([])]
FLAW = Flaw(Reason.TENANT_CONFLICT, "taken")


def test_transition_time_changes_only_when_the_status_flips() -> None:
    first = merge_conditions([], GOOD, generation=1, now=NOW)
    same = merge_conditions(first, [accepted([])], generation=2, now=LATER)
    assert same[0]["lastTransitionTime"] == "2026-01-01T00:00:00Z"
    assert same[0]["observedGeneration"] == 2
    flipped = merge_conditions(first, [accepted([FLAW])], generation=2, now=LATER)
    assert flipped[0]["lastTransitionTime"] == "2026-01-01T01:00:00Z"


def test_order_is_kept_and_what_no_longer_applies_is_removed() -> None:
    stored = merge_conditions([], list(reversed(GOOD)), generation=1, now=NOW)
    stored.insert(0, {**stored[0], "type": "Programmed"})
    merged = merge_conditions(stored, [*GOOD, ready(GOOD)], generation=1, now=LATER)
    assert [condition["type"] for condition in merged] == ["ResolvedRefs", "Accepted", "Ready"]


def test_verdict_on_an_older_generation_is_ignored() -> None:
    stored = merge_conditions([], GOOD, generation=5, now=NOW)
    assert merge_conditions(stored, [accepted([FLAW])], generation=4, now=LATER) == stored[:1]


def test_equal_verdicts_make_equal_conditions() -> None:
    stored = merge_conditions([], GOOD, generation=1, now=NOW)
    assert merge_conditions(stored, GOOD, generation=1, now=LATER) == stored


def test_ready_takes_the_first_condition_that_is_not_good() -> None:
    degraded = Verdict(
        ConditionType.DEGRADED, holds=True, reason=Reason.REDIS_UNREACHABLE, message="away"
    )
    healthy = Verdict(ConditionType.DEGRADED, holds=False, reason=Reason.POLICY_CURRENT, message="")
    assert ready([*GOOD, healthy]).holds
    assert ready([*GOOD, degraded]).reason is Reason.REDIS_UNREACHABLE
    assert ready([accepted([FLAW]), degraded]).reason is Reason.TENANT_CONFLICT


def test_message_fits_into_a_status() -> None:
    flaws = [Flaw(Reason.TIER_NOT_FOUND, f"tier {number} " + "x" * 100) for number in range(100)]
    (condition,) = merge_conditions([], [resolved_refs(flaws)], generation=1, now=NOW)
    assert len(condition["message"]) == MAX_MESSAGE_CHARACTERS
