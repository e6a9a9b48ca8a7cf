"""Fairness between the tenants of a tier: weighted virtual token counters.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithms 2 and 4
(arXiv:2401.00588). A tenant is backlogged, as those in the paper's queue are, while one of its
requests isn't in the batch, or is there and its prompt isn't read yet: prompts take turns by
counters, too. Only counters of one group are compared: of tenants of the same tier, those of weight
0 apart.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

Group = tuple[int, bool]
"""The value of a tier, and whether these are its tenants of weight 0."""

PROMPT_TOKEN_COST = 1.0
"""Cost units per computed prompt token (w_p in the paper), its attention apart."""

OUTPUT_TOKEN_COST = 2.0
"""Cost units per output token (w_q in the paper): a decode moves all weights for one token."""


@dataclass(frozen=True, slots=True)
class PromptPrice:
    """What computing prompt tokens costs: the more, the more context they attend to.

    A general cost function as in algorithm 4 of the paper. At equal prices a tenant of huge prompts
    would get several times the others' computing time.

    Attributes:
        pair_cost: Cost units per pair of a prompt token and a token that it attends to.
    """

    pair_cost: float = 0.0

    def of(self, start: int, num_tokens: int) -> float:
        """Return the cost units of so many prompt tokens from position `start` on."""
        pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        return PROMPT_TOKEN_COST * num_tokens + self.pair_cost * pairs


class Payer(Protocol):
    """Who is charged for output tokens."""

    @property
    def account(self) -> str:
        """The name that its service is counted under."""

    @property
    def output_price(self) -> float:
        """What an output token adds to its counter: its cost divided by the weight."""


PayerT = TypeVar("PayerT", bound=Payer)


@dataclass(slots=True)
class _Members:
    """Who competes in a group.

    Attributes:
        active: Members that are backlogged.
        suspended: Members that are, and that the others don't keep back.
        heap: (counter, member), at least one entry for each active one; one whose counter has grown
            since is put right when it comes to the top.
        left_last: Counter with which a member ceased to be backlogged, the last time one did.
        elsewhere: Members that are backlogged at other engines of the pool.
    """

    active: dict[str, None] = field(default_factory=dict)
    suspended: dict[str, None] = field(default_factory=dict)
    heap: list[tuple[float, str]] = field(default_factory=list)
    left_last: float = 0.0
    elsewhere: dict[str, None] = field(default_factory=dict)

    def has(self, tenant: str) -> bool:
        """Tell whether a tenant is backlogged here."""
        return tenant in self.active or tenant in self.suspended


class VirtualTokenCounters:
    """The service that each tenant has received, divided by its weight.

    Serving the backlogged tenant with the least counter first keeps any two of them within a
    constant of each other, whatever they send. All costs are logarithmic in the tenants.
    """

    def __init__(self) -> None:
        self._counter: dict[str, float] = {}
        self._groups: dict[Group, _Members] = {}

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
        self._counter[tenant] = self._counter.get(tenant, 0.0) + cost / (weight or 1)

    def charge_output(self, served: Mapping[PayerT, int]) -> None:
        """Add the output tokens that a step gave, by who pays for them."""
        counter = self._counter
        for payer, num_tokens in served.items():
            account = payer.account
            counter[account] = counter.get(account, 0.0) + num_tokens * payer.output_price

    def join(self, tenant: str, group: Group) -> None:
        """Lift the counter of a tenant whose arrival makes it backlogged.

        So it can bank neither idle time nor time in which it got all that it asked for. The floor
        is the least counter of the others that are backlogged in the group, at this engine or at
        another; when there is none, the counter with which one ceased to be last, or the least of
        the suspended ones if that is more. A counter never falls. Whoever is backlogged elsewhere
        already has nothing to bank.
        """
        members = self._groups.setdefault(group, _Members())
        if tenant not in members.elsewhere:
            self._counter[tenant] = max(self.value(tenant), self._floor(members))
        self.readmit(tenant, group)

    def note_elsewhere(self, active: Iterable[tuple[str, Group]]) -> None:
        """Know who is backlogged at other engines; whoever isn't named any more isn't.

        Whoever begins to be is a newcomer here, too, and lifted: else it would pull others down.
        """
        before = {group: members.elsewhere for group, members in self._groups.items()}
        for members in self._groups.values():
            members.elsewhere = {}
        for tenant, group in active:
            members = self._groups.setdefault(group, _Members())
            if tenant not in before.get(group, ()) and not members.has(tenant):
                self._counter[tenant] = max(self.value(tenant), self._floor(members))
            members.elsewhere[tenant] = None

    def is_backlogged(self, tenant: str, group: Group) -> bool:
        """Tell whether a tenant counts as backlogged in a group at this engine."""
        members = self._groups.get(group)
        return members is not None and members.has(tenant)

    def leave(self, tenant: str, group: Group) -> None:
        """Remember with which counter `tenant` has ceased to be backlogged in the group."""
        members = self._groups.setdefault(group, _Members())
        members.active.pop(tenant, None)
        members.suspended.pop(tenant, None)
        members.left_last = self.value(tenant)

    def suspend(self, tenant: str, group: Group) -> None:
        """Leave a backlogged tenant out of the floor: its own limit keeps it back, not the others.

        Its counter falls behind, and a newcomer at that level would gain on all the others.
        """
        members = self._groups.setdefault(group, _Members())
        members.active.pop(tenant, None)
        members.suspended[tenant] = None

    def readmit(self, tenant: str, group: Group) -> None:
        """Take a backlogged tenant into the floor, again or for the first time."""
        members = self._groups.setdefault(group, _Members())
        members.active[tenant] = None
        members.suspended.pop(tenant, None)
        heapq.heappush(members.heap, (self.value(tenant), tenant))
        if len(members.heap) > 2 * len(members.active) + 64:
            members.heap = [(self.value(name), name) for name in members.active]
            heapq.heapify(members.heap)

    def move(self, tenant: str, group: Group) -> None:
        """Give a tenant the counter of a newcomer to another group.

        Its own grew against other tenants and says nothing in the new group: it starts level with
        the least served one instead of being punished or favoured for its past.
        """
        self._counter[tenant] = self._floor(self._groups.setdefault(group, _Members()))

    def forget(self, tenant: str) -> None:
        """Drop a tenant that is no longer declared and has no work."""
        self._counter.pop(tenant, None)

    def _floor(self, members: _Members) -> float:
        least = self._least(members)
        wanting = [] if least is None else [least]
        wanting += map(self.value, members.elsewhere)
        if wanting:
            return min(wanting)
        return max(members.left_last, min(map(self.value, members.suspended), default=0.0))

    def _least(self, members: _Members) -> float | None:
        """Return the least counter of the members that count."""
        while members.heap:
            counter, tenant = members.heap[0]
            if tenant not in members.active:
                heapq.heappop(members.heap)
            elif counter < self.value(tenant):
                heapq.heapreplace(members.heap, (self.value(tenant), tenant))
            else:
                return counter
        return None
