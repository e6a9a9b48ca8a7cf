"""What each tenant's requests got, against its service level, in the window that its policy names.

A window is a ring of sub-windows and the sum of those that are over, so that an event is one count
more, whatever the window's length, and memory depends on the tenants with traffic alone. All of
this lives in the event loop.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from tidegate_engine.core.request import RejectionCode
from tidegate_engine.events import CancelCause, StepReport
from tidegate_engine.policy_board import PolicyInForce
from tidegate_engine.queue_times import QueueTimes
from tidegate_policies.attainment import NEVER, bucket_of, num_counted
from tidegate_policies.rules import ServiceRule
from tidegate_policies.wire import Attainment, LatencyCounts

SUB_WINDOWS = 20
"""Parts of a window that age as one: it reaches back for its length, and up to one part more."""

# Where the engine has too much to do; what a tenant's own limits refuse is no fault of the service.
_OVERLOAD = frozenset({RejectionCode.SHED, RejectionCode.QUEUE_FULL, "engine_overloaded"})
# Of the ends that are nobody's wish: the client got an error for an answer.
_FAILURES = frozenset(
    {
        CancelCause.QUEUE_TIMEOUT,
        CancelCause.REQUEST_TIMEOUT,
        CancelCause.ENGINE_FAILED,
        CancelCause.DRAIN,
    }
)


@dataclass(slots=True)
class RequestPace:
    """What one request has got so far.

    Attributes:
        is_late: Whether its first token came after its target.
        num_gaps: Times between two of its tokens.
        num_long_gaps: Of these, those above the target.
    """

    is_late: bool = False
    num_gaps: int = 0
    num_long_gaps: int = 0


@dataclass(slots=True)
class _Latencies:
    """Of one kind: how often each bucket was hit, and the target met; no bucket is at 0.

    A plain dict: adding Counters builds new ones, and every report adds up all tenants.
    """

    met: int = 0
    buckets: dict[int, int] = field(default_factory=dict)

    def count(self, index: int) -> None:
        buckets = self.buckets
        buckets[index] = buckets.get(index, 0) + 1

    def add(self, other: "_Latencies") -> None:
        self.met += other.met
        for index, count in other.buckets.items():
            self.buckets[index] = self.buckets.get(index, 0) + count

    def subtract(self, other: "_Latencies") -> None:
        self.met -= other.met
        for index, count in other.buckets.items():
            self.buckets[index] -= count
            if not self.buckets[index]:
                del self.buckets[index]


@dataclass(slots=True)
class _Tally:
    """What happened in one sub-window, or in several."""

    requests: int = 0
    met: int = 0
    ttft: _Latencies = field(default_factory=_Latencies)
    itl: _Latencies = field(default_factory=_Latencies)

    @property
    def is_empty(self) -> bool:
        return not (self.requests or self.ttft.buckets or self.itl.buckets)

    def add(self, other: "_Tally") -> None:
        self.requests += other.requests
        self.met += other.met
        self.ttft.add(other.ttft)
        self.itl.add(other.itl)

    def subtract(self, other: "_Tally") -> None:
        self.requests -= other.requests
        self.met -= other.met
        self.ttft.subtract(other.ttft)
        self.itl.subtract(other.itl)


class TenantWindow:
    """One tenant against the targets that it has now; times are readings of one clock."""

    def __init__(self, rule: ServiceRule, *, on_no_token: Callable[[], None]) -> None:
        """Begin with nothing.

        Args:
            rule: The targets.
            on_no_token: Called for each request whose first token will never come.
        """
        self._rule = rule
        self._on_no_token = on_no_token
        self._length = rule.window_seconds / SUB_WINDOWS
        self._number = 0
        self._ends_at = 0.0
        self._tally = _Tally()
        self._past = _Tally()
        self._over: deque[tuple[int, _Tally]] = deque()

    def obeys(self, rule: ServiceRule) -> bool:
        """Tell whether what was counted says something about `rule`, too."""
        return _terms(self._rule) == _terms(rule)

    def note_first_token(self, pace: RequestPace, seconds: float, now: float) -> None:
        """Count a request's first token.

        Args:
            pace: Of the request.
            seconds: Since it arrived.
            now: Clock.
        """
        target = self._rule.ttft_seconds
        if target is None:
            return
        ttft = self._at(now).ttft
        ttft.count(bucket_of(seconds))
        if seconds <= target:
            ttft.met += 1
        else:
            pace.is_late = True

    def note_gap(self, pace: RequestPace, seconds: float, now: float) -> None:
        """Count the time between two tokens of a request."""
        target = self._rule.itl_seconds
        if target is None:
            return
        itl = self._at(now).itl
        itl.count(bucket_of(seconds))
        pace.num_gaps += 1
        if seconds <= target:
            itl.met += 1
        else:
            pace.num_long_gaps += 1

    def note_end(
        self, pace: RequestPace, cause: CancelCause | None, now: float, *, has_begun: bool
    ) -> None:
        """Judge a request that has ended.

        One that its client or its tenant took out is judged by what it had got; before its first
        token that is nothing, and it doesn't count.

        Args:
            pace: Of the request.
            cause: Why it was taken out; None = it is complete.
            now: Clock.
            has_begun: Whether its first token has come.
        """
        if cause in _FAILURES:
            self._miss(now, has_begun=has_begun)
        elif cause is None or has_begun:
            tally = self._at(now)
            tally.requests += 1
            tally.met += self._is_met(pace)

    def note_refusal(self, now: float) -> None:
        """Count a request that was refused since there was too much to do."""
        self._miss(now, has_begun=False)

    def attainment(self, now: float) -> Attainment | None:
        """Return what the window holds; None when that is nothing."""
        current, rule = self._at(now), self._rule
        if current.is_empty and self._past.is_empty:
            return None
        return Attainment(
            requests=self._past.requests + current.requests,
            met=self._past.met + current.met,
            ttft=_counts(rule.ttft_seconds, self._past.ttft, current.ttft),
            itl=_counts(rule.itl_seconds, self._past.itl, current.itl),
        )

    def check_invariants(self) -> None:
        """Verify that the sum is that of the sub-windows.

        Raises:
            AssertionError: It isn't, or one of these is too old.
        """
        total = _Tally()
        for number, tally in self._over:
            total.add(tally)
            if number < self._number - SUB_WINDOWS:
                raise AssertionError(f"sub-window {number} is still there in {self._number}")
        if total != self._past:
            raise AssertionError(f"the sub-windows are {total} together, not {self._past}")

    def _miss(self, now: float, *, has_begun: bool) -> None:
        tally = self._at(now)
        tally.requests += 1
        if self._rule.ttft_seconds is not None and not has_begun:
            tally.ttft.count(NEVER)
            self._on_no_token()

    def _is_met(self, pace: RequestPace) -> bool:
        allowed = (100 - self._rule.itl_percentile) * pace.num_gaps
        return not pace.is_late and 100 * pace.num_long_gaps <= allowed

    def _at(self, now: float) -> _Tally:
        """Return the sub-window of `now`; one that is over already is the newest there is."""
        if now >= self._ends_at:
            self._turn(int(now // self._length))
        return self._tally

    def _turn(self, number: int) -> None:
        """Begin a sub-window, and let those go that are too old."""
        if not self._tally.is_empty:
            self._over.append((self._number, self._tally))
            self._past.add(self._tally)
            self._tally = _Tally()
        self._number, self._ends_at = number, (number + 1) * self._length
        while self._over and self._over[0][0] < number - SUB_WINDOWS:
            self._past.subtract(self._over.popleft()[1])


class ServiceLevels:
    """All tenants with targets, of the policy in force.

    Attributes:
        queue_times: Of all requests, whether their tenants have targets or not.
    """

    def __init__(self, clock: Callable[[], float], *, on_no_token: Callable[[str], None]) -> None:
        """Watch nobody yet.

        Args:
            clock: The engine's.
            on_no_token: Called with the tenant of each request that has a target of its first
                token, which will never come.
        """
        self._clock = clock
        self._on_no_token = on_no_token
        self._rules: Mapping[str, ServiceRule] = {}
        self._windows: dict[str, TenantWindow] = {}
        self.queue_times = QueueTimes(clock)

    def use_policy(self, policy: PolicyInForce) -> None:
        """Watch the tenants of another policy; a tenant with new targets begins anew."""
        self._rules = {
            rule.tenant: rule.service
            for rule in policy.snapshot.tenants
            if (rule.service.ttft_seconds, rule.service.itl_seconds) != (None, None)
        }
        self._windows = {
            tenant: window
            for tenant, window in self._windows.items()
            if tenant in self._rules and window.obeys(self._rules[tenant])
        }

    def window(self, tenant: str) -> TenantWindow | None:
        """Return where the events of a tenant's requests belong; None = it has no targets."""
        window = self._windows.get(tenant)
        if window is None and tenant in self._rules:
            window = self._windows[tenant] = TenantWindow(
                self._rules[tenant], on_no_token=partial(self._on_no_token, tenant)
            )
        return window

    def note_end(
        self, tenant: str, pace: RequestPace, cause: CancelCause | None, *, has_begun: bool
    ) -> None:
        """Judge a request that has ended, as `TenantWindow.note_end` does."""
        if (window := self.window(tenant)) is not None:
            window.note_end(pace, cause, self._clock(), has_begun=has_begun)

    def note_refusal(self, tenant: str, reason: str) -> None:
        """Count a refusal, if overload is the reason.

        Args:
            tenant: As the identity check found it.
            reason: Code of the error.
        """
        if reason in _OVERLOAD and (window := self.window(tenant)) is not None:
            window.note_refusal(self._clock())

    def take_step(self, report: StepReport) -> None:
        """Count what the scheduler refused before a step."""
        for refused in report.refused:
            self.note_refusal(refused.tenant, refused.reason)

    def attainments(self) -> dict[str, Attainment]:
        """Return how every tenant with traffic in its window fares; forget the others' windows."""
        now = self._clock()
        found = {
            tenant: attainment
            for tenant, window in self._windows.items()
            if (attainment := window.attainment(now)) is not None
        }
        self._windows = {tenant: self._windows[tenant] for tenant in found}
        return found

    def miss_ratios(self) -> dict[tuple[str, str], float]:
        """Return the share that missed, by tenant and objective (`ttft`, `itl`); 0 of nothing."""
        known = self.attainments()
        ratios: dict[tuple[str, str], float] = {}
        for tenant, rule in self._rules.items():
            found = known.get(tenant)
            if rule.ttft_seconds is not None:
                ratios[tenant, "ttft"] = _miss_ratio(found.ttft if found else None)
            if rule.itl_seconds is not None:
                ratios[tenant, "itl"] = _miss_ratio(found.itl if found else None)
        return ratios


def _terms(rule: ServiceRule) -> tuple[object, ...]:
    """Return what decides how events are counted."""
    return (rule.ttft_seconds, rule.itl_seconds, rule.itl_percentile, rule.window_seconds)


def _counts(
    target_seconds: float | None, past: _Latencies, current: _Latencies
) -> LatencyCounts | None:
    if target_seconds is None:
        return None
    total = _Latencies(past.met, dict(past.buckets))
    total.add(current)
    buckets = tuple(sorted(total.buckets.items()))
    return LatencyCounts(target_seconds=target_seconds, met=total.met, buckets=buckets)


def _miss_ratio(counts: LatencyCounts | None) -> float:
    total = num_counted(counts) if counts is not None else 0
    return 1 - counts.met / total if counts is not None and total else 0.0
