"""The invariants of the scheduler, by name, and those that one plan alone can break."""

import enum
from collections.abc import Iterable

from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import PlanRow, StepPlan
from tidegate_testing.scheduler_view import Place, Seen


class Invariant(enum.StrEnum):
    """What holds after every step, in every order of events."""

    BOOKS = "blocks, books and queues agree"
    SOUND_PLANS = "scheduler and executor carry out what they are told"
    PARTITION = "a block is one request's, or shared by equal prefixes of those who may share"
    WRITES = "what is written is nobody else's"
    IN_FLIGHT = "what a copy in flight reads isn't written, what it writes isn't touched"
    FENCES = "a fence opens once and passes once"
    USED = "used blocks are those of tables and copies, so that what ends is free at once"
    HOST = "used host blocks are those of swapped requests"
    CAP = "nobody takes more than its cap"
    LENDING = "what is not lent stays free"
    TOKEN_BUDGET = "a step computes no more tokens than it may"
    PLACES = "the batch has no more requests than it may"
    TENANT_PLACES = "a tenant has no more requests in the batch than it may"
    REVISION = "a step is planned under one policy, the newest"
    ENDED = "no plan contains a request that has ended"
    ROWS = "a row goes on where its request stands"
    STANDING = "a decode stands still for lack of a block, a higher prompt or a higher ITL target"
    OUTPUT = "an output is what it is alone"
    FINISH = "a request ends when its output does"
    MOVES = "requests are where the plans put them"
    SUMS = "every arrival is accounted for"
    CHARGES = "each token is charged once"
    COUNTERS = "no counter falls, and no newcomer gains"
    TIER_ORDER = "no lower tier borrows past a higher one that owns nothing"
    DISPLACEMENT = "only strictly lower tiers are displaced"
    OWN_BLOCKS = "what is a tenant's own is taken by nobody"
    PROTECTION = "no protected request is taken out for one that waits"
    SATISFIED = "nobody is taken out in vain"
    CONSERVATION = "no step is idle while somebody could run"
    REFUSALS = "what can never run is refused, and what can is not"
    TIME_LIMITS = "who is over a time limit is dropped, and nobody else"
    STOPPED = "a tenant that is cancelled has nothing left, and no other is touched"
    LACK = "nobody ends for lack of memory while the policy leaves room"
    CANCEL = "a cancel takes a request out once, wherever it is"
    END = "without arrivals everything ends, and nothing is left over"


class InvariantError(AssertionError):
    """A scheduler broke an invariant.

    Attributes:
        invariant: Which one.
    """

    def __init__(self, invariant: Invariant, found: object) -> None:
        super().__init__(f"{invariant.name}: {invariant.value}; {found}")
        self.invariant = invariant


def require(holds: object, invariant: Invariant, *found: object) -> None:
    """Raise when an invariant doesn't hold; `found` says what was seen instead."""
    if not holds:
        raise InvariantError(invariant, " ".join(map(str, found)))


def check_row(row: PlanRow, seen: Seen, *, block_size: int) -> None:
    """Verify that a row continues its request, and that its table covers it."""
    end = row.start + len(row.token_ids)
    require(row.token_ids and end <= len(seen.tokens), Invariant.ROWS, row)
    require(list(row.token_ids) == seen.tokens[row.start : end], Invariant.ROWS, row, seen.tokens)
    require(row.samples == (end == len(seen.tokens)), Invariant.ROWS, row)
    require(len(row.block_ids) * block_size >= end, Invariant.ROWS, row)
    require(not row.is_decode or (row.samples and seen.num_outputs), Invariant.ROWS, row)
    context = row.sampling
    require(context.params == seen.request.sampling, Invariant.ROWS, row)
    require(list(context.token_ids[:end]) == seen.tokens[:end], Invariant.ROWS, row)
    require(context.num_prompt_tokens == len(seen.request.prompt_ids), Invariant.ROWS, row)
    require(context.stop_token_ids == seen.request.stop_token_ids, Invariant.ROWS, row)
    if seen.computed is not None:
        require(row.start == seen.computed, Invariant.ROWS, row, "computed", seen.computed)
    else:
        # What the prefix cache knew: full blocks, or all but the last token.
        is_found = row.start % block_size == 0 or row.start == len(seen.tokens) - 1
        require(is_found, Invariant.ROWS, row)


