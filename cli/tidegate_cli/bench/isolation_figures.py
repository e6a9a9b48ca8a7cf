"""What clients got in one run of `tidegate bench isolation`, and the figures taken from that."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from math import inf

from tidegate_cli.bench.isolation_load import Label, Planned
from tidegate_cli.percentiles import percentile

_ITL_PERCENTILE = 99
"""Percent of a request's own times between two tokens that have to meet the target."""


class End(StrEnum):
    """How a request ended, for its client.

    DONE: with its whole output. REFUSED: at arrival. LEFT: its client hung up. CUT: the server
    ended it. OPEN: not before the run.
    """

    DONE = "done"
    REFUSED = "refused"
    LEFT = "left"
    CUT = "cut"
    OPEN = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """One request, as its client saw it; times count from the start of the run, in seconds.

    Attributes:
        token_times: When each output token came.
        ended_at: None while it is open.
    """

    request: Planned
    token_times: Sequence[float]
    end: End
    ended_at: float | None

    @property
    def ttft_seconds(self) -> float:
        """Time to the first token; infinite where none came."""
        return self.token_times[0] - self.request.at_seconds if self.token_times else inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a tenant's requests are to get."""

    ttft_seconds: float
    itl_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all clients got, looked at in one window of time, or in one of each round.

    Attributes:
        experiences: Of every request that was sent.
        windows: From when to when, in seconds from the start.
        service: What the engines charged each of the policy's tenants in them, in cost units.
        preemptions: From the start to the end.
    """

    experiences: Sequence[Experience]
    windows: Sequence[tuple[float, float]]
    service: Mapping[str, float]
    preemptions: int = 0

    @property
    def seconds(self) -> float:
        """How long was looked."""
        return sum(end - begin for begin, end in self.windows)

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens of all tenants."""
        tokens = sum(self._is_seen(at) for one in self.experiences for at in one.token_times)
        return tokens / self.seconds

    @property
    def service_per_s(self) -> float:
        """Charged service of all tenants, in cost units."""
        return sum(self.service.values()) / self.seconds

    def ttft_seconds(self, label: Label) -> list[float]:
        """Return the times to the first token of a tenant's requests; infinite where none came.

        Counted are those who came early enough for their target.
        """
        return [
            one.ttft_seconds
            for one in self._of(label)
            if self._is_seen(one.request.at_seconds, for_seconds=label.ttft_seconds)
        ]

    def itl_seconds(self, label: Label) -> list[float]:
        """Return the times between two tokens of a tenant's requests."""
        return [
            later - earlier
            for one in self._of(label)
            for earlier, later in pairwise(one.token_times)
            if self._is_seen(later)
        ]

    def goodput(self, targets: Mapping[str, Targets]) -> float:
        """Return the requests a second that ended and met all their targets."""
        good = sum(
            one.end is End.DONE
            and one.ended_at is not None
            and self._is_seen(one.ended_at)
            and meets(one, targets[one.request.tenant])
            for one in self.experiences
        )
        return good / self.seconds

    def attainment_percent(
        self, tenants: Iterable[str], targets: Mapping[str, Targets]
    ) -> float | None:
        """Return how many of the requests of some tenants met all their targets, in percent.

        Whoever was refused, was cut or hung up did not. Open ones are judged by what has come;
        those that came too late to be judged, not at all; None when nobody was judged.
        """
        wanted = set(tenants)
        judged = [
            meets(one, targets[one.request.tenant])
            for one in self.experiences
            if one.request.tenant in wanted
            and self._is_seen(
                one.request.at_seconds, for_seconds=targets[one.request.tenant].ttft_seconds
            )
        ]
        return 100.0 * sum(judged) / len(judged) if judged else None

    def counts(self, label: Label) -> dict[End, int]:
        """Return how a tenant's requests ended, of all that were sent."""
        counted = dict.fromkeys(End, 0)
        for one in self._of(label):
            counted[one.end] += 1
        return counted

    def _is_seen(self, at: float, *, for_seconds: float = 0.0) -> bool:
        return any(begin <= at < end - for_seconds for begin, end in self.windows)

    def _of(self, label: Label) -> list[Experience]:
        return [one for one in self.experiences if one.request.tenant == label.tenant]


def in_rounds(runs: Sequence[Run], *, seconds: float) -> Run:
    """Return several runs as one.

    Args:
        runs: With the same policy, at least one.
        seconds: How long each was, so that the next one's times count from there.
    """
    starts = [number * seconds for number in range(len(runs))]
    return Run(
        experiences=[
            _later(one, start)
            for start, run in zip(starts, runs, strict=True)
            for one in run.experiences
        ],
        windows=[
            (start + begin, start + end)
            for start, run in zip(starts, runs, strict=True)
            for begin, end in run.windows
        ],
        service={name: sum(run.service[name] for run in runs) for name in runs[0].service},
        preemptions=sum(run.preemptions for run in runs),
    )


def _later(one: Experience, seconds: float) -> Experience:
    return Experience(
        request=replace(one.request, at_seconds=seconds + one.request.at_seconds),
        token_times=[seconds + at for at in one.token_times],
        end=one.end,
        ended_at=None if one.ended_at is None else seconds + one.ended_at,
    )


def meets(one: Experience, targets: Targets) -> bool:
    """Tell whether a request got what it was to get, as far as it has come."""
    if one.end not in {End.DONE, End.OPEN} or one.ttft_seconds > targets.ttft_seconds:
        return False
    gaps = [later - earlier for earlier, later in pairwise(one.token_times)]
    return (percentile(gaps, _ITL_PERCENTILE) or 0.0) <= targets.itl_seconds


def targets_of(labels: Iterable[Label], itl_seconds: float) -> dict[str, Targets]:
    """Return the targets by tenant, given gold's of the time between two tokens."""
    return {
        label.tenant: Targets(
            ttft_seconds=label.ttft_seconds, itl_seconds=itl_seconds * label.itl_factor
        )
        for label in labels
    }


def share_errors(labels: Iterable[Label], service: Mapping[str, float]) -> dict[str, float]:
    """Return by how many points each tenant's share of their service differs from its weight's."""
    among = list(labels)
    weights = sum(label.weight for label in among)
    total = sum(service.get(label.tenant, 0.0) for label in among)
    return {
        label.tenant: 100.0
        * (service.get(label.tenant, 0.0) / (total or 1.0) - label.weight / weights)
        for label in among
    }


def p99(values: Iterable[float]) -> float:
    """Return the 99th percentile; 0 when there is no value."""
    return percentile(values, 99) or 0.0
