"""Watches a scheduler from outside: told of every call and its answer, it says what is wrong."""

from collections.abc import Iterable, Iterator
from math import inf

from tidegate_engine.core.decisions import Decision, Verdict
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import StepPlan, StepResult
from tidegate_engine.core.request import (
    FinishReason,
    Rejection,
    RejectionCode,
    Request,
    SchedulerStats,
    TokenOutput,
)
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.core.sequence import Phase
from tidegate_policies.rules import StopPolicy
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.scheduler_books import Books
from tidegate_testing.scheduler_fairness import Fairness
from tidegate_testing.scheduler_invariants import (
    Invariant,
    check_budget,
    check_places,
    check_row,
    check_tables,
    check_writes,
    in_batch,
    require,
)
from tidegate_testing.scheduler_view import Alone, Flight, Place, PolicyView, Seen

_PHASES = {
    Place.WAITING: Phase.WAITING,
    Place.RUNNING: Phase.RUNNING,
    Place.SWAPPED: Phase.SWAPPED,
    Place.ARRIVING: Phase.SWAPPED,
    Place.ENDED: None,
}
_MOVES = (Verdict.ADMITTED, Verdict.RESUMED, Verdict.PREEMPTED, Verdict.ENDED)


class Witness:
    """Follows requests, blocks and copies by what the scheduler says, and checks it at once.

    Attributes:
        requests: Every accepted one.
        view: The policy in force.
    """

    def __init__(
        self, scheduler: Scheduler, *, num_blocks: int, block_size: int, limits: EngineLimits
    ) -> None:
        self.requests: dict[str, Seen] = {}
        self.view = PolicyView(num_blocks, block_size)
        self._scheduler = scheduler
        self._limits = limits
        self._block_size = block_size
        self._mailbox: tuple[PolicySnapshot, int] | None = None
        self._flights: dict[int, Flight] = {}
        self._last_fence = 0
        self._books = Books(self.view)
        self._fairness = Fairness(self.view)
        self._live: dict[str, Seen] = {}
        self._begun: set[str] = set()
        self._landed: list[str] = []
        self._is_open = False

    @property
    def live(self) -> list[Seen]:
        """Requests that have not ended, in order of arrival."""
        return list(self._live.values())

    # -- events ----------------------------------------------------------------------------------

    def submitted(self, request: Request, rejection: Rejection | None, now: float) -> None:
        """An arrival was answered."""
        queue = [s for s in self.live if s.tenant == request.tenant and not s.was_admitted]
        expected = self.view.refusal(request, queue)
        found = rejection and rejection.code
        if found is RejectionCode.SHED and expected is None:
            require(self.view.may_be_shed(request, self.live), Invariant.REFUSALS, request)
            return
        require(found == expected, Invariant.REFUSALS, request, found, "instead of", expected)
        if rejection is not None:
            return
        rule = self.view.rules[request.tenant]
        room = self.view.room(request.tenant) + 1 - len(request.prompt_ids)
        limit = min(request.max_output_tokens, room, rule.max_output_tokens or room)
        seen = Seen(
            request=request,
            arrived_at=request.came_at(now),
            revision=self.view.revision,
            limit=limit,
            least_limit=limit,
            tokens=list(request.prompt_ids),
            alone=Alone(request, block_size=self._block_size),
            lower=self.view.lower_tier(request.tenant, request.tier),
            has_shared=rule.shares_prefixes,
        )
        if seen.lower is None:
            counter = self._scheduler.stats().tenants[seen.tenant].virtual_counter
            self._fairness.check_join(seen.tenant, counter, self.live)
        self._books.arrive()
        self.requests[request.request_id] = self._live[request.request_id] = seen
        self._settle()

    def cancelled(self, request_id: str, phase: Phase | None) -> None:
        """A cancel was answered."""
        seen = self.requests[request_id]
        require(phase is _PHASES[seen.place], Invariant.CANCEL, request_id, seen.place, phase)
        if phase is not None:
            self._end(seen, "cancelled")
        self._settle()

    def finished(self, request_id: str, *, was_alive: bool) -> None:
        """A request was ended by a stop string."""
        seen = self.requests[request_id]
        require(was_alive == (seen.place is not Place.ENDED), Invariant.CANCEL, request_id)
        if was_alive:
            self._end(seen, "finished")
        self._settle()

    def policy_handed(self, snapshot: PolicySnapshot, revision: int) -> None:
        """A policy was left for the next plan."""
        self._mailbox = (snapshot, revision)
        in_force = self._scheduler.revision
        require(in_force == self.view.revision, Invariant.REVISION, in_force)

    # -- steps -----------------------------------------------------------------------------------

    def planned(self, plan: StepPlan, now: float) -> None:
        """A step was planned."""
        self._is_open = plan.is_executable
        planning = self._fairness.begin(plan, now, self.live)
        places_before = sum(in_batch(seen.place) for seen in self.live)
        self._adopt(plan)
        self._check_expired(plan, now)
        admitted = self._join()
        preempted = []
        for decision in plan.decisions:
            if decision.verdict not in _MOVES:
                continue  # who has ended by itself, and who waits
            seen = self._named(decision.request_id)
            if decision.verdict in (Verdict.ADMITTED, Verdict.RESUMED):
                admitted += self._admit(seen, decision, plan)
            elif decision.verdict is Verdict.PREEMPTED:
                self._fairness.check_victim(planning, decision, self._live)
                preempted.append(self._preempt(seen, plan))
            elif decision.verdict is Verdict.ENDED:
                self._fairness.check_lack(seen, planning)
                self._end(seen, "finished")
        require(tuple(admitted) == plan.admitted, Invariant.MOVES, admitted, plan.admitted)
        require(tuple(preempted) == plan.preempted, Invariant.MOVES, preempted, plan.preempted)
        self._begin_swaps(plan)
        self._check_rows(plan)
        check_budget(plan, self._limits_in_force)
        places = sum(in_batch(seen.place) for seen in self.live)
        check_places(plan, places_before, places, self._limits_in_force)
        stats = self._scheduler.stats()
        moved = {d.tenant for d in plan.decisions if d.verdict in _MOVES}
        self._books.check_quotas(stats, self.live, moved=moved)
        self._fairness.check_plan(planning, self.live)
        self._settle(stats)

    def committed(self, plan: StepPlan, result: StepResult, outputs: Iterable[TokenOutput]) -> None:
        """A step was executed and committed."""
        self._is_open = False
        given = {output.request_id: output for output in outputs}
        expected = [r.request_id for r in plan.rows if r.samples and r.request_id in self._live]
        require(list(given) == expected, Invariant.OUTPUT, list(given), "for", expected)
        for row in plan.rows:
            seen = self._live.get(row.request_id)
            if seen is None:
                continue
            self._books.compute(seen, row)
            if row.samples:
                self._append(seen, given[row.request_id])
        for fence in result.passed_fences:
            self._pass(fence)
        self._settle()

    def abandoned(self, plan: StepPlan, dropped: Iterable[str]) -> None:
        """A step could not be executed: its requests are lost, and its swaps have ended."""
        self._is_open = False
        swaps = (*plan.swap_out, *plan.swap_in)
        ids = [r.request_id for r in plan.rows] + [swap.request_id for swap in swaps]
        expected = [i for i in dict.fromkeys(ids) if i in self._live]
        missing = [i for i in expected if i not in set(dropped)]
        require(not missing, Invariant.CANCEL, "kept", missing)
        for request_id in dropped:
            self._end(self._named(request_id), "cancelled")
        for swap in swaps:
            self._pass(swap.fence)
        self._settle()

    def ended(self) -> None:
        """Nothing is left to be done."""
        stats = self._scheduler.stats()
        left = (stats.running, stats.waiting, stats.swapped)
        blocks = (stats.kv_used_blocks, stats.host_used_blocks)
        require(left == (0, 0, 0) and blocks == (0, 0), Invariant.END, left, blocks)
        require(not self._live and not self._flights, Invariant.END, list(self._live))
        require(not self._scheduler.has_work, Invariant.END, "the scheduler has work")

    # -- what plans say --------------------------------------------------------------------------

    @property
    def _limits_in_force(self) -> EngineLimits:
        snapshot = self.view.snapshot
        return self._limits if snapshot is None else self._limits.under(snapshot.batching)

    def _named(self, request_id: str) -> Seen:
        """Return a live request that a plan names."""
        require(request_id in self._live, Invariant.ENDED, request_id)
        return self._live[request_id]

    def _adopt(self, plan: StepPlan) -> None:
        stopped: list[str] = []
        if self._mailbox is not None:
            snapshot, revision = self._mailbox
            self._mailbox = None
            self._fairness.adopt(snapshot, revision, self.live)
            cancelling = {r.tenant for r in snapshot.tenants if r.stop is StopPolicy.CANCEL}
            stopped = [s.request.request_id for s in self.live if s.tenant in cancelling]
        require(plan.revision == self.view.revision, Invariant.REVISION, plan.revision)
        require(sorted(plan.stopped) == sorted(stopped), Invariant.STOPPED, plan.stopped, stopped)
        for request_id in stopped:
            self._end(self._live[request_id], "cancelled")
        for seen in self.live:
            seen.has_shared |= self.view.rules[seen.tenant].shares_prefixes
            room = self.view.room(seen.tenant) + 1 - len(seen.request.prompt_ids)
            seen.least_limit = max(1, min(seen.least_limit, room))

    def _check_expired(self, plan: StepPlan, now: float) -> None:
        named = [expiry.request_id for expiry in plan.expired]
        due = [s.request.request_id for s in self.live if self._due_at(s) <= now]
        require(sorted(named) == sorted(due), Invariant.TIME_LIMITS, named, "instead of", due)
        for request_id in due:
            self._end(self._live[request_id], "expired")
        next_due = min((self._due_at(seen) for seen in self.live), default=inf)
        if not plan.is_executable and next_due < inf:
            is_awake = plan.wake_at is not None and plan.wake_at <= next_due
            require(is_awake, Invariant.TIME_LIMITS, plan.wake_at, "sleeps past", next_due)

    def _due_at(self, seen: Seen) -> float:
        """Return when a request's next time limit is reached."""
        service = self.view.rules[seen.tenant].service
        limits = [service.request_timeout_seconds]
        if not (seen.was_admitted or seen.request.generation_id in self._begun):
            limits.append(service.queue_timeout_seconds)
        return min((seen.arrived_at + seconds for seconds in limits if seconds), default=inf)

    def _join(self) -> list[str]:
        """Take those in whose blocks are back from the host."""
        joined = [s for s in self.live if s.place is Place.ARRIVING and not s.fence]
        # In order of their fences, which only the scheduler's answer tells.
        order = {request_id: i for i, request_id in enumerate(self._landed)}
        joined.sort(key=lambda seen: order[seen.request.request_id])
        self._landed = []
        for seen in joined:
            seen.place = Place.RUNNING
        return [seen.request.request_id for seen in joined]

    def _admit(self, seen: Seen, decision: Decision, plan: StepPlan) -> list[str]:
        is_waiting = seen.place in (Place.WAITING, Place.SWAPPED) and not seen.fence
        require(is_waiting, Invariant.MOVES, decision, seen.place, seen.fence)
        is_resumed = decision.verdict is Verdict.RESUMED
        require(is_resumed == seen.was_admitted, Invariant.MOVES, decision)
        seen.was_admitted = True
        if seen.request.generation_id is not None:
            self._begun.add(seen.request.generation_id)
        seen.admitted_tokens = len(seen.tokens)
        if seen.place is Place.WAITING:
            seen.computed = None
        elif any(swap.request_id == decision.request_id for swap in plan.swap_in):
            seen.place = Place.ARRIVING
            return []
        seen.host = ()
        seen.place = Place.RUNNING
        return [decision.request_id]

    def _preempt(self, seen: Seen, plan: StepPlan) -> str:
        request_id = seen.request.request_id
        require(seen.place is Place.RUNNING, Invariant.MOVES, request_id, seen.place)
        seen.preemptions += 1
        seen.table = None
        self._books.preempt(seen)
        is_swap = any(swap.request_id == request_id for swap in plan.swap_out)
        seen.place = Place.SWAPPED if is_swap else Place.WAITING
        if not is_swap:
            seen.computed = 0
        return request_id

    def _begin_swaps(self, plan: StepPlan) -> None:
        last_fence = self._last_fence
        for swap in plan.swap_in:  # what the prefix cache still has is given back on the host
            seen = self._named(swap.request_id)
            is_own = seen.host[-len(swap.host_blocks) :] == swap.host_blocks
            require(is_own and seen.place is Place.ARRIVING, Invariant.HOST, swap, seen.host)
            seen.host = swap.host_blocks
        held = {block for seen in self.live for block in seen.host}
        held |= {block for _, copy, _ in self._flights.values() for block in copy.host_blocks}
        for swap in plan.swap_out:
            seen = self._named(swap.request_id)
            is_new = held.isdisjoint(swap.host_blocks) and seen.place is Place.SWAPPED
            require(is_new, Invariant.HOST, swap, sorted(held))
            held |= {*swap.host_blocks}
            seen.host = swap.host_blocks
        for swap in (*plan.swap_out, *plan.swap_in):
            seen = self._named(swap.request_id)
            is_new = swap.fence > last_fence and swap.fence not in self._flights
            require(is_new and not seen.fence, Invariant.FENCES, swap, seen.fence)
            closed = self._moving(is_in=True)
            if swap in plan.swap_in:
                closed |= self._moving(is_in=False)
            require(closed.isdisjoint(swap.device_blocks), Invariant.IN_FLIGHT, swap, closed)
            require(len(swap.device_blocks) == len(swap.host_blocks), Invariant.HOST, swap)
            self._last_fence = max(self._last_fence, swap.fence)
            seen.fence = swap.fence
            self._flights[swap.fence] = Flight(seen, swap, swap in plan.swap_in)
        found = plan.num_open_fences
        require(found == len(self._flights), Invariant.FENCES, found, list(self._flights))

    def _check_rows(self, plan: StepPlan) -> None:
        for row in plan.rows:
            seen = self._named(row.request_id)
            require(seen.place is Place.RUNNING, Invariant.MOVES, row.request_id, seen.place)
            check_row(row, seen, block_size=self._block_size)
            seen.table = row.block_ids
        running = [seen for seen in self.live if seen.place is Place.RUNNING]
        self._check_standing(plan, running)
        holders = check_tables(running, block_size=self._block_size)
        check_writes(
            plan,
            holders,
            read=self._moving(is_in=False),
            written=self._moving(is_in=True),
            block_size=self._block_size,
        )

    def _check_standing(self, plan: StepPlan, running: Iterable[Seen]) -> None:
        """Verify that who could have an output token has it, or leaves it to a higher prompt."""
        tiers = {row.request_id: self.view.tier_of(self._live[row.request_id]) for row in plan.rows}
        reading = [tiers[row.request_id] for row in plan.rows if not row.is_decode]
        top = max((tier.value for tier in reading if tier.preempts_lower), default=None)
        timed = max(self._timed(plan), default=None)
        for seen in running:
            is_decode = seen.num_outputs > 0 and seen.computed == len(seen.tokens) - 1
            has_block = len(seen.table or ()) * self._block_size >= len(seen.tokens)
            if seen.request.request_id in tiers or not (is_decode and has_block):
                continue
            value = self.view.tier_of(seen).value
            is_higher = top is not None and top > value
            is_alone = all(tier.value > value for tier in tiers.values())
            takes_turns = timed is not None and timed > value
            takes_turns &= any(tier.value == value for tier in tiers.values())
            is_right = (is_higher and is_alone) or takes_turns
            require(is_right, Invariant.STANDING, seen.request.request_id, plan.rows)

    def _timed(self, plan: StepPlan) -> Iterator[int]:
        """Yield the tiers of the decodes in a step that have an inter-token latency target."""
        for row in plan.rows:
            seen = self._live[row.request_id]
            if row.is_decode and self.view.rules[seen.tenant].service.itl_seconds is not None:
                yield self.view.tier_of(seen).value

    # -- what steps give -------------------------------------------------------------------------

    def _moving(self, *, is_in: bool) -> set[int]:
        """Return the device blocks that copies in flight write, or read."""
        flights = [flight for flight in self._flights.values() if flight.is_in == is_in]
        return {block for flight in flights for block in flight.copy.device_blocks}

    def _append(self, seen: Seen, output: TokenOutput) -> None:
        expected, token = seen.alone.next_token(), output.token
        is_right = token is not None and token.token_id == expected
        require(is_right, Invariant.OUTPUT, output, "instead of", expected)
        seen.tokens.append(expected)
        reason = output.finish_reason
        is_stop = expected in seen.request.stop_token_ids
        require(is_stop == (reason is FinishReason.STOP), Invariant.FINISH, output)
        if reason is FinishReason.LENGTH:
            least = min(seen.limit, seen.least_limit)
            require(seen.num_outputs >= least, Invariant.FINISH, output, "of", least)
        elif reason is None:
            require(seen.num_outputs < seen.limit, Invariant.FINISH, output, "of", seen.limit)
        self._books.give(seen)
        if reason is not None:
            self._end(seen, "finished")

    def _pass(self, fence: int) -> None:
        require(fence in self._flights, Invariant.FENCES, fence, "is not open")
        seen = self._flights.pop(fence).seen
        seen.fence = 0
        if seen.place is Place.ARRIVING:
            seen.host = ()
            self._landed.append(seen.request.request_id)
        elif seen.place is Place.ENDED:
            seen.host = ()

    def _end(self, seen: Seen, how: str) -> None:
        seen.place = Place.ENDED
        seen.table = None
        if not seen.fence:
            seen.host = ()
        del self._live[seen.request.request_id]
        self._books.end(seen, how)

    def _settle(self, stats: SchedulerStats | None = None) -> None:
        """Compare all counts with what was seen."""
        stats = stats or self._scheduler.stats()
        self._books.check(stats, self.live)
        self._books.check_blocks(
            stats, self.live, list(self._flights.values()), is_open=self._is_open
        )
        self._fairness.settle(stats, self.live)
