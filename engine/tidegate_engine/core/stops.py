"""Tenants that the policy in force stops, and how long it takes until they hold no KV block."""

from collections.abc import Mapping

from tidegate_engine.core.kv_memory import KvMemory
from tidegate_engine.core.sequence import Sequence
from tidegate_engine.core.tenant_table import TenantTable
from tidegate_policies.rules import StopPolicy
from tidegate_policies.snapshot import PolicySnapshot

_STOPS = (StopPolicy.DRAIN, StopPolicy.CANCEL)


class Stops:
    """Measures every stop, from its policy's arrival to the tenant's last KV block free.

    Attributes:
        seconds: By tenant that is stopped and has neither a request nor a KV block left.
    """

    def __init__(self, memory: KvMemory, tenants: TenantTable) -> None:
        """Work on the scheduler's own state."""
        self.seconds: dict[str, float] = {}
        self._memory = memory
        self._tenants = tenants
        self._policies: dict[str, StopPolicy] = {}
        self._began: dict[str, float] = {}

    def obey(
        self, snapshot: PolicySnapshot, live: Mapping[str, Sequence], *, at: float
    ) -> list[Sequence]:
        """Put a policy in force.

        Args:
            snapshot: The policy.
            live: All requests.
            at: When it arrived. A stop that is only repeated began earlier.

        Returns:
            The requests that it cancels.
        """
        before = self._policies
        self._policies = policies = {r.tenant: r.stop for r in snapshot.tenants if r.stop in _STOPS}
        self._began = {
            name: self._began.get(name, at) if stop is before.get(name) else at
            for name, stop in policies.items()
            if name in self._began or stop is not before.get(name)
        }
        known = self.seconds.items()
        self.seconds = {n: s for n, s in known if n in policies and n not in self._began}
        if StopPolicy.CANCEL not in policies.values():
            return []
        return [s for s in live.values() if policies.get(s.tenant.name) is StopPolicy.CANCEL]

    def settle(self, now: float) -> None:
        """Note who has nothing left."""
        for name in [name for name in self._began if not self._has_anything(name)]:
            self.seconds[name] = max(0.0, now - self._began.pop(name))

    def _has_anything(self, name: str) -> bool:
        own = self._tenants.own.get(name)
        is_active = own is not None and any(one.is_active for one in own.in_tiers)
        return is_active or self._memory.ledger.used(name) > 0
