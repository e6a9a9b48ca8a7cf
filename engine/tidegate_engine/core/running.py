"""The batch: which requests run, in which kind of step, and what that holds of each tier."""

from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple, TypeVar

from tidegate_engine.core.sequence import Phase, Sequence
from tidegate_engine.core.tenants import Tenant
from tidegate_policies.fairness import OUTPUT_TOKEN_COST

_Key = TypeVar("_Key")


class DecodeLoad(NamedTuple):
    """What decodes bring into a step.

    Attributes:
        num_decodes: How many there are.
        context_tokens: Context that they read, added up.
        tightest_itl: The least inter-token latency target among them, in seconds.
    """

    num_decodes: int
    context_tokens: int
    tightest_itl: float | None


def load_of(decodes: Collection[Sequence]) -> DecodeLoad:
    """Return what some decodes bring into a step."""
    targets = (tenant.rule.service.itl_seconds for tenant in {seq.tenant for seq in decodes})
    return DecodeLoad(
        num_decodes=len(decodes),
        context_tokens=sum(seq.num_tokens for seq in decodes),
        tightest_itl=min((target for target in targets if target is not None), default=None),
    )


class Running:
    """The requests in the batch, in order of admission, and those on their way in from the host.

    Attributes:
        decoding: Those whose next step computes one output token.
        prefilling: Those whose prompt, or context after a recompute, is being read.
        arriving: Those whose KV is being copied from the host: they hold a place in the batch.
        context_by_tier: Context of the decodes of each tier, by its value.
        version: Grows whenever somebody joins, leaves or begins to come in.
        decodes_by_tenant: How many of the decodes each tenant has.
        decodes_by_tier: And how many each tier has.
        targets_by_tier: Inter-token latency targets of the decodes of each tier, in seconds, and
            how many have each.
        committed_cost: Service that the requests of each tier are expected to take yet.
    """

    def __init__(self) -> None:
        self.decoding: dict[Sequence, None] = {}
        self.prefilling: dict[Sequence, None] = {}
        self.arriving: dict[Sequence, None] = {}
        self.version = 0
        self.context_by_tier: Counter[int] = Counter()
        self.decodes_by_tenant: Counter[Tenant] = Counter()
        self.decodes_by_tier: Counter[int] = Counter()
        self.committed_cost: dict[int, float] = {}
        self.targets_by_tier: Counter[tuple[int, float]] = Counter()
        self._by_tier: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield everybody who runs, in order of admission."""
        both = [*self.decoding, *self.prefilling]
        both.sort(key=lambda seq: seq.admission)
        return iter(both)

    @property
    def num_places(self) -> int:
        """Places in the batch that are taken."""
        return len(self.decoding) + len(self.prefilling) + len(self.arriving)

    @property
    def context_tokens(self) -> int:
        """Context of all decodes together."""
        return sum(self.context_by_tier.values())

    @property
    def load(self) -> DecodeLoad:
        """What all decodes together bring into a step."""
        tightest_itl = min((target for _, target in self.targets_by_tier), default=None)
        return DecodeLoad(len(self.decoding), self.context_tokens, tightest_itl)

    def has_below(self, tier_value: int) -> bool:
        """Tell whether anybody of a lower tier runs."""
        return any(value < tier_value for value in self._by_tier)

    def add(self, seq: Sequence) -> None:
        """Take a request into the batch."""
        tenant = seq.tenant
        self.version += 1
        seq.phase = Phase.RUNNING
        tenant.running += 1
        tenant.admitted_prompt_tokens += seq.uncharged_prompt_tokens
        if not tenant.is_preemptible:
            tenant.committed_blocks += seq.most_blocks
        self._by_tier[tenant.tier_value] += 1
        self.commit_cost(tenant.tier_value, seq.expected_cost)
        if seq.is_decoding:
            self._add_decode(seq)
        else:
            self.prefilling[seq] = None

    def expect(self, seq: Sequence) -> None:
        """Keep a place for a request whose KV is being copied from the host."""
        self.version += 1
        seq.tenant.arriving += 1
        self.arriving[seq] = None

    def stop_expecting(self, seq: Sequence) -> None:
        """Give the place back that was kept for a request; it may have none."""
        if seq in self.arriving:
            self.version += 1
            seq.tenant.arriving -= 1
            del self.arriving[seq]

    def end_prefill(self, seq: Sequence) -> None:
        """Note that the whole context of a request is computed."""
        del self.prefilling[seq]
        self._add_decode(seq)

    def remove(self, seq: Sequence) -> None:
        """Take a request out of the batch; the caller gives it its next phase."""
        tenant = seq.tenant
        self.version += 1
        tenant.running -= 1
        tenant.admitted_prompt_tokens -= seq.uncharged_prompt_tokens
        if not tenant.is_preemptible:
            tenant.committed_blocks -= seq.most_blocks
        _count_down(self._by_tier, tenant.tier_value)
        self.commit_cost(tenant.tier_value, -_outstanding_cost(seq))
        if seq in self.prefilling:
            del self.prefilling[seq]
            return
        del self.decoding[seq]
        self.context_by_tier[tenant.tier_value] -= seq.num_tokens
        _count_down(self.decodes_by_tenant, tenant)
        _count_down(self.decodes_by_tier, tenant.tier_value)
        target = tenant.rule.service.itl_seconds
        if target is not None:
            _count_down(self.targets_by_tier, (tenant.tier_value, target))

    def commit_cost(self, tier_value: int, cost: float) -> None:
        """Add to the service that a tier's requests are expected to take yet."""
        self.committed_cost[tier_value] = self.committed_cost.get(tier_value, 0.0) + cost

    def commit_fewer(self, seq: Sequence, blocks: int) -> None:
        """Note that a request will need so many blocks fewer at its longest; it may not run."""
        if seq.phase is Phase.RUNNING and not seq.tenant.is_preemptible:
            seq.tenant.committed_blocks -= blocks

    def recount(self) -> None:
        """Count anew after tiers, targets and protections have changed."""
        self.version += 1
        self.committed_cost = {}
        for seq in self:
            seq.tenant.committed_blocks = 0
        for seq in self:
            self.commit_cost(seq.tenant.tier_value, _outstanding_cost(seq))
            if not seq.tenant.is_preemptible:
                seq.tenant.committed_blocks += seq.most_blocks
        self._by_tier = Counter(seq.tenant.tier_value for seq in self)
        self.decodes_by_tenant = Counter(seq.tenant for seq in self.decoding)
        self.decodes_by_tier = Counter(seq.tenant.tier_value for seq in self.decoding)
        self.context_by_tier = Counter()
        for seq in self.decoding:
            self.context_by_tier[seq.tenant.tier_value] += seq.num_tokens
        self.targets_by_tier = Counter(
            (seq.tenant.tier_value, target)
            for seq in self.decoding
            if (target := seq.tenant.rule.service.itl_seconds) is not None
        )

    def check_invariants(self) -> None:
        """Verify the counts.

        Raises:
            AssertionError: They are wrong.
        """
        by_tier, targets, context = self._by_tier, self.targets_by_tier, self.context_by_tier
        if Counter(s.tenant for s in self.arriving) != Counter(
            {s.tenant: s.tenant.arriving for s in self.arriving}
        ):
            raise AssertionError("the tenants' requests on their way in are miscounted")
        if Counter(seq.tenant for seq in self.decoding) != self.decodes_by_tenant:
            raise AssertionError("the tenants' decodes are miscounted")
        if Counter(seq.tenant.tier_value for seq in self.decoding) != self.decodes_by_tier:
            raise AssertionError("the tiers' decodes are miscounted")
        version = self.version
        self.recount()
        self.version = version
        counted = (by_tier, targets, context)
        if counted != (self._by_tier, self.targets_by_tier, self.context_by_tier):
            raise AssertionError(f"running requests are counted as {counted}")
        self._check_phases()

    def _check_phases(self) -> None:
        for seq in self.decoding:
            if not seq.is_decoding or seq.phase is not Phase.RUNNING:
                raise AssertionError(f"{seq.request_id} is no decode")
        for seq in self.prefilling:
            if seq.is_decoding or seq.phase is not Phase.RUNNING:
                raise AssertionError(f"{seq.request_id} is no prefill")
        for seq in self.arriving:
            if seq.phase is not Phase.SWAPPED:
                raise AssertionError(f"{seq.request_id} is not on its way in")

    def _add_decode(self, seq: Sequence) -> None:
        self.decoding[seq] = None
        self.context_by_tier[seq.tenant.tier_value] += seq.num_tokens
        self.decodes_by_tenant[seq.tenant] += 1
        self.decodes_by_tier[seq.tenant.tier_value] += 1
        target = seq.tenant.rule.service.itl_seconds
        if target is not None:
            self.targets_by_tier[seq.tenant.tier_value, target] += 1


def _count_down(counter: Counter[_Key], key: _Key) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


def _outstanding_cost(seq: Sequence) -> float:
    """Return the service that a running request was expected to take and hasn't yet."""
    output_tokens = seq.num_tokens - seq.admitted_tokens
    return seq.expected_cost - seq.charged_cost - OUTPUT_TOKEN_COST * output_tokens
