from tidegate_engine.core.decisions import Decision, Reason, Verdict
from tidegate_engine.events import Refused, StepReport
from tidegate_engine.server.decision_ring import DecisionRing


def a_report(step: int, *request_ids: str, planned_at: float = 0.0) -> StepReport:
    decisions = (
        Decision(request_id, "acme", Verdict.ADMITTED, Reason.BORROWING)
        for request_id in request_ids
    )
    return StepReport(
        step=step,
        revision=3,
        watermark="green",
        planned_at=planned_at,
        committed_at=planned_at + 1.0,
        decisions=tuple(decisions),
    )


def test_the_oldest_make_room() -> None:
    ring = DecisionRing(kept=3)
    for step in range(1, 6):
        ring.take_step(a_report(step, f"r{step}"))
    assert [entry.request_id for entry in ring.newest(10)] == ["r3", "r4", "r5"]


def test_they_are_in_the_order_in_which_they_were_made() -> None:
    ring = DecisionRing()
    ring.note_refusal(Refused("early", "acme", "queue_full", 1.5), revision=2)
    ring.take_step(a_report(7, "a", "b", planned_at=1.0))
    ring.take_step(a_report(8, "c", planned_at=2.0))
    ring.note_refusal(Refused("late", "acme", "queue_full", 2.5), revision=3)
    found = ring.newest(10)
    assert [entry.request_id for entry in found] == ["a", "b", "early", "c", "late"]
    assert [entry.step for entry in found] == [7, 7, 0, 8, 8]
    assert [entry.revision for entry in found] == [3, 3, 2, 3, 3]
    assert [entry.watermark for entry in found] == ["green", "green", "", "green", "green"]
