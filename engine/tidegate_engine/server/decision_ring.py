"""Why the engine did what it did to each request: the newest decisions, for people."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tidegate_engine.events import Refused, StepReport
from tidegate_engine.server.request_id import is_named

KEPT_DECISIONS = 16_384
"""Decisions that a ring keeps, a few megabytes; the oldest make room."""

REFUSED = "refused"
"""Verdict on a request that never came to the scheduler's queue."""


class DecisionEntry(NamedTuple):
    """What was decided about one request.

    Attributes:
        time: On the engine's clock.
        step: The step that was planned; of a refusal, the newest that was known.
        revision: The policy it was decided under; 0 = none.
        watermark: State of the watermark gate then; empty = not known yet.
        beneficiary: For whom a request was preempted; empty = for nobody in particular.
        beneficiary_tenant: Whose request that is.
        beneficiary_tier: In which tier it is served.
    """

    time: float
    step: int
    revision: int
    watermark: str
    request_id: str
    tenant: str
    verdict: str
    reason: str
    beneficiary: str = ""
    beneficiary_tenant: str = ""
    beneficiary_tier: str = ""


class DecisionRing:
    """The newest decisions of one engine; lives in the event loop."""

    def __init__(self, kept: int = KEPT_DECISIONS) -> None:
        """Keep `kept` of them."""
        self._entries: deque[DecisionEntry] = deque(maxlen=kept)
        self._step = 0
        self._watermark = ""

    def take_step(self, report: StepReport) -> None:
        """Add what was decided when a step was planned, and what was refused before."""
        self._step, self._watermark = report.step, report.watermark
        for refused in report.refused:
            self.note_refusal(refused, revision=report.revision)
        for decision in report.decisions:
            self._entries.append(
                DecisionEntry(
                    time=report.planned_at,
                    step=report.step,
                    revision=report.revision,
                    watermark=report.watermark,
                    request_id=decision.request_id,
                    tenant=decision.tenant,
                    verdict=decision.verdict.value,
                    reason=decision.reason.value,
                    beneficiary=decision.beneficiary,
                    beneficiary_tenant=decision.beneficiary_tenant,
                    beneficiary_tier=decision.beneficiary_tier,
                )
            )

    def note_refusal(self, refused: Refused, *, revision: int) -> None:
        """Add that a request was refused, by the scheduler or before it came there.

        Args:
            refused: Which, and why.
            revision: The policy in force then; 0 = none.
        """
        self._entries.append(
            DecisionEntry(
                time=refused.at,
                step=self._step,
                revision=revision,
                watermark=self._watermark,
                request_id=refused.request_id,
                tenant=refused.tenant,
                verdict=REFUSED,
                reason=refused.reason,
            )
        )

    def newest(
        self,
        limit: int,
        *,
        request_id: str | None = None,
        tenant: str | None = None,
        counts: Callable[[str], bool] = lambda _tenant: True,
    ) -> list[DecisionEntry]:
        """Return the newest `limit` decisions, the oldest of them first.

        Args:
            limit: At least 1.
            request_id: Only on this request: the id of its response, that of one of its choices,
                or what its client called it.
            tenant: Only on this tenant's requests.
            counts: Only on requests of tenants for which it is true.
        """
        found = [
            entry
            for entry in self._entries
            if (tenant is None or entry.tenant == tenant)
            and counts(entry.tenant)
            and (request_id is None or is_named(entry.request_id, request_id))
        ]
        # A refusal is known at once, a step's decisions only when the step has ended.
        found.sort(key=lambda entry: entry.time)
        return found[-limit:]
