"""From the running requests to the rows of one step."""

from collections.abc import Iterable

from tidegate_engine.core.plan import PlanRow
from tidegate_engine.core.sequence import Sequence


def describe_batch(running: Iterable[Sequence], *, token_budget: int) -> tuple[PlanRow, ...]:
    """Return all decodes, then prefill chunks in order of admission, within the budget.

    More decodes than the budget has tokens are computed all the same: one that stood still would
    hold its KV blocks for nothing.
    """
    by_kind = sorted(running, key=lambda seq: not seq.is_decoding)  # stable: keeps the order
    token_budget = max(token_budget, sum(1 for seq in by_kind if seq.is_decoding))
    rows: list[PlanRow] = []
    for seq in by_kind:
        num_tokens = min(seq.pending_tokens, token_budget)
        if num_tokens:
            rows.append(_row(seq, num_tokens))
            token_budget -= num_tokens
    return tuple(rows)


def _row(seq: Sequence, num_tokens: int) -> PlanRow:
    start, end = seq.computed_tokens, seq.computed_tokens + num_tokens
    return PlanRow(
        request_id=seq.request_id,
        start=start,
        token_ids=seq.token_ids[start:end],
        block_ids=tuple(seq.block_table),
        samples=end == len(seq.token_ids),
        is_decode=seq.is_decoding,
        sampling=seq.request.sampling,
    )
