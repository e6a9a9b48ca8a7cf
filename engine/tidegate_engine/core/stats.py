"""The numbers of a scheduler at a step boundary."""

from collections.abc import Mapping
from typing import Any

from tidegate_engine.core.books import Books
from tidegate_engine.core.kv_memory import KvMemory
from tidegate_engine.core.kv_time import MICROSECONDS
from tidegate_engine.core.request import AccountStats, SchedulerStats, TenantStats
from tidegate_engine.core.tenants import Tenant, TenantTotals


def describe(
    books: Books,
    *,
    step: int,
    revision: int,
    arrivals: int,
    rejected: int,
    stop_seconds: Mapping[str, float],
) -> SchedulerStats:
    """Count everything; linear in the tenants."""
    memory, tenants = books.memory, books.tenants
    return SchedulerStats(
        step=step,
        revision=revision,
        arrivals=arrivals,
        rejected=rejected,
        running=len(books.running),
        waiting=sum(tenant.waiting for tenant in tenants),
        swapped=sum(tenant.swapped for tenant in tenants),
        kv_blocks=memory.pool.num_blocks,
        kv_used_blocks=memory.pool.num_used,
        kv_cached_blocks=memory.pool.num_cached,
        host_blocks=memory.host.num_blocks,
        host_used_blocks=memory.host.num_used,
        swap_out_blocks=memory.swapped_out_blocks,
        swap_in_blocks=memory.swapped_in_blocks,
        watermark=memory.gate.state,
        kv_seconds=memory.payers.clock.block_microseconds / MICROSECONDS,
        block_size=memory.pool.block_size,
        waiting_tokens=sum(tenant.queue.num_tokens for tenant in tenants),
        gone=TenantStats(kv_used_blocks=tenants.gone.held.blocks, **_grown(tenants.gone, memory)),
        tenants={
            name: _describe_tenant(own, memory, stop_seconds.get(name))
            for name, own in tenants.own.items()
        },
        accounts={one.account: AccountStats(one.service, one.competes) for one in tenants},
    )


def _describe_tenant(tenant: Tenant, memory: KvMemory, stop_seconds: float | None) -> TenantStats:
    return TenantStats(
        stop_seconds=stop_seconds,
        running=sum(one.running for one in tenant.in_tiers),
        waiting=sum(one.waiting for one in tenant.in_tiers),
        swapped=sum(one.swapped for one in tenant.in_tiers),
        kv_used_blocks=memory.ledger.used(tenant.name),
        kv_borrowed_blocks=memory.ledger.borrowed(tenant.name),
        virtual_counter=tenant.counters.value(tenant.account),
        **_grown(tenant.totals, memory),
    )


def _grown(totals: TenantTotals, memory: KvMemory) -> dict[str, Any]:
    # Not `asdict`, which copies deeply: this is done for every tenant at every heartbeat.
    grown = {name: getattr(totals, name) for name in totals.__slots__}
    held_for = grown.pop("held").block_microseconds(memory.payers.clock.now)
    return grown | {
        "kv_seconds": held_for / MICROSECONDS,
        "preemptions": dict(totals.preemptions),
        "preempted": totals.preemptions.total(),
    }
