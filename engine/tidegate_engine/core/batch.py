"""From the running requests to the rows of one step: which prompts go on, and how far.

Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve",
OSDI 2024, sections 4.1 to 4.3: decodes first, then as much of the prompts as the step has room for.
Here several prompts may be half read at a time, so that a short one need not wait for a long one.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Ordered
from itertools import groupby
from typing import NamedTuple

from tidegate_engine.core.kv_memory import KvMemory
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import PlanRow
from tidegate_engine.core.running import DecodeLoad, Running
from tidegate_engine.core.sequence import Sequence
from tidegate_engine.core.step_time import StepFeatures, StepTimeModel
from tidegate_engine.core.tenants import Tenant
from tidegate_policies.fairness import PROMPT_TOKEN_COST

ROUNDING = 1e-6
"""Parts of a token below which two sums are the same."""


def prefill_budget(
    load: DecodeLoad,
    prompts: Collection[Sequence],
    limits: EngineLimits,
    step_times: StepTimeModel,
) -> int:
    """Return how many prompt tokens the next step may compute beside its decodes.

    As many as keep the step within the tightest inter-token latency target of the decodes, but
    never less than the chunk minimum: decodes must not starve prefill. `places` keeps so much free.
    """
    room = max(0, limits.max_batched_tokens - load.num_decodes)
    budget = min(room, limits.prefill_chunk_max)
    if load.tightest_itl is None:
        return budget
    within_target = step_times.prefill_budget(
        target_seconds=load.tightest_itl,
        decodes=load.num_decodes,
        context_tokens=load.context_tokens,
        start=max((seq.computed_tokens for seq in prompts), default=0),
    )
    return min(budget, max(within_target, limits.prefill_chunk_min))


def places(limits: EngineLimits) -> int:
    """Return how many requests may run: a step must have tokens for all of them, and for prompts.

    Up to a quarter of them is the prompts', so that decodes never starve prefill.
    """
    for_prompts = min(limits.prefill_chunk_min, limits.max_batched_tokens // 4)
    return max(1, min(limits.max_num_seqs, limits.max_batched_tokens - for_prompts))


class Batch(NamedTuple):
    """Who is computed in one step, and how far.

    Attributes:
        decodes: Who gets an output token.
        load: What they bring into the step.
        shares: Tokens of each prompt.
    """

    decodes: Ordered[Sequence]
    load: DecodeLoad
    shares: dict[Sequence, int]

    @property
    def features(self) -> StepFeatures:
        """What the time of the step depends on."""
        prefill_tokens = prefill_pairs = 0
        for seq, num_tokens in self.shares.items():
            prefill_tokens += num_tokens
            prefill_pairs += num_tokens * seq.computed_tokens + num_tokens * (num_tokens + 1) // 2
        return StepFeatures(
            prefill_tokens=prefill_tokens,
            decodes=self.load.num_decodes,
            context_tokens=self.load.context_tokens,
            prefill_pairs=prefill_pairs,
        )


def compose(
    decodes: Ordered[Sequence],
    load: DecodeLoad,
    prompts: Collection[Sequence],
    *,
    limits: EngineLimits,
    step_times: StepTimeModel,
) -> Batch:
    """Return the step of these decodes with as much of these prompts as it has room for.

    Args:
        decodes: Get an output token each.
        load: What they bring into the step.
        prompts: Those being read.
        limits: Of the engine, or of its policy.
        step_times: What steps take.
    """
    if not prompts:
        return Batch(decodes, load, {})
    budget = prefill_budget(load, prompts, limits, step_times)
    ordered = in_service_order(prompts)
    shares = share_out(ordered, budget=budget, max_partial=limits.max_partial_prefills)
    return Batch(decodes, load, shares)


def share_out(
    prefilling: Ordered[Sequence], *, budget: int, max_partial: int
) -> dict[Sequence, int]:
    """Divide a step's prompt tokens among the prompts that are being read.

    A lower tier gets what a higher one leaves. In a tier, the first few prompts have parts of the
    budget of their own, by their tenants' virtual counters: none stands still beside one whose
    tenant was served more. What they leave goes first to whom it lets finish, the shortest first,
    then to the first in order.

    Args:
        prefilling: In order of service.
        budget: Prompt tokens of the step.
        max_partial: How many have a part of their own.
    """
    shares: dict[Sequence, int] = {}
    for _, tier in groupby(prefilling, key=lambda seq: seq.tenant.tier_value):
        shares |= _share_in_tier(list(tier), budget - sum(shares.values()), max_partial)
    return shares


def _share_in_tier(
    prefilling: list[Sequence], budget: int, max_partial: int
) -> dict[Sequence, int]:
    shares = dict.fromkeys(prefilling, 0) | _parts(prefilling[:max_partial], budget)
    left = budget - sum(shares.values())
    for seq in sorted(prefilling, key=lambda s: s.pending_tokens - shares[s]):
        wanted = seq.pending_tokens - shares[seq]
        if wanted > left:
            break
        shares[seq] += wanted
        left -= wanted
    for seq in prefilling:
        more = min(seq.pending_tokens - shares[seq], left)
        shares[seq] += more
        left -= more
    return shares


def _parts(prompts: list[Sequence], budget: int) -> dict[Sequence, int]:
    """Divide a budget so that the tenants' virtual counters end as level as it can make them.

    The least served get all, until they are level with the next; those who are level get tokens by
    weight. Tenants of weight 0 get what the others leave.
    """
    together = [seq for seq in prompts if seq.tenant.group == prompts[0].tenant.group]
    prompts_of = Counter(seq.tenant for seq in together)
    rates = {seq: (seq.tenant.rule.weight or 1) / prompts_of[seq.tenant] for seq in together}
    parts = dict.fromkeys(together, 0.0)
    behind = sorted((seq.tenant.key[1], index) for index, seq in enumerate(together))
    level, left = behind[0][0], float(budget)
    served: list[Sequence] = []
    while left >= 1 and (behind or served):
        while behind and behind[0][0] <= level:
            served.append(together[behind.pop(0)[1]])
        rises = [(seq.pending_tokens - parts[seq]) / rates[seq] for seq in served]
        rate = sum(rates[seq] for seq in served)
        if served:
            rises.append(left / rate)
        if behind:
            rises.append((behind[0][0] - level) / PROMPT_TOKEN_COST)
        rise = min(rises)
        for seq in served:
            parts[seq] += rise * rates[seq]
        level, left = level + rise * PROMPT_TOKEN_COST, left - rise * rate
        served = [seq for seq in served if parts[seq] < seq.pending_tokens - ROUNDING]
    return {seq: int(part + ROUNDING) for seq, part in parts.items()}


def in_service_order(prompts: Collection[Sequence]) -> list[Sequence]:
    """Return the prompts being read: higher tiers first, then by turns of the tenants.

    Each tenant's first prompt comes before any tenant's second, that of the least served tenant
    before the others'; else by admission.
    """
    by_admission = sorted(prompts, key=lambda seq: seq.admission)
    turns: Counter[Tenant] = Counter()
    ranked: list[tuple[int, int, tuple[bool, float], int, Sequence]] = []
    for seq in by_admission:
        turns[seq.tenant] += 1
        turn = (turns[seq.tenant], seq.tenant.key, seq.admission)
        ranked.append((-seq.tenant.tier_value, *turn, seq))
    return [seq for *_, seq in sorted(ranked)]


def ready_decodes(
    running: Running, memory: KvMemory, lacking: Iterable[Sequence]
) -> list[Sequence]:
    """Return the decodes that have the KV block for their next token.

    Who lacked one when all grew gets it if it has become free since: what was kept for somebody
    may have been given up.

    Args:
        running: The batch.
        memory: What gives the block.
        lacking: Who may lack one, in order; they need not run any more.
    """
    still = {seq for seq in lacking if seq in running.decoding and not memory.try_grow(seq)}
    return [seq for seq in running.decoding if seq not in still] if still else [*running.decoding]


def describe_batch(batch: Batch) -> list[PlanRow]:
    """Return a row for every decode, then the prefill chunks.

    Decodes that need more tokens than the step's budget are computed all the same: one that stood
    still would hold its KV blocks for nothing.
    """
    new_row = tuple.__new__  # what PlanRow() calls, at half its time
    rows = [
        new_row(
            PlanRow,
            (
                seq.request_id,
                seq.num_tokens - 1,
                (seq.token_ids[-1],),
                seq.block_table,
                True,
                seq.sampling,
                True,
                False,
            ),
        )
        for seq in batch.decodes
    ]
    for seq, num_tokens in batch.shares.items():
        if num_tokens:
            start, end = seq.computed_tokens, seq.computed_tokens + num_tokens
            rows.append(
                PlanRow(
                    request_id=seq.request_id,
                    start=start,
                    token_ids=seq.token_ids[start:end],
                    block_ids=seq.block_table,
                    samples=end == seq.num_tokens,
                    sampling=seq.sampling,
                )
            )
    return rows
