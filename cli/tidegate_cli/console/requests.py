"""What became of a request, decision by decision, in words; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tidegate_cli.console.cells import Cell, Row, Tone, row_of
from tidegate_cli.console.words import NOTHING, seconds_text

Json = Mapping[str, Any]

DECISION_COLUMNS = {
    "time": "Time",
    "verdict": "What",
    "reason": "Why",
    "beneficiary": "For whom",
    "place": "Where",
}

REASONS = MappingProxyType(
    {
        "within_nominal": "within the tenant's nominal KV",
        "borrowing": "with KV that others don't use",
        "under_floor": "its tier was below its reserved share",
        "no_slot": "the batch is full",
        "itl_target": "steps would take longer than those who run may wait for a token",
        "no_blocks": "no KV block is free",
        "watermark": "KV is above the watermark",
        "predicted_peak": "KV would not do at the predicted peak",
        "at_cap": "the tenant is at its limit",
        "not_resumable": "its KV does not fit again yet",
        "partial_prefills": "enough prompts are half read",
        "wait_window": "the batch is being filled",
        "behind_head": "an earlier request of the tenant goes first",
        "displaced": "a higher tier needed its place",
        "reclaimed": "the owner wanted its KV back",
        "pressure": "KV rose above the watermark",
        "out_of_memory": "no KV block was left to grow",
        "queue_timeout": "it waited longer than the service level allows",
        "request_timeout": "it took longer than the service level allows",
        "tenant_stopped": "the tenant is stopped",
        "on_request": "its client asked for it, or left",
    }
)
"""Reasons in words; one that isn't here is shown as it is."""

_TONES: Mapping[str, Tone] = MappingProxyType(
    {
        "admitted": "good",
        "resumed": "good",
        "held": "warn",
        "preempted": "bad",
        "expired": "bad",
        "stopped": "bad",
        "refused": "bad",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """One request: the facts about it now, and one row for each decision, the oldest first."""

    request_id: str
    facts: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]


def request_view(found: Json) -> RequestView:
    """Describe one of the requests that an engine knows under a name."""
    decisions: Sequence[Json] = found.get("decisions") or ()
    return RequestView(
        request_id=str(found["id"]),
        facts=tuple(_facts(found)),
        rows=tuple(_decision_row(one, number) for number, one in enumerate(decisions)),
    )


def _facts(found: Json) -> list[tuple[str, str]]:
    waits_for = found.get("waits_for")
    reason = found.get("reason")
    facts = [
        ("Tenant", found.get("tenant")),
        ("Engine", found.get("engine")),
        ("State", found.get("state")),
        ("Tier", found.get("tier")),
        ("Queued since", _clock(found.get("queued_since"))),
        ("Place in line", found.get("position")),
        ("Waits for", f"{waits_for}: {_reason(reason)}" if waits_for and reason else waits_for),
        ("First token", _seconds(found.get("first_token_in_seconds"), "in {}")),
        ("Predicted wait for it", _seconds(found.get("predicted_ttft_seconds"), "{} in all")),
    ]
    return [(name, str(value)) for name, value in facts if value not in {None, ""}]


def _decision_row(decision: Json, number: int) -> Row:
    verdict = str(decision.get("verdict", ""))
    step, revision = decision.get("step"), decision.get("revision")
    watermark = decision.get("watermark")
    return row_of(
        str(number),
        {
            "time": Cell(text=_clock(decision.get("time")) or NOTHING),
            "verdict": Cell(text=verdict, tone=_TONES.get(verdict, "quiet")),
            "reason": Cell(text=_reason(decision.get("reason")), note=_code(decision)),
            "beneficiary": _beneficiary(decision),
            "place": Cell(
                text=f"step {step}",
                note=f"revision {revision}" + (f" · KV {watermark}" if watermark else ""),
            ),
        },
    )


def _beneficiary(decision: Json) -> Cell:
    tier, tenant = decision.get("beneficiary_tier"), decision.get("beneficiary_tenant")
    request = decision.get("beneficiary")
    if not (tier or tenant or request):
        return Cell(text=NOTHING, tone="quiet")
    who = tenant or (f"tier {tier}" if tier else str(request))
    return Cell(text=who, note=str(request) if request and request != who else "")


def _reason(reason: object) -> str:
    return REASONS.get(str(reason), str(reason)) if reason else NOTHING


def _code(decision: Json) -> str:
    reason = decision.get("reason")
    return str(reason) if reason in REASONS else ""


def _clock(date: object) -> str:
    """Cut a date down to its time of day, with milliseconds."""
    return str(date).partition("T")[2].removesuffix("Z").removesuffix("+00:00")[:12] if date else ""


def _seconds(seconds: float | None, text: str) -> str:
    return "" if seconds is None else text.format(seconds_text(max(0.0, seconds)))
