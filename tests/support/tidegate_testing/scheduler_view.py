"""What somebody outside a scheduler knows: requests as its answers show them, and the policy.

Nothing here reads the scheduler's state. Quotas are computed anew from the policy, outputs by an
executor that runs one request alone.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.plan import PlanRow, StepPlan, SwapCopy
from tidegate_engine.core.request import RejectionCode, Request
from tidegate_engine.executor.base import Capacity
from tidegate_engine.executor.clock import VirtualClock
from tidegate_engine.executor.simulated import SimulatedExecutor
from tidegate_engine.executor.step_cost import AffineCost
from tidegate_policies.rules import UNKNOWN_TENANT, StopPolicy, TenantRule, TierRule, UnknownAction
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.sampling import a_context

VOCAB_SIZE = 1000


class Place(enum.StrEnum):
    """Where a request is, as far as plans tell.

    ARRIVING: on its way in from the host, with a place in the batch.
    """

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    ARRIVING = "arriving"
    ENDED = "ended"


@dataclass(eq=False, kw_only=True)
class Seen:
    """One accepted request.

    Attributes:
        has_shared: Whether its tenant shared its prefixes at any time in its life.
        lower: The tier below its tenant's that it is in; None = its tenant's.
        revision: In force when it arrived.
        limit: Most output tokens, as promised at arrival.
        least_limit: The same under the narrowest policy since.
        tokens: Prompt and output, in order.
        computed: Tokens in the KV cache; None = it was admitted and has had no row since.
        paid: Tokens that its tenant was charged for, or that were found in the prefix cache.
        admitted_tokens: Length of `tokens` at its last admission.
        table: Its block table as the last row showed it; it grows with the request's.
        host: Its blocks on the host.
        fence: Its copy in flight; 0 = none.
    """

    request: Request
    arrived_at: float
    revision: int
    limit: int
    least_limit: int
    tokens: list[int]
    alone: "Alone"
    lower: str | None = None
    has_shared: bool = False
    place: Place = Place.WAITING
    was_admitted: bool = False
    computed: int | None = 0
    paid: int = 0
    admitted_tokens: int = 0
    preemptions: int = 0
    table: Sequence[int] | None = None
    host: tuple[int, ...] = ()
    fence: int = 0

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.request.tenant

    @property
    def num_outputs(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - len(self.request.prompt_ids)


class Flight(NamedTuple):
    """A copy in flight.

    Attributes:
        is_in: Whether it comes from the host.
    """

    seen: Seen
    copy: SwapCopy
    is_in: bool


class Alone:
    """One request on an executor of its own: what its output is when nothing interferes."""

    def __init__(self, request: Request, *, block_size: int) -> None:
        longest = len(request.prompt_ids) + request.max_output_tokens
        num_blocks = -(-longest // block_size)
        self._request = request
        self._tokens = list(request.prompt_ids)
        self._table = range(num_blocks)
        self._executor = a_simulated_device(num_blocks=num_blocks, block_size=block_size)

    def next_token(self) -> int:
        """Return the output token after those returned before."""
        start = max(0, len(self._tokens) - 1) if self._has_begun else 0
        row = PlanRow(
            request_id=self._request.request_id,
            start=start,
            token_ids=self._tokens[start:],
            block_ids=self._table,
            samples=True,
            sampling=a_context(
                self._request.sampling,
                self._tokens,
                num_prompt_tokens=len(self._request.prompt_ids),
            ),
        )
        result = self._executor.execute(StepPlan(step=1, revision=1, rows=(row,)))
        self._tokens.append(result.tokens[self._request.request_id].token_id)
        return self._tokens[-1]

    @property
    def _has_begun(self) -> bool:
        return len(self._tokens) > len(self._request.prompt_ids)


def a_simulated_device(
    *,
    num_blocks: int,
    block_size: int,
    num_host_blocks: int = 0,
    costs: ExecutorCosts | None = None,
    clock: VirtualClock | None = None,
) -> SimulatedExecutor:
    """Build a simulated executor; without `costs` copies take no time, steps 10 ms and more."""
    return SimulatedExecutor(
        capacity=Capacity(
            num_blocks=num_blocks, num_host_blocks=num_host_blocks, block_size=block_size
        ),
        vocab_size=VOCAB_SIZE,
        cost=AffineCost(costs or ExecutorCosts(swap_block_seconds=0.0)),
        clock=clock or VirtualClock(),
    )


@dataclass(frozen=True, kw_only=True)
class Quota:
    """A tenant's rights, in blocks.

    Attributes:
        lendable_percent: Share of its unused nominal that others may borrow.
    """

    nominal: int
    cap: int
    lendable_percent: int = 100

    def kept(self, used: int) -> int:
        """Return what nobody may borrow while the tenant holds `used`."""
        unused = max(0, self.nominal - used)
        return unused - unused * self.lendable_percent // 100


@dataclass
class PolicyView:
    """The policy in force, and what undeclared tenants with work were last told.

    Attributes:
        rules: By tenant; of undeclared ones the last.
        tiers: By tenant, likewise.
    """

    num_blocks: int
    block_size: int
    snapshot: PolicySnapshot | None = None
    revision: int = 0
    rules: dict[str, TenantRule] = field(default_factory=dict)
    tiers: dict[str, TierRule] = field(default_factory=dict)
    _declared: dict[str, TenantRule] = field(default_factory=dict)
    _by_name: dict[str, TierRule] = field(default_factory=dict)
    _quotas: dict[str, Quota] = field(default_factory=dict)
    _lent: int = 0

    def adopt(self, snapshot: PolicySnapshot, revision: int) -> None:
        """Put a policy in force."""
        self.snapshot, self.revision = snapshot, revision
        self._declared = {rule.tenant: rule for rule in snapshot.tenants}
        unknown = snapshot.unknown_tenants
        if unknown.action is UnknownAction.ADMIT:
            self._declared[UNKNOWN_TENANT] = TenantRule(
                tenant=UNKNOWN_TENANT,
                policy="",
                tier=unknown.tier,
                weight=unknown.weight,
                max_running=unknown.max_running,
            )
        self._by_name = by_name = {tier.name: tier for tier in snapshot.tiers}
        self.rules |= self._declared
        self.tiers = {name: by_name.get(tier.name, tier) for name, tier in self.tiers.items()}
        self.tiers |= {name: by_name[rule.tier] for name, rule in self._declared.items()}
        self._count_quotas(snapshot)

    def tier_of(self, seen: Seen) -> TierRule:
        """Return the tier that a request is in."""
        return self.tiers[seen.tenant] if seen.lower is None else self._by_name[seen.lower]

    def lower_tier(self, tenant: str, asked: str | None) -> str | None:
        """Return the tier below a tenant's own in which a request is that asks for it, if any."""
        if asked is None or self._by_name[asked].value >= self.tiers[tenant].value:
            return None
        return asked

    def quota(self, tenant: str) -> Quota:
        """Return a tenant's rights; an undeclared one owns nothing."""
        return self._quotas.get(tenant) or Quota(nominal=0, cap=self._lent)

    @property
    def quotas(self) -> dict[str, Quota]:
        """The rights of all declared tenants."""
        return self._quotas

    def room(self, tenant: str) -> int:
        """Return the longest context of a tenant's request, in tokens."""
        quota = self.quota(tenant)
        is_preemptible = self.rules[tenant].preemption.preemptible
        return (quota.cap if is_preemptible else quota.nominal) * self.block_size

    def group(self, tenant: str) -> tuple[int, bool]:
        """Return with whom a tenant's counter is compared."""
        return self.tiers[tenant].value, self.rules[tenant].weight == 0

    def is_held(self, tenant: str) -> bool:
        """Return whether nothing of a tenant is admitted anew."""
        return self.rules[tenant].stop is StopPolicy.HOLD

    def longest_window(self) -> float:
        """Return the longest time for which any request may be held to fill a batch."""
        if self.snapshot is None:
            return 0.0
        tiers = (*self.snapshot.tiers, *self.tiers.values())
        windows = [tier.wait_window_seconds or 0.0 for tier in tiers]
        return max([self.snapshot.batching.wait_window_seconds or 0.0, *windows])

    def refusal(self, request: Request, queue: Sequence[Seen]) -> RejectionCode | None:  # noqa: PLR0911
        """Return why an arrival is refused, or None; `queue` is what its tenant has waiting."""
        rule = self._declared.get(request.tenant)
        if rule is None:
            return RejectionCode.UNKNOWN_TENANT
        if request.tier not in (None, rule.tier, *rule.allowed_tiers):
            return RejectionCode.TIER_NOT_ALLOWED
        if rule.stop in (StopPolicy.DRAIN, StopPolicy.CANCEL):
            return RejectionCode.TENANT_STOPPED
        length = len(request.prompt_ids)
        if length + 1 > self.room(request.tenant) or length > (rule.max_prompt_tokens or length):
            return RejectionCode.PROMPT_TOO_LONG
        tokens = sum(len(seen.tokens) for seen in queue) + length
        if rule.max_queued is not None and len(queue) >= rule.max_queued:
            return RejectionCode.TENANT_QUEUE_FULL
        if rule.max_queued_tokens is not None and tokens > rule.max_queued_tokens:
            return RejectionCode.TENANT_QUEUE_FULL
        return None

    def may_be_shed(self, request: Request, live: Sequence[Seen]) -> bool:
        """Return whether an arrival may be refused for being late: itself, or others above it."""
        rule = self.rules[request.tenant].service
        if rule.sheds and (request.ttft_seconds or rule.ttft_seconds):
            return True
        lower = self.lower_tier(request.tenant, request.tier)
        tier = self.tiers[request.tenant] if lower is None else self._by_name[lower]
        return tier.value < 0 and any(
            self.tier_of(seen).value >= 0 and self.rules[seen.tenant].service.ttft_seconds
            for seen in live
        )

    def _count_quotas(self, snapshot: PolicySnapshot) -> None:
        pool = self.num_blocks
        nominals = {r.tenant: pool * r.kv_nominal_percent // 100 for r in snapshot.tenants}
        own = {
            r.tenant: nominals[r.tenant] - nominals[r.tenant] * r.kv_lendable_percent // 100
            for r in snapshot.tenants
        }
        self._lent = pool - sum(own.values())
        self._quotas = {}
        for rule in snapshot.tenants:
            nominal, limit = nominals[rule.tenant], rule.kv_borrowing_limit_percent
            cap = self._lent + own[rule.tenant]
            if limit is not None:
                cap = min(cap, nominal + pool * limit // 100)
            self._quotas[rule.tenant] = Quota(
                nominal=nominal, cap=max(nominal, cap), lendable_percent=rule.kv_lendable_percent
            )
