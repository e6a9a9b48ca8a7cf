"""The traffic of `tidegate bench isolation`: one recorded trace, divided among tenants by us.

The record knows no tenants of ours and no tiers: who is gold is our labelling. All tenants draw on
the same record, each from a place of its own, so that no side of a comparison gains by a mix of
prompt and output lengths.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from statistics import fmean

from tidegate_cli.traces import TraceRequest
from tidegate_policies.rules import PreemptionRule

GOLD, SILVER, BRONZE = "gold", "silver", "bronze"
TIER_VALUES = {GOLD: 200, SILVER: 100, BRONZE: 10}
"""The tiers' values by name: larger goes first."""

PATIENCE = 2.0
"""Clients hang up when they have waited for their first token for so many times its target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A tenant that part of the record's requests are said to be of.

    Attributes:
        tenant: Its name.
        tier: One of `TIER_VALUES`.
        weight: Share inside the tier.
        load: What it asks for, in capacities of the fleet.
        ttft_seconds: Its target.
        itl_factor: Its target of the time between two tokens, in gold's.
        nominal_percent: KV blocks that are its own.
        sheds: Whether who would be served too late is refused.
        max_running: Most of its requests in a batch; None = as many as the batch holds.
        quantum_tokens: Output tokens that each of its requests gets before it can be taken out.
    """

    tenant: str
    tier: str
    load: float
    ttft_seconds: float
    weight: int = 100
    itl_factor: float = 1.0
    nominal_percent: int = 0
    sheds: bool = False
    max_running: int | None = None
    quantum_tokens: int = PreemptionRule().min_quantum_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A request to be sent, and what its client will do.

    Attributes:
        request_id: Unique in a run.
        at_seconds: From the start of the run.
        tenant: A label's.
        door: Which engine the front door sends it to: this number modulo the engines.
        patience_seconds: Its client hangs up when the first token has not come after so long; None
            = never.
        leaves_after_seconds: Its client hangs up then, whatever has come; None = never.
        is_read: Whether its client reads what it is sent.
        choices: Answers that are asked for at once; each is queued by itself.
    """

    request_id: str
    at_seconds: float
    tenant: str
    prompt_tokens: int
    output_tokens: int
    door: int = 0
    patience_seconds: float | None = None
    leaves_after_seconds: float | None = None
    is_read: bool = True
    choices: int = 1


class Traffic:
    """Divides a record among tenants."""

    def __init__(self, recorded: Sequence[TraceRequest], *, seed: int) -> None:
        """Draw from a record; the seed chooses each tenant's place in it, and the engines."""
        self._recorded = recorded
        self._seed = seed

    @property
    def mean_service(self) -> float:
        """Charged service of the record's mean request, in cost units."""
        return fmean(one.service for one in self._recorded)

    def plan(self, labels: Iterable[Label], *, capacity: float, seconds: float) -> list[Planned]:
        """Return what all tenants send, in order of time.

        A tenant's requests are the same whatever the others are.

        Args:
            labels: The tenants.
            capacity: Of the fleet, in requests a second.
            seconds: How long they send.
        """
        plans = [
            one
            for label in labels
            for one in self.requests_of(label, rate=label.load * capacity, seconds=seconds)
        ]
        return sorted(plans, key=lambda one: (one.at_seconds, one.request_id))

    def requests_of(self, label: Label, *, rate: float, seconds: float) -> list[Planned]:
        """Return what one tenant sends.

        Its gaps are the record's, all shortened or stretched alike; at the record's end it begins
        anew.

        Args:
            label: The tenant.
            rate: In requests a second.
            seconds: How long it sends.
        """
        rng = random.Random(f"{self._seed}/{label.tenant}")
        begin = rng.randrange(len(self._recorded))
        upcoming = (
            Planned(
                request_id=f"{label.tenant}-{number}",
                at_seconds=at_seconds,
                tenant=label.tenant,
                prompt_tokens=one.prompt_tokens,
                output_tokens=one.output_tokens,
                door=rng.getrandbits(32),
                patience_seconds=PATIENCE * label.ttft_seconds,
            )
            for number, (at_seconds, one) in enumerate(self._endless(begin, rate))
        )
        return list(takewhile(lambda one: one.at_seconds < seconds, upcoming))

    def _endless(self, begin: int, rate: float) -> Iterable[tuple[float, TraceRequest]]:
        recorded = self._recorded
        first, last = recorded[0].at_seconds, recorded[-1].at_seconds
        mean_gap = (last - first) / max(1, len(recorded) - 1)
        at_seconds = 0.0
        for number in count(begin):
            one = recorded[number % len(recorded)]
            previous = recorded[number % len(recorded) - 1]
            # The gap before the record's first request is the mean one: it doesn't say.
            gap = one.at_seconds - previous.at_seconds if number % len(recorded) else mean_gap
            at_seconds += gap / mean_gap / rate
            yield at_seconds, one
