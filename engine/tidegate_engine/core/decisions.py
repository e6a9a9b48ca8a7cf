"""Why requests were admitted, held, preempted or dropped: a record that people can read."""

import enum
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

KEPT_RECORDS = 4096
"""Decision records that a log keeps; the oldest are dropped first."""


class Verdict(enum.StrEnum):
    """What was decided about a request."""

    ADMITTED = "admitted"
    RESUMED = "resumed"
    HELD = "held"
    PREEMPTED = "preempted"
    ENDED = "ended"
    EXPIRED = "expired"
    STOPPED = "stopped"
    CANCELLED = "cancelled"


class Reason(enum.StrEnum):
    """Why."""

    WITHIN_NOMINAL = "within_nominal"
    BORROWING = "borrowing"
    UNDER_FLOOR = "under_floor"
    NO_SLOT = "no_slot"
    ITL_TARGET = "itl_target"
    NO_BLOCKS = "no_blocks"
    WATERMARK = "watermark"
    PREDICTED_PEAK = "predicted_peak"
    AT_CAP = "at_cap"
    NOT_RESUMABLE = "not_resumable"
    PARTIAL_PREFILLS = "partial_prefills"
    WAIT_WINDOW = "wait_window"
    BEHIND_HEAD = "behind_head"
    DISPLACED = "displaced"
    RECLAIMED = "reclaimed"
    PRESSURE = "pressure"
    OUT_OF_MEMORY = "out_of_memory"
    QUEUE_TIMEOUT = "queue_timeout"
    REQUEST_TIMEOUT = "request_timeout"
    TENANT_STOPPED = "tenant_stopped"
    ON_REQUEST = "on_request"


class Decision(NamedTuple):
    """What was decided about one request in one step.

    Attributes:
        beneficiary: For whom a request was preempted; empty = for nobody in particular.
        beneficiary_tenant: Whose request that is.
        beneficiary_tier: In which tier it is served.
    """

    request_id: str
    tenant: str
    verdict: Verdict
    reason: Reason
    beneficiary: str = ""
    beneficiary_tenant: str = ""
    beneficiary_tier: str = ""


class DecisionRecord(NamedTuple):
    """All decisions of one step.

    Attributes:
        time: Of planning, on the scheduler's clock.
        watermark: State of the watermark gate, by its name.
    """

    step: int
    revision: int
    time: float
    watermark: str
    decisions: tuple[Decision, ...]


class DecisionLog:
    """The newest decision records of one scheduler, in order."""

    def __init__(self, kept: int = KEPT_RECORDS) -> None:
        self._records: deque[DecisionRecord] = deque(maxlen=kept)

    def __iter__(self) -> Iterator[DecisionRecord]:
        return iter(self._records)

    def add(self, record: DecisionRecord) -> None:
        """Append a record; the oldest makes room."""
        self._records.append(record)

    def of(self, request_id: str) -> list[tuple[DecisionRecord, Decision]]:
        """Return what was decided about one request, in order."""
        return [
            (record, decision)
            for record in self._records
            for decision in record.decisions
            if decision.request_id == request_id
        ]
