"""Decides which statuses may look different now, and has those written that do."""

import asyncio
import logging
from collections.abc import Iterable
from datetime import UTC, datetime

from tidegate_operator.cluster import ClusterView, pool_keys
from tidegate_operator.compiler import tier_flaws
from tidegate_operator.metrics import Metrics
from tidegate_operator.planner import (
    PoolState,
    StatusUpdate,
    plan_invalid_status,
    plan_plain_status,
    plan_policy_status,
    plan_pool_status,
)
from tidegate_operator.pools import PoolRecord, Pools
from tidegate_operator.resources import PreemptionPolicy, ServiceLevel, TenantPolicy
from tidegate_operator.status import StatusWriter

_LOG = logging.getLogger(__name__)

FIRST_REPORTS_SECONDS = 5.0
BATCH = 50

LAGGARDS_SECONDS = 0.5
"""How often it is looked at who lags, while no engine has taken the pool further."""


class Reporter:
    """Turns what became known into statuses.

    At thousands of policies, planning all of their statuses on every acknowledgement would be most
    of the operator's work: only those that could have changed are looked at.
    """

    def __init__(self, pools: Pools, *, writer: StatusWriter, metrics: Metrics) -> None:
        self._pools = pools
        self._writer = writer
        self._metrics = metrics
        self._waiting: dict[str, set[str] | None] = {}
        self._looks_later: set[str] = set()
        self._looks_due: set[str] = set()
        self._wake = asyncio.Event()
        self._heard = asyncio.Event()

    def report(self, key: str, policies: Iterable[str] | None = ()) -> None:
        """Have statuses compared with what they should be.

        Args:
            key: The pool; its own status always is, and those of the policies that are behind as
                soon as they can be programmed, or else before long.
            policies: Those that may have changed besides; None for all that refer to the pool.
        """
        known = self._waiting.get(key, set())
        if policies is None or known is None:
            self._waiting[key] = None
        else:
            self._waiting[key] = known | set(policies)
        self._wake.set()

    def report_all(self) -> None:
        """Have every status of pools and policies compared."""
        for key in {*self._pools.records, *self._pools.view.policies_by_pool}:
            self.report(key, None)

    def set_heard(self) -> None:
        """Take in that what engines last said is known, or can't be."""
        self._heard.set()

    async def hear_first(self) -> None:
        """Wait for what engines last said: before that, all of them would seem to lag."""
        try:
            async with asyncio.timeout(FIRST_REPORTS_SECONDS):
                await self._heard.wait()
        except TimeoutError:
            _LOG.warning("no word from Redis yet; going on without it")

    async def run(self) -> None:
        """Report until cancelled."""
        await self.hear_first()
        while True:
            await self._wake.wait()
            self._wake.clear()
            waiting, self._waiting = self._waiting, {}
            for key, policies in waiting.items():
                await self._report_pool(key, policies)

    def report_plain(self, view: ClusterView) -> None:
        """Have the statuses written of the objects that belong to no pool."""
        now = datetime.now(UTC)
        compiled = [record.compiled for record in self._pools.records.values()]
        for tier in view.tiers.values():
            flaws = tier_flaws(view, tier.metadata.name, compiled)
            known = self._writer.known(tier.metadata.uid)
            self._writer.submit(plan_plain_status(tier, flaws, known=known, now=now))
        plains: list[PreemptionPolicy | ServiceLevel] = [
            *view.preemption_policies.values(),
            *view.service_levels.values(),
        ]
        for plain in plains:
            known = self._writer.known(plain.metadata.uid)
            self._writer.submit(plan_plain_status(plain, (), known=known, now=now))
        for invalid in view.invalid:
            known = self._writer.known(invalid.metadata.uid)
            self._writer.submit(plan_invalid_status(invalid, known=known, now=now))

    async def _report_pool(self, key: str, policies: set[str] | None) -> None:
        view, now = self._pools.view, datetime.now(UTC)
        states: dict[str, PoolState | None] = {key: self._pools.state(key)}
        state = states[key]
        if state is not None:
            self._observe_progress(key, state)
            known = self._writer.known(state.pool.metadata.uid)
            self._writer.submit(plan_pool_status(state, known=known, now=now))
        for number, policy in enumerate(self._affected(key, state, policies)):
            if number % BATCH == BATCH - 1:
                # Other work goes on; if that compiled anew, the rest will be reported again.
                await asyncio.sleep(0)
                if self._pools.view is not view:
                    self.report(key, policies)
                    return
            self._report_policy(view, policy, states, now)

    def _affected(
        self, key: str, state: PoolState | None, policies: set[str] | None
    ) -> list[TenantPolicy]:
        view, record = self._pools.view, self._pools.records.get(key)
        if policies is None or record is None or state is None or _has_regressed(state, record):
            return list(view.policies_by_pool.get(key, ()))
        if self._is_behind_due(key, state, record):
            policies = policies | record.behind
        names = sorted(policies)
        return [policy for name in names if (policy := view.policies.get(name)) is not None]

    def _is_behind_due(self, key: str, state: PoolState, record: PoolRecord) -> bool:
        """Tell whether to look at the policies that are behind now; if not, it will be later.

        With every acknowledgement of a hundred engines it would be most of the operator's work,
        and only the last engine makes a difference.
        """
        published = state.published.revision if state.published else 0
        now_at = published, state.engines.slowest_revision
        if now_at == record.looked_at and key not in self._looks_due:
            if record.behind and key not in self._looks_later:
                self._looks_later.add(key)
                asyncio.get_running_loop().call_later(LAGGARDS_SECONDS, self._look, key)
            return False
        record.looked_at = now_at
        self._looks_due.discard(key)
        return True

    def _look(self, key: str) -> None:
        self._looks_later.discard(key)
        self._looks_due.add(key)
        self.report(key)

    def _report_policy(
        self,
        view: ClusterView,
        policy: TenantPolicy,
        states: dict[str, PoolState | None],
        now: datetime,
    ) -> None:
        keys = pool_keys(policy)
        for key in keys:
            if key not in states:
                states[key] = self._pools.state(key)
        own = {key: state for key in keys if (state := states[key]) is not None}
        known = self._writer.known(policy.metadata.uid)
        update = plan_policy_status(view, policy, own, known=known, now=now)
        self._writer.submit(update)
        self._note_progress(policy.metadata.qualified_name, update)

    def _note_progress(self, name: str, update: StatusUpdate) -> None:
        for entry in update.status["pools"]:
            record = self._pools.records.get(f"{entry['namespace']}/{entry['name']}")
            if record is None:
                continue
            verdict = record.compiled.verdicts.get(name)
            if "programmedTime" in entry:
                record.behind.discard(name)
                record.held_revision = max(record.held_revision, entry["revision"])
            elif verdict is not None and verdict.is_in_force:
                record.behind.add(name)
            else:
                record.behind.discard(name)

    def _observe_progress(self, key: str, state: PoolState) -> None:
        ready = state.engines.ready
        revision = state.published.revision if state.published else 0
        programmed = state.engines.programmed(revision) if revision else ()
        for name, count in (
            ("ready", len(ready)),
            ("programmed", len(programmed)),
            ("lagging", len(ready) - len(programmed)),
            ("degraded", len(state.engines.degraded)),
        ):
            self._metrics.engines.labels(key, name).set(count)
        record = self._pools.records[key]
        if record.changed_at is not None and state.is_published and ready == programmed and ready:
            elapsed = asyncio.get_running_loop().time() - record.changed_at
            self._metrics.propagation_seconds.labels(key).observe(elapsed)
            record.changed_at = None

    def forget(self, key: str) -> None:
        """Drop the metrics of a pool that is gone."""
        self._metrics.forget(key)


def _has_regressed(state: PoolState, record: PoolRecord) -> bool:
    """Tell whether a ready engine runs less than a policy that counts as programmed needs."""
    return bool(state.engines.heard_lagging(record.held_revision))
