"""A request's decisions, in words."""

from typing import Any

from tidegate_cli.console.requests import DECISION_COLUMNS, REASONS, request_view
from tidegate_engine.core.decisions import Reason


def a_decision(**fields: Any) -> dict[str, Any]:
    base = {
        "time": "2026-11-30T02:50:01.123456+00:00",
        "step": 811,
        "revision": 41,
        "watermark": "open",
        "verdict": "held",
        "reason": "no_slot",
    }
    return base | fields


def test_every_reason_of_the_engine_has_words() -> None:
    assert {reason.value for reason in Reason} - set(REASONS) == set()


def test_decisions_come_in_order_with_time_reason_and_place() -> None:
    decisions = [a_decision(), a_decision(verdict="admitted", reason="borrowing", step=820)]
    view = request_view({"id": "cmpl-1", "tenant": "acme", "decisions": decisions})
    assert [row["verdict"]["text"] for row in view.rows] == ["held", "admitted"]
    first = view.rows[0]
    assert set(first) == {"key", *DECISION_COLUMNS}
    assert first["time"]["text"] == "02:50:01.123"
    assert first["reason"]["text"] == "the batch is full"
    assert (first["place"]["text"], first["place"]["note"]) == ("step 811", "revision 41 · KV open")


def test_of_other_tenants_only_what_was_told_is_shown() -> None:
    def beneficiary(**fields: Any) -> tuple[str, str]:
        decision = a_decision(verdict="preempted", reason="displaced", **fields)
        cell = request_view({"id": "x", "decisions": [decision]}).rows[0]["beneficiary"]
        return cell["text"], cell["note"]

    assert beneficiary(beneficiary_tier="gold") == ("tier gold", "")
    own = {"beneficiary": "cmpl-9", "beneficiary_tenant": "acme", "beneficiary_tier": "gold"}
    assert beneficiary(**own) == ("acme", "cmpl-9")


def test_what_it_waits_for_is_told_and_what_is_not_known_is_left_out() -> None:
    view = request_view(
        {
            "id": "cmpl-1",
            "tenant": "acme",
            "engine": "engine-0",
            "state": "waiting",
            "position": 2,
            "waits_for": "kv",
            "reason": "watermark",
            "first_token_in_seconds": 1.5,
            "predicted_ttft_seconds": None,
            "decisions": [],
        }
    )
    facts = dict(view.facts)
    assert facts["Waits for"] == "kv: KV is above the watermark"
    assert facts["First token"].replace("\N{NO-BREAK SPACE}", " ") == "in 1.5 s"
    assert facts["Place in line"] == "2"
    assert "Queued since" not in facts
