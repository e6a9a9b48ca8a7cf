"""Which requests run in the next step, and who pays for it.

A pure state machine: events and a time go in, a `StepPlan` comes out. It holds no tensor, reads no
clock and does no I/O; the same calls give the same plans, whatever executes them.

A step, in this order: the newest policy is put in force; who is over a time limit is dropped; usage
is held against the watermarks; what runs gets the KV block for its next token, and where blocks
lack somebody yields; what waits is admitted; the prompts being read share what the step has room
for, and lower tiers may leave it to those of a higher one. Every plan that is executable has to be
answered with `commit_step` before the next call; cancels come between the two calls of neighbouring
steps, so that no step that is planned after a cancel contains the request.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import replace
from math import inf

from tidegate_engine.core.accounts import Accounts
from tidegate_engine.core.admission import Admission
from tidegate_engine.core.arrival import Arrivals
from tidegate_engine.core.batch import describe_batch, prefill_budget, ready_decodes
from tidegate_engine.core.books import Books
from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.decisions import Decision, DecisionLog, DecisionRecord, Reason, Verdict
from tidegate_engine.core.invariants import check_books
from tidegate_engine.core.kv_memory import KvMemory
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import Expiry, StepPlan, StepResult
from tidegate_engine.core.precedence import Precedence
from tidegate_engine.core.preemptor import Preemptor
from tidegate_engine.core.request import Rejection, Request, SchedulerStats, TokenOutput
from tidegate_engine.core.sequence import Phase, Sequence
from tidegate_engine.core.standings import Standings
from tidegate_engine.core.stats import describe
from tidegate_engine.core.step_time import StepFeatures
from tidegate_engine.core.stops import Stops
from tidegate_engine.core.time_limits import TimeLimits
from tidegate_policies.snapshot import PolicySnapshot

# Looked up once: through its class, a member costs as much as two calls.
_CANCELLED, _ON_REQUEST = Verdict.CANCELLED, Reason.ON_REQUEST
_RUNNING, _ENDED = Phase.RUNNING, Phase.ENDED


class Scheduler:
    """The waiting, running and swapped requests of one engine."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        limits: EngineLimits,
        costs: ExecutorCosts | None = None,
    ) -> None:
        """Start empty and without a policy: nothing is let in until one is in force.

        Args:
            num_blocks: KV blocks on the device.
            block_size: Tokens in each.
            num_host_blocks: KV blocks in host memory; without any, preemption is by recompute.
            limits: The engine's own; a policy may set others.
            costs: Time that the executor takes, to begin with; what steps take is learnt from.
        """
        self.decision_log = DecisionLog()
        costs = costs or ExecutorCosts()
        self._books = books = Books.beginning_with(
            KvMemory(
                num_blocks=num_blocks,
                block_size=block_size,
                num_host_blocks=num_host_blocks,
                seconds_per_block=costs.swap_block_seconds,
            ),
            costs,
        )
        self._engine_limits = self._limits = limits
        self._memory = books.memory
        self._tenants = books.tenants
        self._running = books.running
        self._forecast = books.forecast
        self._step_times = books.step_times
        self._gate = books.gate
        self._time_limits = TimeLimits()
        self._preemptor = Preemptor(books)
        self._admission = Admission(books, self._preemptor)
        self._precedence = Precedence(books)
        self._mailbox: tuple[PolicySnapshot, int, float] | None = None
        self._snapshot: PolicySnapshot | None = None
        self._revision = self._step = 0
        self._arrivals = Arrivals(books)
        self._live: dict[str, Sequence] = {}
        self._accounts = Accounts(books, live=self._live)
        self.standings = Standings(books, live=self._live, ttft=self._arrivals.ttft, limits=limits)
        self._joining: list[Sequence] = []
        self._decodes: Ordered[Sequence] = ()
        self._lacking: list[Sequence] = []
        self._has_open_plan = False
        self._planned_at = 0.0
        self._features = StepFeatures(0, 0, 0, 0)
        self._decisions: list[Decision] = []
        self._ended: list[str] = []
        self._stopped: list[str] = []
        self._stops = Stops(self._memory, self._tenants)

    @property
    def revision(self) -> int:
        """The policy in force; 0 = none yet."""
        return self._revision

    @property
    def step(self) -> int:
        """Number of the last planned step; 0 before the first."""
        return self._step

    @property
    def has_work(self) -> bool:
        """Whether any request is alive, or a copy in flight."""
        return bool(self._live) or bool(self._memory.flights)

    @property
    def num_waiting(self) -> int:
        """Requests that are not in the batch, preempted ones included."""
        return len(self._live) - len(self._running)

    @property
    def step_costs(self) -> ExecutorCosts:
        """What steps and copies were found to cost."""
        seconds_per_block = self._memory.flights.seconds_per_block
        return replace(self._step_times.costs, swap_block_seconds=seconds_per_block)

    # -- events ----------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> Rejection | None:
        """Queue a request behind the earlier ones of its tenant, or say why not.

        Raises:
            ValueError: Another live request has this id, or it comes from the future.
        """
        if request.request_id in self._live:
            raise ValueError(f"request {request.request_id!r} is live already")
        seq = self._arrivals.take(
            request,
            revision=self._revision,
            num_waiting=self.num_waiting,
            limits=self._limits,
            now=now,
        )
        if isinstance(seq, Rejection):
            return seq
        self._live[seq.request_id] = seq
        self._tenants.enqueue(seq)
        self._time_limits.watch(seq)
        return None

    def cancel(self, request_id: str, now: float) -> Phase | None:
        """Take a request out, wherever it is.

        Its KV blocks are free at once; those that a copy reads or writes, when that has ended.

        Returns:
            The phase it was in; None = it wasn't alive. Cancelling twice, or after the end,
            changes nothing.
        """
        seq = self._live.get(request_id)
        if seq is None:
            return None
        if seq.admission:  # else it has never held anything
            self._memory.payers.advance(now)
        phase = seq.phase
        self._drop(seq, _CANCELLED, _ON_REQUEST)
        return phase

    def finish(self, request_id: str, now: float) -> bool:
        """End a request whose output contains a stop string: as finished, not as cancelled.

        Returns:
            Whether it was alive.
        """
        self._memory.payers.advance(now)
        seq = self._live.get(request_id)
        if seq is not None:
            self._complete(seq)
        return seq is not None

    def apply_policy(self, snapshot: PolicySnapshot, revision: int, *, at: float = inf) -> None:
        """Leave a policy that came `at` in the mailbox: `plan_step` puts it in force, whole."""
        self._mailbox = (snapshot, revision, at)

    def note_elsewhere(self, service: Mapping[str, float], active: Iterable[str]) -> None:
        """Count what other engines of the pool gave: fairness holds over all of them.

        Args:
            service: By account, since the last call, in cost units.
            active: Accounts with work in another engine.
        """
        self._tenants.note_elsewhere(service, active)

    # -- a step ----------------------------------------------------------------------------------

    def plan_step(self, now: float) -> StepPlan:
        """Decide the next step and reserve its KV blocks.

        Returns:
            The plan; without rows when nothing can run.

        Raises:
            RuntimeError: The last plan was not committed. Nothing has changed.
        """
        if self._has_open_plan:
            raise RuntimeError(f"step {self._step} was planned and not committed")
        self._begin_step(now)
        self._adopt_policy(now)
        expired = self._expire(now)
        self._stops.settle(now)
        for seq in self._joining:
            self._admission.join(seq)
        self._joining = []
        self._preemptor.relieve()
        self._grow_running()
        running = self._running
        self._admission.run(
            prefill_budget(running.load, running.prefilling, self._limits, self._step_times)
        )
        for seq in self._admission.hopeless:
            self._end_for_lack(seq)
        return self._emit(now, expired)

    def commit_step(
        self, plan: StepPlan, result: StepResult, now: float
    ) -> tuple[TokenOutput, ...]:
        """Account for the step just executed.

        Requests that failed in it are dropped, and count as cancelled.

        Returns:
            The new tokens, and which requests ended with them.

        Raises:
            KeyError: `result` lacks a row of `plan` that samples. Nothing has changed.
        """
        sampled = result.tokens_of(plan)
        self._has_open_plan = False
        if plan.rows:
            self._step_times.observe(self._features, now - self._planned_at)
        for request_id in result.failures:
            self._drop_broken(request_id, now)
        outputs, ended = self._accounts.commit_rows(plan, self._decodes, sampled, now)
        for seq in ended:
            self._complete(seq)
        self._memory.end_step()
        for fence in result.passed_fences:
            moved = self._memory.pass_fence(fence, now)
            if moved in self._running.arriving:  # back on the device: it joins the next step
                self._joining.append(moved)
        return tuple(outputs)

    def abandon_step(self, plan: StepPlan, now: float) -> tuple[str, ...]:
        """Drop the requests of a step that could not be executed, with what their blocks hold.

        Its own swaps count as ended; those of earlier plans are still in flight.

        Returns:
            The requests that were dropped; they count as cancelled.
        """
        self._has_open_plan = False
        swaps = (*plan.swap_out, *plan.swap_in)
        # Whoever was admitted may count on a copy on write that was not done.
        moved = [row.request_id for row in plan.rows] + [swap.request_id for swap in swaps]
        concerned = dict.fromkeys([*moved, *plan.admitted])
        dropped = [request_id for request_id in concerned if request_id in self._live]
        for request_id in dropped:
            self._drop_broken(request_id, now)
        self._memory.end_step()
        for swap in swaps:
            self._memory.pass_fence(swap.fence, now)
        return tuple(dropped)

    def stats(self) -> SchedulerStats:
        """Return the numbers at this step boundary."""
        return describe(
            self._books,
            step=self._step,
            revision=self._revision,
            arrivals=self._arrivals.accepted,
            rejected=self._arrivals.rejected,
            stop_seconds=self._stops.seconds,
        )

    def check_invariants(self) -> None:
        """Verify that blocks, books and queues agree.

        Raises:
            AssertionError: They don't.
        """
        check_books(self._books, list(self._live.values()), self._joining)
        self._time_limits.check_invariants(self._live.values())

    # -- planning --------------------------------------------------------------------------------

    def _begin_step(self, now: float) -> None:
        self._ended, self._stopped = [], []
        self._planned_at = now
        for name in self._tenants.take_dropped():
            self._forecast.lengths.forget(name)
        for name in self._memory.take_relieved():
            self._tenants.make_room(name)
        self._memory.begin_step(now)
        self._arrivals.begin_step()
        self._gate.begin_step()
        self._preemptor.begin_step(self._decisions, now)
        self._admission.begin_step(self._decisions, now)

    def _adopt_policy(self, now: float) -> None:
        if self._mailbox is None:
            return
        (snapshot, self._revision, came_at), self._mailbox = self._mailbox, None
        if snapshot == self._snapshot:
            return
        self._snapshot = snapshot
        self._limits = self._engine_limits.under(snapshot.batching)
        self._forecast.estimate = snapshot.kv_estimate
        self._memory.apply_policy(snapshot)
        self._tenants.apply_policy(snapshot, self._live.values())
        self._running.recount()
        for seq in self._stops.obey(snapshot, self._live, at=min(came_at, now)):
            self._stopped.append(seq.request_id)
            self._drop(seq, Verdict.STOPPED, Reason.TENANT_STOPPED)
        self._time_limits.obey(self._live.values())
        self._admission.obey(self._limits)
        self.standings.obey(self._limits)

    def _expire(self, now: float) -> tuple[Expiry, ...]:
        """Drop the requests that have waited, or run, for too long."""
        due = self._time_limits.pop_due(now)
        for seq, expiry in due:
            seq.tenant.totals.expired += 1
            self._note(seq, Verdict.EXPIRED, Reason(expiry.cause.value))
            self._end(seq)
        return tuple(expiry for _, expiry in due)

    def _grow_running(self) -> None:
        """Give every decode, oldest first, the block for its next token."""
        self._lacking = []
        for seq in [seq for seq in self._running.decoding if seq.num_tokens > seq.capacity]:
            if seq.phase is not _RUNNING or self._memory.try_grow(seq):
                continue
            if not self._gate.clip(seq):  # a policy change took what it needs
                self._end_for_lack(seq)
                continue
            self._preemptor.make_room_to_grow(seq)
            if seq in self._running.decoding and not self._memory.try_grow(seq):
                self._lacking.append(seq)  # it stands still until copies have ended

    def _emit(self, now: float, expired: tuple[Expiry, ...]) -> StepPlan:
        ready = ready_decodes(self._running, self._memory, self._lacking)
        batch = self._precedence.compose(ready, self._limits, now)
        self._decodes = batch.decodes
        rows = describe_batch(batch)
        if not rows and not self._memory.flights and self._running.decoding:
            # All stand still, and nobody may be taken out: the newest gives its blocks back.
            self._end_for_lack(list(self._running.decoding)[-1])
        if rows:
            self._step += 1
            self._features = batch.features
        self._has_open_plan = bool(rows) or bool(self._memory.flights)
        decisions, self._decisions = tuple(self._decisions), []
        watermark = self._memory.gate.state.value
        if decisions:
            record = DecisionRecord(self._step, self._revision, now, watermark, decisions)
            self.decision_log.add(record)
        return StepPlan(
            step=self._step,
            revision=self._revision,
            rows=tuple(rows),
            copies=tuple(self._memory.copies),
            swap_out=tuple(self._memory.swap_out),
            swap_in=tuple(self._memory.swap_in),
            num_open_fences=len(self._memory.flights),
            admitted=tuple(self._admission.admitted),
            cached=tuple(self._admission.cached),
            preempted=tuple(seq.request_id for seq in self._preemptor.preempted),
            ended=tuple(self._ended),
            expired=expired,
            stopped=tuple(self._stopped),
            decisions=decisions,
            watermark=watermark,
            wake_at=self._wake_at(now),
        )

    def _wake_at(self, now: float) -> float | None:
        if self._ended:  # what they held may let somebody in
            return now
        times = (self._admission.wake_at, self._time_limits.next_at)
        return min((time for time in times if time is not None), default=None)

    # -- ends ------------------------------------------------------------------------------------

    def _complete(self, seq: Sequence) -> None:
        seq.tenant.totals.finished += 1
        self._forecast.lengths.observe(seq.tenant.name, seq.num_output_tokens)
        self._end(seq)

    def _drop(self, seq: Sequence, verdict: Verdict, reason: Reason) -> None:
        """End a request that nobody waits for any more."""
        seq.tenant.totals.cancelled += 1
        self._note(seq, verdict, reason)
        self._end(seq)

    def _drop_broken(self, request_id: str, now: float) -> None:
        """Drop a request, if it lives, whose keys and values are not to be trusted."""
        if request_id in self._live:
            self._memory.distrust(self._live[request_id])
            self.cancel(request_id, now)

    def _end_for_lack(self, seq: Sequence) -> None:
        """End a request for which there will never be the KV block that it needs."""
        self._ended.append(seq.request_id)
        self._note(seq, Verdict.ENDED, Reason.OUT_OF_MEMORY)
        seq.tenant.totals.finished += 1
        self._end(seq)

    def _end(self, seq: Sequence) -> None:
        was_running = seq.phase is _RUNNING
        if was_running:
            self._running.remove(seq)
        elif not seq.admission:
            self._tenants.dequeue(seq)
        else:
            self._tenants.forget_preempted(seq)
            self._running.stop_expecting(seq)
            self._joining = [other for other in self._joining if other is not seq]
        self._admission.forget(seq)
        self._time_limits.forget(seq)
        if self._memory.release(seq):
            self._gate.is_pressed = False
        seq.phase = _ENDED
        del self._live[seq.request_id]
        self._tenants.settle(seq.tenant, was_running=was_running)

    def _note(self, seq: Sequence, verdict: Verdict, reason: Reason) -> None:
        self._decisions.append(Decision(seq.request_id, seq.tenant.name, verdict, reason))
