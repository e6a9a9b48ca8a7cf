"""Clients that wait as long as `Retry-After` tells them: do they succeed when they come back?"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tidegate_cli.bench.isolation_fleet import FleetShape, SimulatedFleet
from tidegate_cli.bench.isolation_load import PATIENCE, Label, Planned, Traffic
from tidegate_cli.bench.isolation_policy import side_of
from tidegate_cli.bench.isolation_side import TIDEGATE
from tidegate_engine.core.request import Rejection
from tidegate_engine.server.errors import MAX_RETRY_SECONDS, from_rejection

OVERLOAD, AFTERWARDS = 1.5, 0.5
"""What all ask for together, in capacities of the fleet: for a time, and then."""

_MOST_TRIES = 5
_MARGIN_SECONDS = 10.0
"""For those who came back last to be served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Honouring:
    """What became of the clients that were refused at first.

    Attributes:
        sent: Clients.
        refused: Of those, how many were refused when they came first.
        succeeded: Of these, how many got their first token at their second try, before they lost
            patience.
        in_time: Of these, within their target.
        waits_seconds: What each was told at its first try.
    """

    sent: int
    refused: int
    succeeded: int
    in_time: int
    waits_seconds: Sequence[float]

    @property
    def second_try_percent(self) -> float:
        """Share of the refused that succeeded at their second try; 100 when nobody was refused."""
        return 100.0 * self.succeeded / self.refused if self.refused else 100.0


class HonouringClients:
    """A fleet under too much load, then under little; its clients heed `Retry-After`."""

    def __init__(self, shape: FleetShape, labels: Sequence[Label], *, seed: int) -> None:
        """Prepare.

        Args:
            shape: The fleet.
            labels: Tenants that shed; their loads add up to `OVERLOAD`.
            seed: Chooses engines, and by how much the server spreads what it tells.
        """
        side = side_of(TIDEGATE, labels, itl_seconds=None)
        self._labels = labels
        self._seed = seed
        self._rng = random.Random(seed)
        self._fleet = SimulatedFleet(
            shape, side.policy, renamed=side.renamed, refused=self._come_back
        )
        self._told: dict[str, list[float]] = {}
        self._second: dict[str, Planned] = {}
        self._tries: dict[str, tuple[str, int]] = {}

    def run(self, traffic: Traffic, *, capacity: float, overload_seconds: float) -> Honouring:
        """Send, wait until the last who was refused has come back, and count.

        Args:
            traffic: Draws the requests.
            capacity: Of the fleet, in requests a second.
            overload_seconds: How long `OVERLOAD` lasts.
        """
        after = overload_seconds + MAX_RETRY_SECONDS + _MARGIN_SECONDS
        plans = self._plans(traffic, capacity, overload_seconds, until=after)
        self._tries = {one.request_id: (one.request_id, 1) for one in plans}
        self._fleet.send(plans)
        with _spread_by(self._seed):
            self._fleet.run(after)
        return self._count(len(plans))

    def _plans(
        self, traffic: Traffic, capacity: float, overload_seconds: float, *, until: float
    ) -> list[Planned]:
        calm = [replace(label, load=label.load * AFTERWARDS / OVERLOAD) for label in self._labels]
        first = traffic.plan(self._labels, capacity=capacity, seconds=overload_seconds)
        then = traffic.plan(calm, capacity=capacity, seconds=until - overload_seconds)
        return first + [
            replace(
                one,
                request_id=f"calm-{one.request_id}",
                at_seconds=one.at_seconds + overload_seconds,
            )
            for one in then
        ]

    def _come_back(self, request: Planned, rejection: Rejection, now: float) -> None:
        """Send a refused request again, after what the server's header says."""
        client, number = self._tries[request.request_id]
        seconds = float(from_rejection(rejection).headers["retry-after"])
        self._told.setdefault(client, []).append(seconds)
        if number == _MOST_TRIES:
            return
        again = replace(
            request,
            request_id=f"{client}-try-{number + 1}",
            at_seconds=now + seconds,
            door=self._rng.getrandbits(32),
        )
        self._tries[again.request_id] = (client, number + 1)
        if number == 1:
            self._second[client] = again
        self._fleet.send([again])

    def _count(self, sent: int) -> Honouring:
        targets = {label.tenant: label.ttft_seconds for label in self._labels}
        waited = []
        for second in self._second.values():
            trace = self._fleet.trace(second)
            ttft_seconds = None if trace is None else trace.ttft_seconds
            if ttft_seconds is not None:
                waited.append(ttft_seconds / targets[second.tenant])
        return Honouring(
            sent=sent,
            refused=len(self._told),
            succeeded=sum(share <= PATIENCE for share in waited),
            in_time=sum(share <= 1.0 for share in waited),
            waits_seconds=[told[0] for told in self._told.values()],
        )


@contextmanager
def _spread_by(seed: int) -> Iterator[None]:
    """Have the server's own random numbers, by which it spreads what it tells, follow a seed."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
