"""The scheduler's book on each tenant: its rule in force, its queue, its counters.

A request may ask for a lower tier than its tenant's own. So a tenant stands in as many tiers as its
requests do, in each with a queue and a virtual counter; what its policy limits counts over all.
"""

from collections import Counter
from dataclasses import dataclass, field

from tidegate_engine.core.kv_time import HeldBlocks
from tidegate_engine.core.prefix_cache import BlockKeys
from tidegate_engine.core.queues import RequestQueue
from tidegate_engine.core.request import PreemptionKey
from tidegate_policies.fairness import (
    OUTPUT_TOKEN_COST,
    PROMPT_TOKEN_COST,
    Group,
    VirtualTokenCounters,
)
from tidegate_policies.rules import StopPolicy, TenantRule, TierRule


@dataclass(slots=True)
class TenantTotals:
    """What has grown since the scheduler's start; the fields are those of `TenantStats`.

    Attributes:
        service: Charged, in cost units.
        held: KV blocks, and how long they were held.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    deferred_decodes: int = 0
    cancelled: int = 0
    expired: int = 0
    finished: int = 0
    service: float = 0.0
    preemptions: Counter[PreemptionKey] = field(default_factory=Counter)
    held: HeldBlocks = field(default_factory=HeldBlocks)

    def add(self, other: "TenantTotals") -> None:
        """Add the totals of a tenant that is gone; what copies still hold of it is paid here."""
        self.held.absorb(other.held)
        other.held = self.held
        for name in self.__slots__:
            if name != "held":
                setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(eq=False, slots=True, kw_only=True)
class Tenant:
    """One tenant in one tier of this engine: its own, or a lower one that its requests asked for.

    Attributes:
        name: Identity in engines and metrics.
        rule: In force for it.
        tier: Rule of the tier in force.
        counters: Where its service is counted.
        root: What its keys in the prefix cache are chained to.
        has_common_root: Whether this is that of all tenants that share their prefixes.
        is_declared: False once the policy in force doesn't name it any more; its requests finish
            under the last rule.
        totals: Of all its tiers together.
        in_tiers: The tenant in all its tiers, its own first.
        account: Whose service it is, in `counters`: the tenant's name, for a lower tier with that
            of the tier behind it. No space is in either.
        service: Charged in this tier, in cost units.
        queue: Its requests that were never admitted.
        running: Requests in the batch.
        preempted: Requests whose context has to be computed again.
        swapped: Requests whose KV is on the host, or on its way to or from there.
        arriving: Of those, the ones on their way in.
        admitted_prompt_tokens: Prompt tokens of its running requests that are not charged yet.
        committed_blocks: Worst case of its running requests that may not be preempted.
        listed_key: Its place in the queue of its tier; None = it isn't in there.
        is_parked: Whether it waits for one of its own requests to end.
        is_held: Whether its requests queue and none is let in.
        output_price: What an output token adds to its virtual counter.
    """

    name: str
    rule: TenantRule
    tier: TierRule
    counters: VirtualTokenCounters
    root: bytes
    has_common_root: bool = False
    is_declared: bool = True
    totals: TenantTotals = field(default_factory=TenantTotals)
    in_tiers: "list[Tenant]" = field(default_factory=list)
    account: str = field(init=False)
    service: float = 0.0
    queue: RequestQueue = field(default_factory=RequestQueue)
    running: int = 0
    preempted: int = 0
    swapped: int = 0
    arriving: int = 0
    admitted_prompt_tokens: int = 0
    committed_blocks: int = 0
    listed_key: tuple[bool, float] | None = None
    is_parked: bool = False
    is_held: bool = field(init=False)
    output_price: float = field(init=False)

    def __post_init__(self) -> None:
        self.account = f"{self.name} {self.tier.name}" if self.in_tiers else self.name
        self.in_tiers.append(self)
        self.obey(self.rule, self.tier)

    def in_lower(self, tier: TierRule) -> "Tenant":
        """Return the same tenant in a lower tier in which it isn't yet."""
        return Tenant(
            name=self.name,
            rule=self.rule,
            tier=tier,
            counters=self.counters,
            root=self.root,
            has_common_root=self.has_common_root,
            totals=self.totals,
            in_tiers=self.in_tiers,
        )

    def obey(self, rule: TenantRule, tier: TierRule) -> None:
        """Be under these rules from now on."""
        self.rule, self.tier, self.is_declared = rule, tier, True
        self.is_held = rule.stop is StopPolicy.HOLD
        self.output_price = OUTPUT_TOKEN_COST / (rule.weight or 1)

    def block_keys(self, block_size: int) -> BlockKeys:
        """Begin the keys by which the prefix cache is to know a request's blocks."""
        return BlockKeys(self.root, block_size, is_common=self.has_common_root)

    @property
    def tier_value(self) -> int:
        """Value of its tier in force."""
        return self.tier.value

    @property
    def waiting(self) -> int:
        """Requests that are neither in the batch nor swapped out."""
        return len(self.queue) + self.preempted

    @property
    def is_preemptible(self) -> bool:
        """Whether its requests may be let in without their worst case being its own.

        Those of a tenant that isn't declared any more may: it has no nominal for them to fit in.
        """
        return self.rule.preemption.preemptible or not self.is_declared

    @property
    def is_active(self) -> bool:
        """Whether it has a request anywhere."""
        return bool(self.running or self.queue or self.preempted or self.swapped)

    @property
    def is_backlogged(self) -> bool:
        """Whether it wants more than the batch gives it: decodes get all that they can have."""
        return bool(self.queue or self.admitted_prompt_tokens or self.preempted or self.swapped)

    @property
    def group(self) -> Group:
        """With whom its counter is compared."""
        return self.tier.value, self.rule.weight == 0

    @property
    def key(self) -> tuple[bool, float]:
        """Its place in the order of its tier: weight 0 last, then by virtual token counter.

        What was admitted counts before it is computed: or all that one step admits would go to
        the same tenant.
        """
        owed = self.admitted_prompt_tokens * PROMPT_TOKEN_COST / (self.rule.weight or 1)
        return self.rule.weight == 0, self.counters.value(self.account) + owed

    def is_full_with(self, promised: int) -> bool:
        """Tell whether its own limit keeps further requests out of the batch.

        Args:
            promised: Places that are kept for its requests.
        """
        limit = self.rule.max_running
        if limit is None:
            return False
        return sum(one.running + one.arriving for one in self.in_tiers) + promised >= limit

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of its requests, in all tiers, that were never admitted."""
        return sum(one.queue.num_tokens for one in self.in_tiers)

    @property
    def is_named(self) -> bool:
        """Whether the policy in force lets its requests into this tier."""
        is_own = self.in_tiers[0] is self
        return self.is_declared and (is_own or self.tier.name in self.rule.allowed_tiers)

    @property
    def competes(self) -> bool:
        """Whether it is backlogged, and neither by its own limits nor by a hold."""
        return self.is_backlogged and not (self.is_parked or self.is_held)

    @property
    def wants_service(self) -> bool:
        """Whether it stands in the queue of its tier, unless it is there already."""
        return bool(self.queue) and not self.is_parked and not self.is_held

    def take_over(self, other: "Tenant") -> None:
        """Have the requests of the same tenant in another tier, each in its place by arrival."""
        queued = sorted([*self.queue, *other.queue], key=lambda seq: seq.arrival)
        self.queue = RequestQueue()
        for seq in queued:
            self.queue.push(seq)
        self.running += other.running
        self.preempted += other.preempted
        self.swapped += other.swapped
        self.arriving += other.arriving
        self.admitted_prompt_tokens += other.admitted_prompt_tokens
        self.service += other.service
