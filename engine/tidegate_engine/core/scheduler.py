"""Which requests run in the next step, and who pays for it.

A pure state machine: events and a time go in, a `StepPlan` comes out. It holds no tensor, reads no
clock and does no I/O; the same calls give the same plans, whatever executes them.

A step, in this order: the newest policy is put in force; usage is held against the watermarks; what
runs gets the KV block for its next token, and where blocks lack somebody yields; what waits is
admitted; the batch is described. Every plan with rows has to be answered with `commit_step` before
the next call; cancels come between the two calls of neighbouring steps, so that no step that is
planned after a cancel contains the request.
"""

from collections.abc import Iterable

from tidegate_engine.core.arrival import (
    output_limit,
    refuse_for_queue,
    refuse_prompt,
    refuse_tenant,
)
from tidegate_engine.core.batch import describe_batch
from tidegate_engine.core.kv_memory import KvMemory
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import SampledToken, StepPlan, StepResult
from tidegate_engine.core.request import (
    FinishReason,
    Rejection,
    Request,
    SchedulerStats,
    TokenOutput,
)
from tidegate_engine.core.sequence import Phase, Sequence
from tidegate_engine.core.tenants import MAX_TOMBSTONES, Tenant, TenantTable
from tidegate_policies.admission import Watermark
from tidegate_policies.fairness import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from tidegate_policies.preemption import VictimCandidate, choose_victim
from tidegate_policies.snapshot import PolicySnapshot


