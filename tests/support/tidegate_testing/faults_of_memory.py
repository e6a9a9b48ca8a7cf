"""Faults in what the scheduler does with KV blocks, on the device and on the host."""

from collections.abc import Callable
from typing import Any

from tidegate_engine.core.block_pool import BlockPool
from tidegate_engine.core.flights import Flight, Flights
from tidegate_engine.core.kv_memory import KvMemory
from tidegate_engine.core.running import Running
from tidegate_engine.core.sequence import Sequence
from tidegate_policies.quota import KvLedger
from tidegate_testing.scheduler_invariants import Invariant
from tidegate_testing.scheduler_policies import TENANTS
from tidegate_testing.seeded_faults import ALL_SWAP, HALF_LENT, OWNERS, TWO_TIERS, Patch, fault


@fault(Invariant.BOOKS, checks_books=True)
def the_context_of_decodes_is_miscounted(monkeypatch: Patch) -> None:
    end_prefill = Running.end_prefill

    def end_and_miscount(running: Running, seq: Sequence) -> None:
        end_prefill(running, seq)
        running.context_by_tier[0] += 1

    monkeypatch.setattr(Running, "end_prefill", end_and_miscount)


@fault(Invariant.USED)
def a_released_block_is_forgotten(monkeypatch: Patch) -> None:
    release = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda pool, blocks: release(pool, blocks[:-1]))


@fault(Invariant.SOUND_PLANS)
def a_request_is_released_twice(monkeypatch: Patch) -> None:
    release = BlockPool.release
    monkeypatch.setattr(
        BlockPool, "release", lambda pool, blocks: release(pool, [*blocks, *blocks])
    )


@fault(Invariant.PARTITION)
def tenants_have_no_salt(monkeypatch: Patch) -> None:
    monkeypatch.setattr("tidegate_engine.core.tenant_table.root_key", lambda _: b"salt")


@fault(Invariant.WRITES)
def a_shared_block_is_written_without_a_copy(monkeypatch: Patch) -> None:
    begin = KvMemory.begin

    def begin_without_copy(memory: KvMemory, seq: Sequence) -> int:
        count = len(memory.copies)
        found = begin(memory, seq)
        for copy in memory.copies[count:]:
            seq.block_table[seq.block_table.index(copy.target)] = copy.source
        del memory.copies[count:]
        return found

    monkeypatch.setattr(KvMemory, "begin", begin_without_copy)


@fault(Invariant.IN_FLIGHT)
def blocks_are_free_before_their_copy_has_ended(monkeypatch: Patch) -> None:
    swap_out, land = KvMemory.begin_swap_out, KvMemory._land_out

    def swap_out_at_once(memory: KvMemory, *args: Any, **kwargs: Any) -> None:
        swap_out(memory, *args, **kwargs)
        land(memory, list(memory.flights)[-1])

    monkeypatch.setattr(KvMemory, "begin_swap_out", swap_out_at_once)
    monkeypatch.setattr(KvMemory, "_land_out", lambda *_: None)


@fault(Invariant.USED)
def a_fence_that_has_passed_is_not_noticed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(KvMemory, "pass_fence", lambda *_: None)


@fault(Invariant.FENCES)
def two_copies_have_one_fence(monkeypatch: Patch) -> None:
    begin = Flights.begin

    def begin_again(flights: Flights, *args: Any, **kwargs: Any) -> Flight:
        flights._fences = 0
        return begin(flights, *args, **kwargs)

    monkeypatch.setattr(Flights, "begin", begin_again)


@fault(Invariant.MOVES, *ALL_SWAP, *TWO_TIERS)
def a_swap_in_does_not_wait_for_the_swap_out(monkeypatch: Patch) -> None:
    swap_out = KvMemory.begin_swap_out

    def swap_out_without_fence(memory: KvMemory, seq: Sequence, *args: Any, **kw: Any) -> None:
        swap_out(memory, seq, *args, **kw)
        seq.fence = 0

    monkeypatch.setattr(KvMemory, "begin_swap_out", swap_out_without_fence)


@fault(Invariant.HOST)
def host_blocks_of_what_ends_are_lost(monkeypatch: Patch) -> None:
    release = KvMemory.release

    def forget_host(memory: KvMemory, seq: Sequence) -> int:
        if not seq.fence:
            seq.host_table = []
        return release(memory, seq)

    monkeypatch.setattr(KvMemory, "release", forget_host)


def _can_take(*, cap: bool, kept: bool) -> Callable[..., bool]:
    def can_take(ledger: KvLedger, tenant: str, blocks: int, *, free: int) -> bool:
        after = ledger.used(tenant) + blocks
        left = free - (ledger.kept_from(tenant) if kept else 0)
        return blocks <= left and (not cap or after <= ledger.cap(tenant))

    return can_take


@fault(Invariant.CAP, drawn=[(tenant, "borrows 40") for tenant in TENANTS])
def caps_are_ignored(monkeypatch: Patch) -> None:
    monkeypatch.setattr(KvLedger, "can_take", _can_take(cap=False, kept=True))


@fault(Invariant.LENDING, *OWNERS, *HALF_LENT)
def what_is_not_lent_is_taken(monkeypatch: Patch) -> None:
    monkeypatch.setattr(KvLedger, "can_take", _can_take(cap=True, kept=False))