def check_tables(running: Iterable[Seen], *, block_size: int) -> dict[int, list[Seen]]:
    """Verify that requests share only what is equal.

    Returns:
        The holders of every block.
    """
    holders: dict[int, list[Seen]] = {}
    first: dict[int, tuple[Seen, int]] = {}
    for seen in running:
        table = list(seen.table or ())
        require(len(set(table)) == len(table), Invariant.PARTITION, seen.request.request_id, table)
        for index, block in enumerate(table):
            holders.setdefault(block, []).append(seen)
            other, at = first.setdefault(block, (seen, index))
            if other is not seen:
                end = (index + 1) * block_size
                is_equal = (
                    at == index
                    and (other.tenant == seen.tenant or (other.has_shared and seen.has_shared))
                    and min(len(other.tokens), len(seen.tokens)) >= end
                    and other.tokens[:end] == seen.tokens[:end]
                )
                both = (other.request.request_id, seen.request.request_id)
                require(is_equal, Invariant.PARTITION, "block", block, "is of both", both)
    return holders


def check_writes(
    plan: StepPlan,
    holders: dict[int, list[Seen]],
    *,
    read: set[int],
    written: set[int],
    block_size: int,
) -> None:
    """Verify that rows and copies write only to blocks of their own.

    Args:
        plan: What is to be done.
        holders: Of every block.
        read: Blocks that copies in flight read: others may, too, but nobody may write them.
        written: Blocks that they write: those may be touched by nobody.
        block_size: Tokens per block.
    """
    sources = {copy.source for copy in plan.copies}
    for copy in plan.copies:
        is_still = written.isdisjoint(copy) and copy.target not in read
        require(is_still, Invariant.IN_FLIGHT, copy)
        is_own = len(holders.get(copy.target, ())) <= 1 and copy.target not in sources
        require(is_own, Invariant.WRITES, copy)
    for row in plan.rows:
        touched = written.intersection(row.block_ids)
        require(not touched, Invariant.IN_FLIGHT, row.request_id, "uses", sorted(touched))
        for index in range(row.start // block_size, (row.end - 1) // block_size + 1):
            block = row.block_ids[index]
            require(block not in read, Invariant.IN_FLIGHT, row.request_id, "writes", block)
            is_own = len(holders[block]) == 1 and block not in sources
            require(is_own, Invariant.WRITES, row.request_id, "writes block", block)


def check_budget(plan: StepPlan, limits: EngineLimits) -> None:
    """Verify a plan's tokens; decodes beyond the budget are allowed, and nothing beside them."""
    decodes = sum(row.is_decode for row in plan.rows)
    prefill = sum(len(row.token_ids) for row in plan.rows) - decodes
    most = min(limits.prefill_chunk_max, max(0, limits.max_batched_tokens - decodes))
    require(prefill <= most, Invariant.TOKEN_BUDGET, prefill, "prompt tokens of at most", most)


def check_places(plan: StepPlan, before: int, after: int, limits: EngineLimits) -> None:
    """Verify the size of the batch; while a lowered limit drains, it only shrinks."""
    most = max(before, min(limits.max_num_seqs, limits.max_batched_tokens))
    require(after <= most, Invariant.PLACES, after, "of at most", most, plan.admitted)
    ids = [row.request_id for row in plan.rows]
    require(len(set(ids)) == len(ids), Invariant.ROWS, "two rows of one request", ids)


def in_batch(place: Place) -> bool:
    """Tell whether a request holds a place in the batch."""
    return place in (Place.RUNNING, Place.ARRIVING)