class Scheduler:
    """The waiting and running requests of one engine."""

    def __init__(self, *, num_blocks: int, block_size: int, limits: EngineLimits) -> None:
        """Start empty and without a policy: nothing is let in until one is in force."""
        self._memory = KvMemory(num_blocks=num_blocks, block_size=block_size)
        self._engine_limits = limits
        self._limits = limits
        self._tenants = TenantTable()
        self._mailbox: tuple[PolicySnapshot, int] | None = None
        self._revision = 0
        self._step = 0
        self._arrivals = 0
        self._admissions = 0
        self._live: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._has_open_plan = False

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
        """Whether any request is queued or running."""
        return bool(self._live)

    @property
    def num_waiting(self) -> int:
        """Requests that are not in the batch, preempted ones included."""
        return len(self._live) - len(self._running)

    def submit(self, request: Request, now: float) -> Rejection | None:  # noqa: ARG002
        """Queue a request behind the earlier ones of its tenant, or say why not.

        Raises:
            ValueError: Another live request has this id.
        """
        if request.request_id in self._live:
            raise ValueError(f"request {request.request_id!r} is live already")
        tenant = self._tenants.declared(request.tenant)
        rejection = refuse_tenant(request, tenant, revision=self._revision)
        if rejection is not None or tenant is None:
            return rejection
        cap_tokens = self._memory.cap_tokens(tenant.name)
        rejection = refuse_prompt(request, tenant, cap_tokens=cap_tokens) or refuse_for_queue(
            num_waiting=self.num_waiting, max_waiting=self._limits.max_waiting
        )
        if rejection is not None:
            return rejection
        self._arrivals += 1
        seq = Sequence(
            request=request,
            arrival=self._arrivals,
            max_output_tokens=output_limit(request, tenant, cap_tokens=cap_tokens),
            token_ids=list(request.prompt_ids),
        )
        self._tenants.activate(tenant)
        self._live[seq.request_id] = seq
        tenant.push(seq)
        return None

    def cancel(self, request_id: str, now: float) -> bool:  # noqa: ARG002
        """Take a request out, wherever it is; its KV blocks are free at once.

        Returns:
            Whether it was alive. Cancelling twice, or after the end, changes nothing.
        """
        seq = self._live.get(request_id)
        if seq is None:
            return False
        self._tenants[seq.tenant].totals.cancelled += 1
        self._end(seq)
        return True

    def finish(self, request_id: str, now: float) -> bool:  # noqa: ARG002
        """End a request whose output contains a stop string: as finished, not as cancelled.

        Returns:
            Whether it was alive.
        """
        seq = self._live.get(request_id)
        if seq is None:
            return False
        self._complete(seq)
        return True

    def apply_policy(self, snapshot: PolicySnapshot, revision: int) -> None:
        """Leave a policy in the mailbox; the next `plan_step` puts it in force, whole."""
        self._mailbox = (snapshot, revision)

    def plan_step(self, now: float) -> StepPlan:  # noqa: ARG002
        """Decide the next step and reserve its KV blocks.

        Returns:
            The plan; without rows when nothing can run.

        Raises:
            RuntimeError: The last plan was not committed. Nothing has changed.
        """
        if self._has_open_plan:
            raise RuntimeError(f"step {self._step} was planned and not committed")
        self._adopt_policy()
        ended: list[str] = []
        preempted = self._relieve_red()
        preempted += self._grow_running(ended)
        admitted = self._admit(ended)
        rows = describe_batch(self._running, token_budget=self._limits.max_batched_tokens)
        if rows:
            self._step += 1
            self._has_open_plan = True
        return StepPlan(
            step=self._step,
            revision=self._revision,
            rows=rows,
            admitted=tuple(admitted),
            preempted=tuple(preempted),
            ended=tuple(ended),
        )

    def commit_step(
        self,
        plan: StepPlan,
        result: StepResult,
        now: float,  # noqa: ARG002
    ) -> tuple[TokenOutput, ...]:
        """Account for the step just executed.

        Returns:
            The new tokens, and which requests ended with them.

        Raises:
            KeyError: `result` lacks a row of `plan` that samples. Nothing has changed.
        """
        missing = [
            r.request_id for r in plan.rows if r.samples and r.request_id not in result.tokens
        ]
        if missing:
            raise KeyError(f"step {plan.step}: no token for requests {missing}")
        self._has_open_plan = False
        outputs: list[TokenOutput] = []
        for row in plan.rows:
            seq = self._live.get(row.request_id)
            if seq is None:  # cancelled while the step was computed
                continue
            self._book_computed(seq, len(row.token_ids))
            if row.samples:
                outputs.append(self._append(seq, result.tokens[row.request_id]))
        return tuple(outputs)

    def abandon_step(self, plan: StepPlan, now: float) -> tuple[str, ...]:
        """Drop the requests of a step that could not be executed.

        Returns:
            The requests that were dropped; they count as cancelled.
        """
        self._has_open_plan = False
        return tuple(r.request_id for r in plan.rows if self.cancel(r.request_id, now))

    def stats(self) -> SchedulerStats:
        """Return the numbers at this step boundary."""
        return SchedulerStats(
            step=self._step,
            revision=self._revision,
            running=len(self._running),
            waiting=self.num_waiting,
            kv_blocks=self._memory.pool.num_blocks,
            kv_used_blocks=self._memory.pool.num_used,
            watermark=self._memory.watermark,
            tenants=self._tenants.stats(self._memory),
        )

    def check_invariants(self) -> None:
        """Verify that blocks, books and queues agree.

        Raises:
            AssertionError: They don't.
        """
        self._memory.check_invariants(self._live.values())
        for seq in self._live.values():
            if seq.phase is Phase.WAITING and seq.block_table:
                raise AssertionError(f"{seq.request_id} waits and holds blocks")
        for tenant in self._tenants:
            phases = [s.phase for s in self._live.values() if s.tenant == tenant.name]
            counted = phases.count(Phase.WAITING), phases.count(Phase.RUNNING)
            if counted != (tenant.waiting, tenant.running):
                raise AssertionError(f"{tenant.name} has {counted} waiting and running requests")
            if len(tenant.queue) > 2 * tenant.waiting + MAX_TOMBSTONES:
                raise AssertionError(f"{tenant.name} keeps {len(tenant.queue)} ended requests")

    # -- policy ------------------------------------------------------------------------------

    def _adopt_policy(self) -> None:
        if self._mailbox is None:
            return
        snapshot, self._revision = self._mailbox
        self._mailbox = None
        self._limits = self._engine_limits.under(snapshot.batching)
        self._memory.apply_policy(snapshot)
        self._tenants.apply_policy(snapshot)

    # -- running requests --------------------------------------------------------------------

    def _relieve_red(self) -> list[str]:
        """Above the high watermark, preempt borrowers until usage is down at the low one."""
        preempted: list[str] = []
        # The last borrower stays: it would come back at once, as nobody else borrows.
        while self._memory.observe() is Watermark.RED and len(borrowers := self._borrowers()) > 1:
            victim = self._victim(borrowers)
            self._preempt(victim)
            preempted.append(victim.request_id)
        return preempted

    def _grow_running(self, ended: list[str]) -> list[str]:
        """Give every running request, oldest first, the block for its next token."""
        preempted: list[str] = []
        for seq in list(self._running):
            while seq.phase is Phase.RUNNING and not self._memory.try_grow(seq):
                if not self._memory.can_ever_hold(seq):  # a policy change took what it needs
                    self._complete(seq)
                    ended.append(seq.request_id)
                    break
                own = next(s for s in reversed(self._running) if s.tenant == seq.tenant)
                victim = self._victim([*self._borrowers(), own])
                self._preempt(victim)
                preempted.append(victim.request_id)
        return preempted

    def _borrowers(self) -> list[Sequence]:
        """Return the running requests that hold borrowed blocks: each tenant's newest ones."""
        excess = {name: self._memory.borrowed_blocks(name) for name in self._tenants.names()}
        borrowers: list[Sequence] = []
        for seq in reversed(self._running):
            if excess[seq.tenant] > 0:
                borrowers.append(seq)
                excess[seq.tenant] -= len(seq.block_table)
        return borrowers

    def _victim(self, among: Iterable[Sequence]) -> Sequence:
        """Choose who of several running requests yields."""
        victim = choose_victim(
            VictimCandidate(
                request_id=seq.request_id,
                tier_value=self._tenants[seq.tenant].tier_value,
                weight=self._tenants[seq.tenant].rule.weight,
                borrowed_blocks=self._memory.borrowed_blocks(seq.tenant),
                admission=seq.admission,
            )
            for seq in among
        )
        return self._live[victim.request_id]

    def _preempt(self, victim: Sequence) -> None:
        """Return `victim` to its tenant's queue; its context is computed again later."""
        self._memory.release(victim)
        victim.phase = Phase.WAITING
        victim.computed_tokens = 0
        victim.preemptions += 1
        tenant = self._tenants[victim.tenant]
        tenant.running -= 1
        tenant.totals.preempted += 1
        tenant.push(victim)
        self._running.remove(victim)

    # -- admission ---------------------------------------------------------------------------

    def _admit(self, ended: list[str]) -> list[str]:
        """Move waiting requests into the batch: by tier, then tenant, then arrival.

        A head that may not borrow now closes borrowing for all behind it, or small requests would
        starve it; what fits a tenant's own nominal is let in all the same.
        """
        admitted: list[str] = []
        may_borrow = True
        budget = self._limits.max_batched_tokens - sum(seq.pending_tokens for seq in self._running)
        blocked: set[str] = set()
        while len(self._running) < self._limits.max_num_seqs and budget > 0:
            tenant = next((t for t in self._tenants.in_order() if t.name not in blocked), None)
            if tenant is None:
                break
            seq = tenant.head()
            if seq is None or tenant.is_full:
                blocked.add(tenant.name)
            elif not self._memory.can_ever_hold(seq):  # a policy change made it too large
                self._complete(seq)
                ended.append(seq.request_id)
            elif self._memory.can_admit(seq, may_borrow=may_borrow):
                self._start(tenant.pop(), tenant)
                admitted.append(seq.request_id)
                budget -= seq.pending_tokens
            else:
                blocked.add(tenant.name)
                may_borrow = False
        return admitted

    def _start(self, seq: Sequence, tenant: Tenant) -> None:
        self._memory.try_grow(seq)  # can_admit has said yes
        self._admissions += 1
        seq.admission = self._admissions
        seq.phase = Phase.RUNNING
        tenant.running += 1
        self._running.append(seq)

    # -- accounting --------------------------------------------------------------------------

    def _book_computed(self, seq: Sequence, num_tokens: int) -> None:
        """Charge computed prompt tokens, each once; what a recompute repeats is free."""
        tenant = self._tenants[seq.tenant]
        start, end = seq.computed_tokens, seq.computed_tokens + num_tokens
        fresh = max(0, min(end, len(seq.request.prompt_ids)) - max(start, seq.charged_tokens))
        repeated = max(0, min(end, seq.charged_tokens) - start)
        seq.computed_tokens = end
        # An output token is charged when it is sampled; computing its keys belongs to that.
        seq.charged_tokens = max(seq.charged_tokens, end)
        tenant.totals.prompt_tokens += fresh
        tenant.totals.recomputed_tokens += repeated
        if fresh:
            self._tenants.charge(tenant, PROMPT_TOKEN_COST * fresh)

    def _append(self, seq: Sequence, token: SampledToken) -> TokenOutput:
        tenant = self._tenants[seq.tenant]
        seq.token_ids.append(token.token_id)
        tenant.totals.output_tokens += 1
        self._tenants.charge(tenant, OUTPUT_TOKEN_COST)
        reason = None
        if token.token_id in seq.request.stop_token_ids:
            reason = FinishReason.STOP
        elif seq.num_output_tokens >= seq.max_output_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._complete(seq)
        return TokenOutput(request_id=seq.request_id, token=token, finish_reason=reason)

    # -- ends --------------------------------------------------------------------------------

    def _complete(self, seq: Sequence) -> None:
        self._tenants[seq.tenant].totals.finished += 1
        self._end(seq)

    def _end(self, seq: Sequence) -> None:
        tenant = self._tenants[seq.tenant]
        if seq.phase is Phase.RUNNING:
            self._running.remove(seq)
            tenant.running -= 1
        self._memory.release(seq)
        was_waiting = seq.phase is Phase.WAITING
        seq.phase = Phase.ENDED
        if was_waiting:
            tenant.forget_waiting()
        del self._live[seq.request_id]
        self._tenants.settle(tenant)
