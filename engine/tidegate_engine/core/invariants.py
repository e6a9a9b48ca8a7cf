"""What must hold of all live requests together, whatever has happened."""

from collections.abc import Collection, Iterable

from tidegate_engine.core.books import Books
from tidegate_engine.core.kv_time import HeldBlocks
from tidegate_engine.core.sequence import Phase, Sequence
from tidegate_engine.core.tenants import Tenant


def check_books(
    books: Books, sequences: Collection[Sequence], joining: Collection[Sequence]
) -> None:
    """Verify all of a scheduler's books, each by itself and against each other.

    Args:
        books: The scheduler's.
        sequences: All live requests.
        joining: Those that join the batch with the next step, back from the host.

    Raises:
        AssertionError: They disagree.
    """
    books.memory.check_invariants(sequences)
    _check_kv_time(books)
    _check_committed(books)
    books.running.check_invariants()
    books.tenants.check_invariants()
    books.forecast.lengths.check_invariants()
    _check_sequences(sequences, books.tenants)
    landed = {seq for seq in books.running.arriving if not seq.fence}
    if landed != set(joining):
        raise AssertionError(f"{len(landed)} requests are back, {len(joining)} join")


def _check_kv_time(books: Books) -> None:
    """Verify that what tenants held KV blocks for is what the engine did."""
    held = HeldBlocks()
    known = [tenant.totals for tenant in books.tenants.own.values()]
    for totals in (books.tenants.gone, *known):
        held.absorb(totals.held)
    payers = books.memory.payers
    clock = payers.clock
    counted = held.blocks, held.block_microseconds(clock.now)
    if counted != (payers.num_paid, clock.block_microseconds):
        raise AssertionError(f"tenants paid for {counted}, the engine has {clock}")


def _check_committed(books: Books) -> None:
    """Verify that tenants know the worst case of their requests that may not be taken out."""
    for tenant in books.tenants:
        own = [] if tenant.is_preemptible else [s for s in books.running if s.tenant is tenant]
        worst = sum(seq.most_blocks for seq in own)
        if worst != tenant.committed_blocks:
            raise AssertionError(
                f"{tenant.name} counts with {tenant.committed_blocks} blocks, not {worst}"
            )


def _check_sequences(sequences: Collection[Sequence], tenants: Iterable[Tenant]) -> None:
    """Verify that tenants count their requests rightly, and that these agree with themselves."""
    for seq in sequences:
        if seq.num_tokens != len(seq.token_ids):
            raise AssertionError(f"{seq.request_id} miscounts its tokens")
        if seq.phase is Phase.WAITING and (seq.block_table or seq.host_table):
            raise AssertionError(f"{seq.request_id} waits and holds blocks")
    for tenant in tenants:
        own = [seq for seq in sequences if seq.tenant is tenant]
        phases = [seq.phase for seq in own]
        counted = [phases.count(p) for p in (Phase.WAITING, Phase.RUNNING, Phase.SWAPPED)]
        if counted != [tenant.waiting, tenant.running, tenant.swapped]:
            raise AssertionError(f"{tenant.name} has {counted} requests by phase")
        owed = sum(s.uncharged_prompt_tokens for s in own if s.phase is Phase.RUNNING)
        if owed != tenant.admitted_prompt_tokens:
            raise AssertionError(f"{tenant.name} is to pay {owed} prompt tokens")
