"""How far the engines of a pool are: who runs which revision, who lags, who refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidegate_operator.cluster import PodView
from tidegate_operator.verdicts import ConditionType, Reason, Verdict
from tidegate_policies.wire import EngineReport

MAX_NAMED = 10
"""Most pods that a status names."""

_NO_REDIS = (
    "the operator can't reach Redis, or Redis doesn't take the policy;"
    " engines keep the one that they have"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The newest revision of a pool's policy.

    Attributes:
        time: RFC 3339, when it was first stored in Redis.
    """

    revision: int
    digest: str
    time: str

    def is_contradicted_by(self, report: EngineReport) -> bool:
        """Tell whether an engine runs what can't follow from this: it would refuse it for ever."""
        if report.revision == self.revision:
            return report.digest != self.digest
        return report.revision > self.revision


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The engines of a pool as the API server and the engines themselves tell.

    Attributes:
        pods: All pods of the pool, by name.
        reports: The fresh reports by pod; a pod without one is silent.
        published: The newest revision; an engine that contradicts it runs none of its policies.
    """

    pods: tuple[PodView, ...] = ()
    reports: Mapping[str, EngineReport]
    published: Published | None = None
    # Thousands of policies ask about the same few revisions.
    _lagging: dict[int, tuple[str, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def ready(self) -> tuple[str, ...]:
        """Names of the pods that are ready: only they count."""
        return tuple(pod.name for pod in self.pods if pod.is_ready)

    @property
    def ready_reports(self) -> tuple[EngineReport, ...]:
        """The fresh reports of the ready pods."""
        return tuple(self.reports[name] for name in self.ready if name in self.reports)

    @property
    def total(self) -> int:
        """How many pods there are, without those that are on their way out."""
        return sum(1 for pod in self.pods if not pod.is_terminating)

    @property
    def degraded(self) -> tuple[str, ...]:
        """Names of the ready pods that said that they can't use Redis."""
        return tuple(
            name
            for name in self.ready
            if (report := self.reports.get(name)) is not None and report.degraded
        )

    def programmed(self, revision: int) -> tuple[str, ...]:
        """Return the ready pods that run `revision` or a later one."""
        return tuple(name for name in self.ready if self._runs(name, revision))

    @property
    def slowest_revision(self) -> int:
        """What every ready pod runs at least; 0 where there is none, or one is silent."""
        return min(
            (self.reports[name].revision if name in self.reports else 0 for name in self.ready),
            default=0,
        )

    def lagging(self, revision: int) -> tuple[str, ...]:
        """Return the ready pods that are silent or run no revision from `revision` on."""
        if revision not in self._lagging:
            lagging = tuple(name for name in self.ready if not self._runs(name, revision))
            self._lagging[revision] = lagging
        return self._lagging[revision]

    def heard_lagging(self, revision: int) -> tuple[str, ...]:
        """Return the lagging pods that are not silent."""
        return tuple(name for name in self.lagging(revision) if name in self.reports)

    def refusals(self, revision: int) -> tuple[str, ...]:
        """Return, in words, why lagging pods refused `revision` or a later one."""
        found = []
        for name in self.lagging(revision):
            report = self.reports.get(name)
            if report and report.refused and report.refused.revision >= revision:
                refused = report.refused
                found.append(
                    f"{name} refused revision {refused.revision}: {refused.reason}"
                    f" ({refused.message})"
                )
        return tuple(found)

    def _runs(self, pod: str, revision: int) -> bool:
        report = self.reports.get(pod)
        if report is None or report.revision < revision:
            return False
        return self.published is None or not self.published.is_contradicted_by(report)


def programmed(pool: str, engines: Engines, revision: int, *, was_programmed: bool) -> Verdict:
    """Judge whether every ready engine of `pool` has run `revision` or a later one.

    Args:
        pool: `namespace/name`, for the message.
        engines: The pool's engines.
        revision: What they have to run at least.
        was_programmed: The same was true before. Then an engine that falls silent or a pool that
            runs empty takes nothing back: the EnginePool reports those, and one restart must not
            rewrite the status of thousands of policies. An engine that runs less does.
    """
    if refusals := engines.refusals(revision):
        return _not_programmed(Reason.ENGINE_REFUSED, f"pool {pool!r}: {_some(refusals)}")
    lagging = engines.heard_lagging(revision) if was_programmed else engines.lagging(revision)
    if lagging:
        message = f"pool {pool!r}: revision {revision} is not yet run by {_some(lagging)}"
        return _not_programmed(Reason.ENGINES_LAGGING, message)
    if not engines.ready and not was_programmed:
        return _not_programmed(Reason.NO_ENGINES, f"pool {pool!r} has no ready engine")
    message = f"Every ready engine of pool {pool!r} runs revision {revision} or a later one."
    return Verdict(ConditionType.PROGRAMMED, holds=True, reason=Reason.PROGRAMMED, message=message)


def pending(pool: str) -> Verdict:
    """Return the verdict while a policy is not yet handed to the engines."""
    message = f"pool {pool!r}: the policy is not yet handed to the engines"
    return _not_programmed(Reason.PENDING, message)


def degraded(engines: Engines, revision: int, *, is_redis_reachable: bool) -> Verdict:
    """Judge whether engines run on a last known good policy."""
    reason, problems = Reason.REDIS_UNREACHABLE, list[str]()
    if not is_redis_reachable:
        problems.append(_NO_REDIS)
    if cut_off := engines.degraded:
        problems.append(f"without Redis, or on a policy from the disk: {_some(cut_off)}")
    if refusals := engines.refusals(revision):
        reason = reason if problems else Reason.ENGINE_REFUSED
        problems.append(_some(refusals))
    if problems:
        return Verdict(
            ConditionType.DEGRADED, holds=True, reason=reason, message="; ".join(problems)
        )
    message = "No engine is known to run on an outdated policy."
    return Verdict(
        ConditionType.DEGRADED, holds=False, reason=Reason.POLICY_CURRENT, message=message
    )


def plan_revision(
    digest: str,
    *,
    pool_uid: str,
    stored: "Stored | None",
    seen: Mapping[str, tuple[int, str]],
) -> int:
    """Return the revision under which a policy is (or already was) published.

    The newest known revision is used again when all that is known about it has the same digest:
    an equal policy is no news, and after Redis was emptied the same revision can be stored again
    without any engine taking it for an old one. Everything else becomes the next revision, so
    that neither a restart, a flush, a recreated pool nor a restored etcd leaves engines refusing.

    Args:
        digest: Of the policy to publish.
        pool_uid: Of the pool; what Redis holds for an earlier pool of that name never matches.
        stored: What Redis holds.
        seen: Revision and digest as known from elsewhere: status, memory, engines.
    """
    known = [entry for entry in seen.values() if entry[0] > 0]
    if stored is not None:
        known.append((stored.revision, stored.digest if stored.pool_uid == pool_uid else ""))
    newest = max((revision for revision, _ in known), default=0)
    digests = {known_digest for revision, known_digest in known if revision == newest}
    return newest if digests == {digest} else newest + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What Redis holds for a pool, without the envelope itself."""

    revision: int
    digest: str
    pool_uid: str


def _not_programmed(reason: Reason, message: str) -> Verdict:
    return Verdict(ConditionType.PROGRAMMED, holds=False, reason=reason, message=message)


def _some(names: tuple[str, ...]) -> str:
    rest = len(names) - MAX_NAMED
    shown = ", ".join(names[:MAX_NAMED])
    return f"{shown} and {rest} more" if rest > 0 else shown
