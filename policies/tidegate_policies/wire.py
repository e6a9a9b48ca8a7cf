"""What operator and engines say to each other through Redis: key names, channels, reports.

Per pool: one key holds the newest envelope, one channel wakes the engines when it changes, one key
per engine holds that engine's last report and expires, one channel announces reports at once.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from tidegate_policies.problems import first_problem

HEARTBEAT_SECONDS = 1.0
"""How often an engine reports when nothing happens."""

REPORT_EXPIRY_SECONDS = 5.0
"""An engine that was silent for longer counts as gone."""

REPORTS_PATTERN = "tidegate:*:reports"
"""Pattern over the report channels of all pools."""

Natural = Annotated[int, Field(ge=0)]


def envelope_key(pool: str) -> str:
    """Return the Redis hash with `revision`, `digest`, `pool_uid` and `envelope` of `pool`."""
    return f"tidegate:{pool}:policy"


def wake_channel(pool: str) -> str:
    """Return the channel on which the operator publishes a `PolicyChange`, or a new revision."""
    return f"tidegate:{pool}:wake"


def report_key(pool: str, pod: str) -> str:
    """Return the Redis string that holds the last report of `pod`; it expires."""
    return f"tidegate:{pool}:engine:{pod}"


def reports_channel(pool: str) -> str:
    """Return the channel on which the engines of `pool` publish each report."""
    return f"tidegate:{pool}:reports"


class ReportError(ValueError):
    """A text is not a valid engine report; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A policy that an engine did not take.

    Attributes:
        reason: As in `EnvelopeRefusedError`.
    """

    revision: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyCounts:
    """How often each latency was seen, in buckets that are the same in all engines.

    Attributes:
        target_seconds: What they were counted against.
        met: Of all, those within the target.
        buckets: `(index, count)` by index, empty ones left out; `tidegate_policies.attainment` says
            which latencies an index stands for.
    """

    target_seconds: float
    met: int
    buckets: tuple[tuple[Natural, Natural], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainment:
    """One tenant against its service level, over the window that its policy names.

    Attributes:
        requests: That ended in the window, or were refused for overload.
        met: Of those, the ones that met every target.
        ttft: Of requests whose first token came in the window, or will never come; None without a
            target.
        itl: Of times between two tokens; None without a target.
    """

    requests: int
    met: int
    ttft: LatencyCounts | None = None
    itl: LatencyCounts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCounters:
    """One tenant in one engine; the totals grow since the engine's start.

    Attributes:
        swapped: Requests whose KV is in host memory, or on its way to or from there.
        kv_borrowed_blocks: Of `kv_used_blocks`, those above the tenant's nominal.
        service: Charged service, in cost units (1 per computed prompt token, 2 per output token).
        prompt_tokens: Computed the first time; `cached_tokens` were found in the prefix cache, and
            `recomputed_tokens` computed again.
        kv_seconds: KV blocks times the seconds that they were held.
        cancelled: Taken out before their end, whatever the cause.
        shed: Refused at arrival, whatever the cause.
        stop_seconds: From the arrival of the policy that stops the tenant to its last KV block
            free; None while it isn't stopped, or has anything left.
        attainment: Against the targets of its service level; None without any, or without traffic
            in the window.
    """

    tenant: str
    running: int = 0
    waiting: int = 0
    swapped: int = 0
    kv_used_blocks: int = 0
    kv_borrowed_blocks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    kv_seconds: float = 0.0
    service: float = 0.0
    preempted: int = 0
    cancelled: int = 0
    shed: int = 0
    stop_seconds: float | None = None
    attainment: Attainment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Acknowledgement, heartbeat and usage of one engine in one message.

    Attributes:
        pod: Name of the pod, the engine's identity in its pool.
        incarnation: Changes whenever the engine process starts.
        sequence: Grows with every report of an incarnation, so that order never needs a clock.
        revision: The policy in force; 0 = none yet.
        digest: Of the policy in force.
        step: Number of the first step planned under `revision`.
        refused: The newest policy that was refused, until a newer one is applied.
        degraded: True while the engine can't read Redis, runs a policy from its disk, or can't
            lease and so has its part of every rate limit.
        swapped: Requests whose KV is in host memory, or on its way to or from there.
        kv_used_blocks: Blocks in use, of `kv_blocks`.
        host_blocks: KV blocks in host memory.
        block_size: Tokens in a block; 0 = not told.
        waiting_tokens: Prompt tokens of requests that were never admitted.
        queue_times: Times from arrival to first admission, of the last minute: `(index, count)` as
            in `LatencyCounts`.
        steps: Executed since the engine's start.
        step_seconds: That they took together.
        tenants: Tenants with work or with any total.
    """

    pool: str
    pod: str
    incarnation: str
    sequence: Natural
    revision: Natural = 0
    digest: str = ""
    step: int = 0
    refused: Refusal | None = None
    degraded: bool = False
    running: int = 0
    waiting: int = 0
    swapped: int = 0
    kv_blocks: int = 0
    kv_used_blocks: int = 0
    host_blocks: int = 0
    block_size: Natural = 0
    waiting_tokens: Natural = 0
    queue_times: tuple[tuple[Natural, Natural], ...] = ()
    steps: Natural = 0
    step_seconds: float = 0.0
    tenants: tuple[TenantCounters, ...] = ()

    def to_json(self) -> str:
        """Write the text that travels."""
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> "EngineReport":
        """Read a report.

        Raises:
            ReportError: Malformed; the message names the field.
        """
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError as error:
            raise ReportError(first_problem(error, whole="report")) from error


_ADAPTER = TypeAdapter(EngineReport)
