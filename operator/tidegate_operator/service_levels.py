"""What engines measured of a tenant against its service level, as its status says it; pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidegate_operator.resources import duration_seconds, duration_text
from tidegate_operator.verdicts import ConditionType, Json, Reason, Verdict
from tidegate_policies.attainment import (
    NEVER,
    is_attained,
    measured,
    merged,
    num_counted,
)
from tidegate_policies.rules import ServiceRule
from tidegate_policies.wire import Attainment, LatencyCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a tenant fares against its service level; None where there is nothing to say.

    Attributes:
        figures: `status.serviceLevel`.
        verdict: The condition ServiceLevelMet.
    """

    figures: Json | None = None
    verdict: Verdict | None = None


def standing(
    rule: ServiceRule, attainments: Sequence[Attainment] | None, *, known: Json
) -> Standing:
    """Judge a tenant over all engines of all its pools.

    Args:
        rule: What it was promised.
        attainments: As the engines report them; None while that isn't known yet.
        known: The status so far.
    """
    if rule.ttft_seconds is None and rule.itl_seconds is None:
        return Standing()
    if attainments is None:
        return Standing(figures=known.get("serviceLevel"), verdict=_known_verdict(known))
    total = merged(attainments, ttft_seconds=rule.ttft_seconds, itl_seconds=rule.itl_seconds)
    if total is None:
        return Standing()
    objectives = list(_objectives(rule, total))
    return Standing(
        figures=_figures(rule, total, objectives, known=known.get("serviceLevel") or {}),
        verdict=_verdict(rule, objectives),
    )


@dataclass(frozen=True, slots=True)
class _Objective:
    """One target and what was counted against it, at least once."""

    name: str
    counts: LatencyCounts
    percentile: int

    @property
    def is_met(self) -> bool:
        return is_attained(self.counts, self.percentile)

    @property
    def value(self) -> float:
        """The percentile, in seconds."""
        value = measured(self.counts, self.percentile)
        return math.inf if value is None else value


def _objectives(rule: ServiceRule, total: Attainment) -> Iterator[_Objective]:
    pairs = (("ttft", total.ttft, rule.ttft_percentile), ("itl", total.itl, rule.itl_percentile))
    for name, counts, percentile in pairs:
        if counts is not None and num_counted(counts):
            yield _Objective(name, counts, percentile)


def _figures(
    rule: ServiceRule, total: Attainment, objectives: Sequence[_Objective], *, known: Json
) -> Json:
    figures: Json = {
        objective.name: _steady(objective, known.get(objective.name))
        for objective in objectives
        if objective.value < math.inf
    }
    if total.requests:
        # Rounded down: 100 means all of them.
        figures["attainmentPercent"] = 100 * total.met // total.requests
    return {**figures, "window": duration_text(rule.window_seconds)}


def _steady(objective: _Objective, known: str | None) -> str:
    """Keep what was said before while it is as good: percentiles hover between two buckets."""
    value, target = objective.value, objective.counts.target_seconds
    if known is not None:
        before = duration_seconds(known)
        is_near = abs(before - value) <= max(before, value) / 10 + 0.001
        if is_near and (before <= target) is (value <= target):
            return known
    return duration_text(value)


def _verdict(rule: ServiceRule, objectives: Sequence[_Objective]) -> Verdict | None:
    if not objectives:
        return None
    window = duration_text(rule.window_seconds)
    missed = [_miss(objective) for objective in objectives if not objective.is_met]
    return Verdict(
        ConditionType.SERVICE_LEVEL_MET,
        holds=not missed,
        reason=Reason.MISSED if missed else Reason.SERVICE_LEVEL_MET,
        message=f"In the last {window}, {'; '.join(missed)}."
        if missed
        else f"Every target with traffic in the last {window} is met.",
    )


def _miss(objective: _Objective) -> str:
    """Say what is missed, by how much, and on how much it is based."""
    counts, percentile = objective.counts, objective.percentile
    total, never = num_counted(counts), dict(counts.buckets).get(NEVER, 0)
    what = "first tokens" if objective.name == "ttft" else "times between two tokens"
    value = duration_text(objective.value) if objective.value < math.inf else "never"
    details = [f"p{percentile} {value}"]
    if never:
        details.append(f"{_about(never)} never came: refused or timed out")
    return (
        f"{objective.name}: {100 * counts.met // total} % of {_about(total)} {what} met the target"
        f" of {duration_text(counts.target_seconds)}, {percentile} % have to"
        f" ({', '.join(details)})"
    )


def _about(number: int) -> str:
    """Keep two digits: more would be another message, and a write, every time."""
    return f"{number}" if number < 100 else f"about {int(float(f'{number:.2g}'))}"


def _known_verdict(known: Json) -> Verdict | None:
    """Return what the condition says already."""
    for condition in known.get("conditions", ()):
        if condition.get("type") == ConditionType.SERVICE_LEVEL_MET:
            holds = condition["status"] == "True"
            return Verdict(
                ConditionType.SERVICE_LEVEL_MET,
                holds=holds,
                reason=Reason.SERVICE_LEVEL_MET if holds else Reason.MISSED,
                message=condition["message"],
            )
    return None
