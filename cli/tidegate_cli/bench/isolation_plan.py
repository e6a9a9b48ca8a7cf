"""Who sends what in `tidegate bench isolation`: tenants, misbehaviour, and sizes of the run."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tidegate_cli.bench.isolation_load import BRONZE, GOLD, SILVER, Label, Planned, Traffic

ROGUE = "rogue"
"""The tenant that misbehaves."""

QUEUED, HUGE, HANGS_UP, NEVER_READS = "queued", "huge_prompts", "hangs_up", "never_reads"
MISBEHAVIOURS = (QUEUED, HUGE, HANGS_UP, NEVER_READS)

_EVER = 1e9


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes that fit the hardware of a fleet.

    Attributes:
        gold_ttft_seconds: Gold's target; silver's is 5 times, bronze's 10 times as long.
        lead_in_seconds: Before anything is counted.
        seconds: Counted, of each side.
        rounds: In which the sides take turns, each for its part of these. The speed of a machine
            changes while it is measured, that of a simulation doesn't.
        misbehaving_seconds: Counted, with each way of misbehaving.
        max_running: Of the tenant that misbehaves and of its likes: less than a third of a batch.
        quantum_tokens: Output tokens that a request of silver or bronze gets before it can be taken
            out: less than a typical answer has.
        queued: Requests that a tenant queues at once to misbehave.
        queued_choices: How many of these it sends in one call.
        huge_prompt_tokens: Of each of its huge prompts.
        unread_output_tokens: That it asks for and never reads.
    """

    gold_ttft_seconds: float
    lead_in_seconds: float
    seconds: float
    misbehaving_seconds: float
    max_running: int
    quantum_tokens: int
    queued: int
    huge_prompt_tokens: int
    unread_output_tokens: int
    queued_choices: int = 1
    rounds: int = 1

    @property
    def round_seconds(self) -> float:
        """How long each side has its turn, what isn't counted included."""
        return self.lead_in_seconds + self.seconds / self.rounds


def overloaded(scale: Scale) -> list[Label]:
    """Return the tenants that together ask for four times what the fleet can give.

    Gold asks for half of the fleet, three silver tenants of different weights for more than ever
    is left of it, each, and bronze for still more.
    """
    silver = Label(
        tenant=SILVER,
        tier=SILVER,
        load=0.8,
        ttft_seconds=5.0 * scale.gold_ttft_seconds,
        itl_factor=2.0,
        sheds=True,
        quantum_tokens=scale.quantum_tokens,
    )
    return [
        gold_of(scale, load=0.5),
        *(
            replace(silver, tenant=f"{SILVER}-{weight}", weight=weight)
            for weight in (300, 200, 100)
        ),
        Label(
            tenant=BRONZE,
            tier=BRONZE,
            load=1.1,
            ttft_seconds=10.0 * scale.gold_ttft_seconds,
            itl_factor=4.0,
            sheds=True,
            quantum_tokens=scale.quantum_tokens,
        ),
    ]


def gold_of(scale: Scale, *, load: float) -> Label:
    """Return the tenant that comes first, and has KV of its own."""
    return Label(
        tenant=GOLD,
        tier=GOLD,
        load=load,
        ttft_seconds=scale.gold_ttft_seconds,
        nominal_percent=40,
    )


def beside_rogue(scale: Scale) -> list[Label]:
    """Return tenants that ask for less than is theirs, and the one that will ask for more.

    They ask for half of it on average: in a minute of a record one may ask for half as much again,
    and beside huge prompts an engine does less than it does of the record.

    Nobody is displaced for somebody of the same tier, so that long answers could hold every place
    in a batch, and huge prompts all KV: `maxRunning` keeps a tenant from the one, KV of the others'
    own from the other.
    """
    silver = Label(
        tenant=SILVER,
        tier=SILVER,
        load=0.12,
        ttft_seconds=5.0 * scale.gold_ttft_seconds,
        itl_factor=2.0,
        nominal_percent=13,
        max_running=scale.max_running,
        quantum_tokens=scale.quantum_tokens,
    )
    return [
        gold_of(scale, load=0.3),
        replace(silver, tenant=f"{SILVER}-1"),
        replace(silver, tenant=f"{SILVER}-2"),
        replace(silver, tenant=ROGUE, load=0.1, ttft_seconds=_EVER),
    ]


def shedding(scale: Scale, *, load: float) -> list[Label]:
    """Return three equal tenants that ask for so much together, and are refused what comes late."""
    return [
        Label(
            tenant=f"{SILVER}-{number}",
            tier=SILVER,
            load=load / 3,
            ttft_seconds=5.0 * scale.gold_ttft_seconds,
            sheds=True,
        )
        for number in (1, 2, 3)
    ]


def misbehave(
    way: str, *, traffic: Traffic, scale: Scale, rogue: Label, capacity: float, seed: int
) -> Sequence[Planned]:
    """Return what the rogue tenant sends, besides what it always does.

    Args:
        way: One of `MISBEHAVIOURS`.
        traffic: Whose lengths its ordinary requests have.
        scale: When it begins, and how far it goes.
        rogue: The tenant.
        capacity: Of the fleet, in requests a second.
        seed: Draws when it hangs up.
    """
    begin, seconds = scale.lead_in_seconds, scale.misbehaving_seconds
    if way == QUEUED:
        choices = scale.queued_choices
        many = traffic.requests_of(rogue, rate=scale.queued / choices / seconds, seconds=seconds)
        return [
            replace(one, request_id=f"{way}-{one.request_id}", at_seconds=begin, choices=choices)
            for one in many
        ]
    loads = {HUGE: 0.5, HANGS_UP: 4.0, NEVER_READS: 1.0}
    rng = random.Random(f"{seed}/{way}")
    sent = traffic.requests_of(rogue, rate=loads[way] * capacity, seconds=seconds)
    changes = {
        HUGE: lambda one: replace(one, prompt_tokens=scale.huge_prompt_tokens),
        HANGS_UP: lambda one: replace(
            one, leaves_after_seconds=rng.expovariate(1 / scale.gold_ttft_seconds)
        ),
        NEVER_READS: lambda one: replace(
            one, output_tokens=scale.unread_output_tokens, is_read=False
        ),
    }
    return [
        replace(
            changes[way](one),
            request_id=f"{way}-{one.request_id}",
            at_seconds=begin + one.at_seconds,
        )
        for one in sent
    ]
