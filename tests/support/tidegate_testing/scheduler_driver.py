"""Random events for a scheduler, denser than any search would draw them, and alike by seed."""

import random
from collections.abc import Sequence

from tidegate_engine.core.limits import EngineLimits
from tidegate_testing.scheduler_machine import DECODE_SECONDS, Sizes, World
from tidegate_testing.scheduler_policies import TENANTS, PolicyDraft, Trait, a_drawn_request


class RandomDriver:
    """Drives one world: mostly arrivals and steps, a few of everything else."""

    def __init__(
        self, seed: int, *, given: Sequence[Trait], drawn: Sequence[Trait], checks_books: bool
    ) -> None:
        """Choose an engine and a policy.

        Args:
            seed: The same seed gives the same events.
            given: Traits of every policy.
            drawn: Traits that come and go.
            checks_books: Whether the scheduler verifies itself, too.
        """
        self._random = random.Random(seed)
        self._decode_seconds = DECODE_SECONDS[seed % len(DECODE_SECONDS)]
        self._given = set(given)
        self._drawn = drawn
        self._draft = PolicyDraft()
        self._draft.traits |= dict.fromkeys(given)
        self.world = World(sizes=self._sizes(), checks_books=checks_books)
        self._change_policy(self._random.randrange(min(8, len(drawn))))
        self.world.step()

    def run(self, num_events: int) -> None:
        """Let so many things happen, and then all end."""
        events = [
            *[self._arrive] * 4,
            *[self._step] * 6,
            self._cancel,
            self._finish,
            self._pass_time,
            self._break_a_step,
            self._interfere,
        ]
        for _ in range(num_events):
            self._random.choice(events)()
        self.world.drain()

    def _sizes(self) -> Sizes:
        choose = self._random.choice
        return Sizes(
            num_blocks=choose([12, 16, 24]),
            num_host_blocks=choose([5, 40, 40]),
            swap_block_seconds=choose([0.0, 0.0005, 0.02]),
            decode_seconds=self._decode_seconds,
            limits=EngineLimits(
                max_num_seqs=choose([2, 4, 8]),
                max_batched_tokens=choose([6, 16, 40]),
                prefill_chunk_min=1,
            ),
        )

    def _change_policy(self, num_changes: int) -> None:
        changes = self._random.sample(self._drawn, num_changes)
        self.world.change_policy(
            self._draft.toggle([trait for trait in changes if trait not in self._given])
        )

    def _arrive(self) -> None:
        choose = self._random.choice
        tenant = choose(TENANTS)
        policy = self.world.policy
        rule = None if policy is None else policy.tenant_rules.get(tenant)
        request = a_drawn_request(
            tenant=tenant,
            tier=choose([None, *rule.allowed_tiers]) if rule else None,
            family=choose([0, 0, 1]),
            length=choose([4, 4, 8, 8, 12, 16, 21, 30, 44, 60]),
            tail=choose([(), (), (7,), (8, 9)]),
            output=choose([1, 5, 20, 30, 40]),
            stops=choose([False, False, True]),
            ttft=choose([None, 0.05]),
        )
        for _ in range(choose([1, 1, 3])):
            self.world.submit(request)

    def _step(self) -> None:
        for _ in range(self._random.randrange(1, 12)):
            self.world.step()

    def _cancel(self) -> None:
        if every := list(self.world.witness.requests.values()):
            self.world.cancel(self._random.choice(every[-8:]))

    def _finish(self) -> None:
        if live := self.world.witness.live:
            self.world.finish(self._random.choice(live))

    def _pass_time(self) -> None:
        self.world.clock.advance(self._random.choice([0.001, 0.01, 0.1, 0.6]))

    def _break_a_step(self) -> None:
        plan = self.world.plan()
        if plan.rows:
            self.world.abandon(plan)
        else:
            self.world.execute(plan)

    def _interfere(self) -> None:
        plan = self.world.plan()
        self._cancel()
        self._change_policy(self._random.randrange(3))
        self.world.execute(plan)
