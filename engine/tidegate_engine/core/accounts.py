"""Who is charged for a step, and what its requests got."""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Ordered

from tidegate_engine.core.books import Books
from tidegate_engine.core.plan import SampledToken, StepPlan
from tidegate_engine.core.request import FinishReason, TokenOutput
from tidegate_engine.core.sequence import Phase, Sequence
from tidegate_engine.core.tenants import Tenant
from tidegate_policies.fairness import OUTPUT_TOKEN_COST


class Accounts:
    """Books executed steps: computed prompt tokens per chunk, output tokens per step."""

    def __init__(self, books: Books, *, live: Mapping[str, Sequence]) -> None:
        """Work on the scheduler's own state."""
        self._live = live
        self._memory = books.memory
        self._running = books.running
        self._tenants = books.tenants
        self._shares = books.shares
        self._price = books.forecast.prompt_price

    def commit_rows(
        self,
        plan: StepPlan,
        decodes: Ordered[Sequence],
        sampled: Ordered[SampledToken | None],
        now: float,
    ) -> tuple[list[TokenOutput], list[Sequence]]:
        """Book what was computed and append what was sampled.

        Args:
            plan: What was executed.
            decodes: Whose decodes the first rows are.
            sampled: The token of each row that samples, in order; None for one that failed.
            now: On the scheduler's clock.

        Returns:
            The new tokens, and the requests that end with them.
        """
        self._memory.payers.advance(now)
        num_decodes = len(decodes)
        outputs, ended = _append_all(decodes, sampled[:num_decodes])
        rest = iter(sampled[num_decodes:])
        served, by_tier = self._served_decodes(decodes, num_rows=len(outputs))
        self._running.context_by_tier.update(by_tier)
        read: list[Sequence] = []
        first_tokens: list[SampledToken | None] = []
        for row in plan.rows[num_decodes:]:
            token = next(rest) if row.samples else None
            seq = self._live.get(row.request_id)
            if seq is None:  # cancelled while the step was computed
                continue
            self._book_prefill(seq, len(row.token_ids), now)
            if row.samples:
                read.append(seq)
                first_tokens.append(token)
        first_outputs, ended_at_first = _append_all(read, first_tokens)
        for seq in read:
            served[seq.tenant] += 1
            by_tier[seq.tenant.tier_value] += 1
            self._memory.register(seq)
            self._running.end_prefill(seq)
        self._charge_output(served)
        for seq in read:
            self._tenants.follow(seq.tenant)
        for value, num_tokens in by_tier.items():
            self._charge_tier(value, OUTPUT_TOKEN_COST * num_tokens, now)
        return outputs + first_outputs, ended + ended_at_first

    def _served_decodes(
        self, decodes: Ordered[Sequence], *, num_rows: int
    ) -> tuple[Counter[Tenant], Counter[int]]:
        """Return how many decodes of each tenant, and of each tier, the step has served."""
        running = self._running
        if num_rows == len(running.decoding):
            return running.decodes_by_tenant.copy(), running.decodes_by_tier.copy()
        # Somebody stood still, or was cancelled meanwhile.
        served = Counter(seq.tenant for seq in decodes if seq.phase is Phase.RUNNING)
        by_tier = Counter[int]()
        for tenant, num_tokens in served.items():
            by_tier[tenant.tier_value] += num_tokens
        return served, by_tier

    def _book_prefill(self, seq: Sequence, num_tokens: int, now: float) -> None:
        """Charge computed prompt tokens, each once; what a recompute repeats is free."""
        tenant = seq.tenant
        start, end = seq.computed_tokens, seq.computed_tokens + num_tokens
        unpaid = max(start, seq.charged_tokens)
        fresh = max(0, min(end, len(seq.request.prompt_ids)) - unpaid)
        repeated = max(0, min(end, seq.charged_tokens) - start)
        seq.computed_tokens = end
        # An output token is charged when it is sampled; computing its keys belongs to that.
        seq.charged_tokens = max(seq.charged_tokens, end)
        tenant.totals.prompt_tokens += fresh
        tenant.totals.recomputed_tokens += repeated
        if fresh:
            cost = self._price.of(unpaid, fresh)
            tenant.totals.service += cost
            tenant.admitted_prompt_tokens -= fresh
            seq.charged_cost += cost
            weight = tenant.rule.weight
            tenant.service += cost
            self._tenants.counters.charge(tenant.account, cost, weight=weight)
            self._charge_tier(tenant.tier_value, cost, now)
        if seq.is_decoding:  # a recompute, of which one token is left
            self._running.end_prefill(seq)

    def _charge_output(self, served: Mapping[Tenant, int]) -> None:
        """Charge the output tokens of this step, at once for each tenant."""
        for tenant, num_tokens in served.items():
            totals, cost = tenant.totals, OUTPUT_TOKEN_COST * num_tokens
            totals.output_tokens += num_tokens
            totals.service += cost
            tenant.service += cost
        self._tenants.counters.charge_output(served)

    def _charge_tier(self, value: int, cost: float, now: float) -> None:
        self._shares.charge(value, cost, now)
        self._running.commit_cost(value, -cost)


def _append_all(
    sequences: Ordered[Sequence], sampled: Ordered[SampledToken | None]
) -> tuple[list[TokenOutput], list[Sequence]]:
    """Append to each request what was sampled for it, and tell which of them end with it.

    Whoever has failed, or ended while the step was computed, gets nothing.
    """
    outputs: list[TokenOutput] = []
    ended: list[Sequence] = []
    running = Phase.RUNNING
    new_output = tuple.__new__  # what TokenOutput() calls, at half its time
    for seq, token in zip(sequences, sampled, strict=True):
        if token is None or seq.phase is not running:
            continue
        token_id = token[0]
        seq.computed_tokens = length = seq.num_tokens
        length += 1
        seq.num_tokens = length
        seq.token_ids.append(token_id)
        if token_id in seq.stop_token_ids:
            reason = FinishReason.STOP
            ended.append(seq)
        elif length >= seq.max_tokens:
            reason = FinishReason.LENGTH
            ended.append(seq)
        else:
            reason = None
        outputs.append(new_output(TokenOutput, (seq.request_id, token, reason)))
    return outputs, ended
