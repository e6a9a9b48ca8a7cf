"""Who holds which KV block: the block pools, the quotas, the watermarks and the copies in flight.

Blocks in flight are not free. A block that a swap reads or writes stays with the swap until its
fence has passed, whatever becomes of its request meanwhile.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Ordered
from itertools import chain
from typing import NamedTuple

from tidegate_engine.core.block_pool import BlockPool
from tidegate_engine.core.flights import Flight, Flights
from tidegate_engine.core.payers import Payers
from tidegate_engine.core.plan import BlockCopy, SwapCopy
from tidegate_engine.core.sequence import Phase, Sequence
from tidegate_engine.core.tenants import Tenant
from tidegate_policies.admission import Watermark, WatermarkGate
from tidegate_policies.quota import KvLedger, KvQuota
from tidegate_policies.rules import WatermarkRule
from tidegate_policies.snapshot import PolicySnapshot


class Need(NamedTuple):
    """Device blocks that a request has to get before it can run.

    Attributes:
        additional: Blocks that have to be free for it.
        shared: Blocks of its context that its tenant holds already.
    """

    additional: int
    shared: int


class KvMemory:
    """The KV blocks of one engine and the rules by which sequences get them."""

    def __init__(
        self, *, num_blocks: int, block_size: int, num_host_blocks: int, seconds_per_block: float
    ) -> None:
        """Start with every block free and nobody's own.

        Args:
            num_blocks: On the device.
            block_size: Tokens in a block.
            num_host_blocks: In host memory.
            seconds_per_block: What a swap takes for each, to begin with.
        """
        self.pool = BlockPool(num_blocks=num_blocks, block_size=block_size)
        self.host = BlockPool(num_blocks=num_host_blocks, block_size=block_size)
        self.ledger = KvLedger(num_blocks)
        self.gate = WatermarkGate(WatermarkRule(), num_blocks=num_blocks)
        self.payers = Payers(self.pool, self.ledger)
        self.copies: list[BlockCopy] = []
        self.swap_out: list[SwapCopy] = []
        self.swap_in: list[SwapCopy] = []
        self.swapped_out_blocks = 0
        self.swapped_in_blocks = 0
        self._pinned: list[tuple[Tenant, int]] = []
        self.flights = Flights(seconds_per_block)
        self._num_reserved = 0
        self._num_incoming = 0
        self._relieved: dict[str, None] = {}

    def apply_policy(self, snapshot: PolicySnapshot) -> None:
        """Put quotas and watermarks in force; what runs is not touched here."""
        self.ledger.set_quotas(
            {
                rule.tenant: KvQuota(
                    nominal_percent=rule.kv_nominal_percent,
                    borrowing_limit_percent=rule.kv_borrowing_limit_percent,
                    lendable_percent=rule.kv_lendable_percent,
                )
                for rule in snapshot.tenants
            }
        )
        self.gate.apply_rule(snapshot.watermarks)

    # -- levels --------------------------------------------------------------------------------

    @property
    def num_settled(self) -> int:
        """Used blocks, without those that a swap-out will free by itself."""
        return self.pool.num_used - self.flights.num_leaving

    def observe(self) -> Watermark:
        """Hold the usage of now against the watermarks; once a step, for it moves their state."""
        return self.gate.observe(self.num_settled)

    def borrowed(self, tenant: str) -> int:
        """Return what `tenant` holds above its nominal, without what a swap-out will free."""
        return max(0, self.ledger.borrowed(tenant) - self.flights.num_leaving_of(tenant))

    def cap_tokens_of(self, tenant: Tenant) -> int:
        """Return the longest context that a request of `tenant` could ever hold.

        One that may not be preempted has to fit into what is its tenant's own.
        """
        ledger, name = self.ledger, tenant.name
        blocks = ledger.cap(name) if tenant.is_preemptible else ledger.nominal(name)
        return blocks * self.pool.block_size

    def free_for(self, seq: Sequence) -> int:
        """Return the free blocks that are not kept for somebody else."""
        return self.pool.num_free - self._num_reserved + seq.reserved_blocks

    def free_in_time(self, seq: Sequence) -> int:
        """Return the blocks that are free for `seq` once all swap-outs in flight have ended."""
        kept = self._num_reserved + self._num_incoming
        own = seq.reserved_blocks + seq.incoming_blocks
        return self.pool.num_free + self.flights.num_leaving - kept + own

    def need(self, seq: Sequence) -> Need:
        """Return what `seq` has to get for its context as it is now.

        The source of a copy on write isn't counted: it is held for a step, and only if there is
        room for it beside the rest.
        """
        found, _ = self._found(seq)
        shared = self.payers.count_held(seq, found)
        return Need(self.pool.blocks_for(seq.num_tokens) - shared, shared)

    def count_lost(self, seq: Sequence, victims: Iterable[Sequence]) -> int:
        """Return how many blocks more `seq` has to get if these give theirs back.

        What only they hold of its context is no longer its tenant's then. Of a prefix in common
        with other tenants all that they hold counts, which may be too much, but never too little.
        """
        own = (v.block_table for v in victims if v.tenant.name == seq.tenant.name)
        returned = Counter(chain.from_iterable(own))
        if not returned:
            return 0
        is_common, references = seq.keys.is_common, self.pool.references
        found = [block for block in self._found(seq)[0] if block in returned]
        return sum(is_common or returned[block] == references(block) for block in found)

    # -- running sequences -----------------------------------------------------------------------

    def try_grow(self, seq: Sequence) -> bool:
        """Give a running sequence the block that its newest token needs, if it may have it.

        Returns:
            False, and nothing has changed, when it may not.
        """
        if not self.ledger.can_take(seq.tenant.name, 1, free=self.free_for(seq)):
            return False
        block = self.pool.allocate(1)
        seq.block_table += block
        seq.capacity += self.pool.block_size
        self.payers.take(seq, block, taken=1)
        if seq.reserved_blocks:
            self.unreserve(seq, 1)
        return True

    def begin(self, seq: Sequence) -> int:
        """Give a sequence the blocks of its whole context, to be computed; ask before.

        Returns:
            Tokens at the start whose keys and values were found in the prefix cache.
        """
        found, copied = self._found(seq)
        if copied is not None:
            self._pin(seq, copied)
        self._take(seq, found)
        seq.computed_tokens = len(found) * self.pool.block_size
        if copied is not None:
            self.copies.append(BlockCopy(copied, seq.block_table[len(found)]))
            seq.computed_tokens = seq.num_tokens - 1
        return seq.computed_tokens

    def register(self, seq: Sequence) -> None:
        """Let the prefix cache know the full blocks of what is computed."""
        num_full = min(seq.computed_tokens // self.pool.block_size, len(seq.block_table))
        keys = seq.keys.upto(seq.token_ids, num_full, start=seq.num_registered)
        for block, key in zip(seq.block_table[seq.num_registered : num_full], keys, strict=True):
            self.pool.register(block, key)
        seq.num_registered = max(seq.num_registered, num_full)

    def distrust(self, seq: Sequence) -> None:
        """Let nobody read again what was computed of `seq`."""
        self.pool.unregister(seq.block_table)
        seq.computed_tokens = 0

    def release(self, seq: Sequence) -> int:
        """Take back everything that `seq` holds; what is in flight, once its fence has passed.

        Returns:
            Device blocks that are free by it now.
        """
        if seq.reserved_blocks or seq.incoming_blocks:
            self.unreserve(seq)
        if seq.fence:
            self.flights.note_ended(seq.fence, self.pool.count_freed(seq.block_table))
            return 0
        if not seq.admission:  # it was never given a block: the quick way for what only waited
            return 0
        if seq.host_table:
            self.host.release(seq.host_table)
            seq.host_table = []
        if not seq.block_table:
            return 0
        self.register(seq)
        freed = self._give_back(seq.tenant, seq.block_table)
        _empty(seq)
        seq.computed_tokens = 0
        return freed

    # -- swapping ---------------------------------------------------------------------------------

    def has_host_room(self, seq: Sequence) -> bool:
        """Tell whether the computed context of `seq` fits into the free host blocks."""
        return self.pool.blocks_for(seq.computed_tokens) <= self.host.num_free

    def begin_swap_out(self, seq: Sequence, beneficiary: Sequence | None, *, wanted: int) -> None:
        """Start to move the computed context of a running sequence to the host; ask before.

        Args:
            seq: Whose.
            beneficiary: For whom the device blocks are kept once they are free.
            wanted: Blocks that it needs in all.
        """
        num_computed = self.pool.blocks_for(seq.computed_tokens)
        self.unreserve(seq)
        self.register(seq)
        leaving, unused = seq.block_table[:num_computed], seq.block_table[num_computed:]
        self._give_back(seq.tenant, unused)
        _empty(seq)
        seq.host_table = self.host.allocate(num_computed)
        num_leaving = self.pool.count_freed(leaving)
        flight = self.flights.begin(seq, leaving, is_out=True, num_leaving=num_leaving)
        if beneficiary is not None:
            flight.beneficiary = beneficiary
            flight.num_promised = min(self.lacking(beneficiary, wanted), num_leaving)
            beneficiary.incoming_blocks += flight.num_promised
            self._num_incoming += flight.num_promised
        self.swap_out.append(flight.copy)
        self.swapped_out_blocks += num_computed

    def begin_swap_in(self, seq: Sequence) -> bool:
        """Give a swapped sequence its device blocks and start to fill them; ask before.

        Returns:
            Whether there is anything to copy: what the prefix cache still has isn't.
        """
        found, _ = self._found(seq)
        self._take(seq, found)
        num_computed = self.pool.blocks_for(seq.computed_tokens)
        self.host.release(seq.host_table[: len(found)])
        seq.host_table = seq.host_table[len(found) :]
        if not seq.host_table:
            return False
        target = seq.block_table[len(found) : num_computed]
        flight = self.flights.begin(seq, target, is_out=False, num_leaving=0)
        self.swap_in.append(flight.copy)
        self.swapped_in_blocks += len(seq.host_table)
        return True

    def pass_fence(self, fence: int, now: float) -> Sequence | None:
        """Note that a copy is complete.

        Returns:
            The sequence whose copy it was, alive or ended; None for a fence unknown here.
        """
        self.payers.advance(now)
        flight = self.flights.end(fence, now)
        if flight is None:
            return None
        seq = flight.seq
        if flight.is_out:
            self._land_out(flight)
        else:
            self.host.release(seq.host_table)
            seq.host_table = []
        if seq.phase is Phase.ENDED:
            self.release(seq)
        return seq

    def begin_step(self, now: float) -> None:
        """Forget what the last plan asked to be copied."""
        self.payers.advance(now)
        self.flights.now = now
        self.copies, self.swap_out, self.swap_in = [], [], []

    def end_step(self) -> None:
        """Let go of the sources of copies on write, which are done now."""
        for tenant, block in self._pinned:
            self._give_back(tenant, [block])
        self._pinned = []

    def take_relieved(self) -> list[str]:
        """Return the tenants that hold less than at the last call, in order."""
        relieved, self._relieved = list(self._relieved), {}
        return relieved

    # -- reservations ------------------------------------------------------------------------------

    def lacking(self, seq: Sequence, wanted: int) -> int:
        """Return how many of the blocks that `seq` wants are not kept for it yet."""
        return max(0, wanted - seq.reserved_blocks - seq.incoming_blocks)

    def reserve(self, seq: Sequence, blocks: int) -> None:
        """Keep free blocks for `seq`."""
        seq.reserved_blocks += blocks
        self._num_reserved += blocks

    def keep_free(self, seq: Sequence, wanted: int) -> None:
        """Keep of the blocks that are free now what `seq` lacks of those that it wants."""
        free = self.pool.num_free - self._num_reserved
        self.reserve(seq, min(self.lacking(seq, wanted), free))

    def unreserve(self, seq: Sequence, blocks: int | None = None) -> None:
        """Stop keeping so many blocks for `seq`, or all."""
        returned = min(seq.reserved_blocks, seq.reserved_blocks if blocks is None else blocks)
        seq.reserved_blocks -= returned
        self._num_reserved -= returned
        if blocks is None and seq.incoming_blocks:
            self._num_incoming -= seq.incoming_blocks
            seq.incoming_blocks = 0
            for flight in self.flights:
                if flight.beneficiary is seq:
                    flight.beneficiary = None

    def what_if(self, released: Mapping[str, int]) -> KvLedger:
        """Return the ledger as it would be if these tenants held so many blocks less.

        What swap-outs in flight will free counts as free already.
        """
        both = self.flights.leaving_of
        both.update(released)
        return self.ledger.what_if(both)

    # -- verification ------------------------------------------------------------------------------

    def check_invariants(self, sequences: Collection[Sequence]) -> None:
        """Verify block tables against pools, ledger and copies.

        Raises:
            AssertionError: They disagree.
        """
        device, host = Counter[int](), Counter[int]()
        used: dict[str, set[int]] = {}

        def hold(tenant: str, blocks: Iterable[int]) -> None:
            device.update(blocks)
            used.setdefault(tenant, set()).update(blocks)

        for tenant, block in self._pinned:
            hold(tenant.name, [block])
        for seq in (*sequences, *self._ended_in_flight()):
            hold(seq.tenant.name, seq.block_table)
            host.update(seq.host_table)
            if seq.capacity != len(seq.block_table) * self.pool.block_size:
                raise AssertionError(f"{seq.request_id} has room for {seq.capacity} tokens")
        self.flights.check_invariants()
        self.payers.common.check_invariants()
        for flight in self.flights:
            if flight.is_out:
                hold(flight.seq.tenant.name, flight.copy.device_blocks)
        self.pool.check_invariants(device)
        self.host.check_invariants(host)
        self.ledger.check_invariants({name: len(blocks) for name, blocks in used.items()})
        self._check_kept(sequences)

    def _check_kept(self, sequences: Collection[Sequence]) -> None:
        kept = sum(s.reserved_blocks for s in sequences), sum(s.incoming_blocks for s in sequences)
        if kept != (self._num_reserved, self._num_incoming):
            raise AssertionError(
                f"{kept} blocks are kept now and later, booked {self._num_reserved} and"
                f" {self._num_incoming}"
            )
        if self._num_reserved > self.pool.num_free:
            raise AssertionError(f"{self._num_reserved} blocks are reserved, but not all are free")

    def _ended_in_flight(self) -> list[Sequence]:
        """Return the requests that have ended while a copy of theirs was in flight."""
        return [flight.seq for flight in self.flights if flight.seq.phase is Phase.ENDED]

    # -- inside ------------------------------------------------------------------------------------

    def _take(self, seq: Sequence, found: list[int]) -> None:
        """Build the block table of a whole context on blocks that were found in the cache."""
        missing = self.pool.blocks_for(seq.num_tokens) - len(found)
        taken = self.pool.share(found)  # first, so that no allocation forgets them
        seq.block_table = found + self.pool.allocate(missing)
        seq.capacity = len(seq.block_table) * self.pool.block_size
        seq.num_registered = len(found)
        self.payers.take(seq, seq.block_table, taken=taken + missing)
        self.unreserve(seq)

    def _found(self, seq: Sequence) -> tuple[list[int], int | None]:
        """Look the context of a sequence that holds no device block up in the prefix cache.

        Returns:
            The blocks it can share, and the one to copy: when all of a context is cached, its last
            token has to be computed all the same, and would be written into a block that others
            read. A copy needs its source beside its target.
        """
        size = self.pool.block_size
        if seq.host_table:
            return self._match(seq, seq.computed_tokens // size), None
        found = self._match(seq, seq.num_tokens // size)
        if not found or len(found) * size < seq.num_tokens:
            return found, None
        copied = found.pop()
        total = self.pool.blocks_for(seq.num_tokens) - self.payers.count_held(seq, found)
        pinned = 1 - self.payers.count_held(seq, [copied])
        has_room = self.ledger.can_take(seq.tenant.name, total + pinned, free=self.free_for(seq))
        return found, copied if has_room else None  # else that block is computed anew

    def _match(self, seq: Sequence, num_blocks: int) -> list[int]:
        """Return the cached blocks of a context's beginning.

        Not those that only a swap-out holds: they are promised to others. By other keys than those
        of its arrival if its tenant shares its prefixes since then, or no more.
        """
        if seq.keys.root != seq.tenant.root:
            seq.keys = seq.tenant.block_keys(self.pool.block_size)
        found = self.pool.match(seq.keys.upto(seq.token_ids, num_blocks))
        if self.flights:
            for i, block in enumerate(found):
                if self.flights.only_holds(block, self.pool.references(block)):
                    return found[:i]
        return found

    def _give_back(self, tenant: Tenant, blocks: Ordered[int]) -> int:
        freed = self.pool.release(blocks)
        self.payers.give_back(tenant, blocks, freed=freed)
        self._relieved[tenant.name] = None
        return freed

    def _pin(self, seq: Sequence, block: int) -> None:
        """Hold the source of a copy on write until the copy is done."""
        self.payers.take(seq, [block], taken=self.pool.share([block]))
        self._pinned.append((seq.tenant, block))

    def _land_out(self, flight: Flight) -> None:
        freed = self._give_back(flight.seq.tenant, flight.copy.device_blocks)
        if (beneficiary := flight.beneficiary) is not None:
            beneficiary.incoming_blocks -= flight.num_promised
            self._num_incoming -= flight.num_promised
            self.reserve(beneficiary, min(freed, flight.num_promised))


def _empty(seq: Sequence) -> None:
    """Give a sequence that holds no device block a new table: plans refer to the old one."""
    seq.block_table = []
    seq.capacity = seq.num_registered = 0
