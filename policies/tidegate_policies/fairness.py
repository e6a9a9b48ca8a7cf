"""Fairness between the tenants of a tier: weighted virtual token counters.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithms 2 and 4
(arXiv:2401.00588). Here a tenant is active while it has a request queued or running, not only
while one is queued, and counters of different tiers are never compared.
"""

from collections.abc import Iterable

PROMPT_TOKEN_COST = 1.0
"""Cost units per computed prompt token (w_p in the paper)."""

OUTPUT_TOKEN_COST = 2.0
"""Cost units per output token (w_q in the paper): a decode moves all weights for one token."""


class VirtualTokenCounters:
    """The service that each tenant has received, divided by its weight.

    Serving the active tenant with the least counter first keeps any two backlogged tenants within
    a constant of each other, whatever they send.
    """

    def __init__(self) -> None:
        self._counter: dict[str, float] = {}
        self._left_last: dict[int, str] = {}

    def value(self, tenant: str) -> float:
        """Return the counter of `tenant` in cost units per weight; 0.0 before its first request."""
        return self._counter.get(tenant, 0.0)

    def charge(self, tenant: str, cost: float, *, weight: int) -> None:
        """Add service just given.

        Args:
            tenant: Who was served.
            cost: In cost units.
            weight: The weight in force now, so that a changed weight touches the future alone. A
                tenant of weight 0 is ordered behind all others; among its like it counts as 1.
        """
        self._counter[tenant] = self.value(tenant) + cost / max(weight, 1)

    def join(self, tenant: str, *, tier: int, active: Iterable[str]) -> None:
        """Lift the counter of a tenant that becomes active, so that it can't bank idle time.

        The floor is the least counter of the others active in its tier or, when there is none,
        the counter of the tenant of that tier that became inactive last. A counter never falls.
        """
        others = [self.value(other) for other in active if other != tenant]
        if others:
            floor = min(others)
        else:
            left_last = self._left_last.get(tier)
            floor = 0.0 if left_last is None else self.value(left_last)
        self._counter[tenant] = max(self.value(tenant), floor)

    def leave(self, tenant: str, *, tier: int) -> None:
        """Remember that `tenant` has become inactive."""
        self._left_last[tier] = tenant

    def move(self, tenant: str, *, tier: int, active: Iterable[str]) -> None:
        """Take an active tenant into another tier, as a newcomer there.

        Its counter grew against other tenants and says nothing in the new tier: it starts level
        with the least served one instead of being punished or favoured for its past.
        """
        self._counter[tenant] = 0.0
        self.join(tenant, tier=tier, active=active)

    def forget(self, tenant: str) -> None:
        """Drop a tenant that is no longer declared and has no work."""
        self._counter.pop(tenant, None)
        self._left_last = {t: name for t, name in self._left_last.items() if name != tenant}
