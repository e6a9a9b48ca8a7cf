"""Fairness between the tenants of a tier: weighted virtual token counters.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithms 2 and 4
(arXiv:2401.00588). Here a tenant is active while it has a request queued or running, not only
while one is queued, and only counters of one group are compared: of tenants of the same tier, those
of weight 0 apart.
"""

from collections.abc import Iterable

Group = tuple[int, bool]
"""The value of a tier, and whether these are its tenants of weight 0."""

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
        self._left_last: dict[Group, float] = {}

    def value(self, tenant: str) -> float:
        """Return the counter of `tenant` in cost units per weight; 0.0 before its first request."""
        return self._counter.get(tenant, 0.0)

    def charge(self, tenant: str, cost: float, *, weight: int) -> None:
        """Add service just given.

        Args:
            tenant: Who was served.
            cost: In cost units.
            weight: The weight in force now, so that a changed weight touches the future alone.
                Tenants of weight 0 are a group of their own, in which each counts as 1.
        """
        self._counter[tenant] = self.value(tenant) + cost / max(weight, 1)

    def join(self, tenant: str, group: Group, *, backlogged: Iterable[str]) -> None:
        """Lift the counter of a tenant that becomes active, so that it can't bank idle time.

        The floor is the least counter of the others that want service in the group or, when there
        is none, the counter with which a tenant of the group became inactive last. A counter never
        falls.
        """
        others = [self.value(other) for other in backlogged if other != tenant]
        floor = min(others) if others else self._left_last.get(group, 0.0)
        self._counter[tenant] = max(self.value(tenant), floor)

    def leave(self, tenant: str, group: Group) -> None:
        """Remember with which counter `tenant` has become inactive in the group."""
        self._left_last[group] = self.value(tenant)

    def move(self, tenant: str, group: Group, *, backlogged: Iterable[str]) -> None:
        """Take a tenant into another group, as a newcomer there.

        Its counter grew against other tenants and says nothing in the new group: it starts level
        with the least served one instead of being punished or favoured for its past.
        """
        self._counter[tenant] = 0.0
        self.join(tenant, group, backlogged=backlogged)

    def forget(self, tenant: str) -> None:
        """Drop a tenant that is no longer declared and has no work."""
        self._counter.pop(tenant, None)
