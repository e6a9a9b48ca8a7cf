"""Which requests run in the next step, and who pays for it.

A pure state machine: events and a time go in, a `StepPlan` comes out. It holds no tensor, reads no
clock and does no I/O; the same calls give the same plans, whatever executes them.

A step, in this order: the newest policy is put in force; who is over a time limit is dropped; usage
is held against the watermarks; what runs gets the KV block for its next token, and where blocks
lack somebody yields; what waits is admitted; the prompts being read share what the step has room
for. Every plan that is executable has to be answered with `commit_step` before the next call;
cancels come between the two calls of neighbouring steps, so that no step that is planned after a
cancel contains the request.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from tidegate_engine.core.admission import Admission
from tidegate_engine.core.arrival import (
    output_limit,
    refuse_for_queue,
    refuse_prompt,
    refuse_tenant,
)
from tidegate_engine.core.batch import (
    describe_batch,
    features_of,
    in_service_order,
    prefill_budget,
    share_out,
)
from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.decisions import Decision, DecisionLog, DecisionRecord, Reason, Verdict
from tidegate_engine.core.forecast import Forecast
from tidegate_engine.core.kv_memory import KvMemory
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import (
    Expiry,
    ExpiryCause,
    SampledToken,
    StepPlan,
    StepResult,
)
from tidegate_engine.core.preemptor import Preemptor
from tidegate_engine.core.prefix_cache import BlockKeys
from tidegate_engine.core.request import (
    FinishReason,
    Rejection,
    Request,
    SchedulerStats,
    TokenOutput,
)
from tidegate_engine.core.running import Running
from tidegate_engine.core.sequence import Phase, Sequence
from tidegate_engine.core.stats import describe
from tidegate_engine.core.step_time import StepFeatures, StepTimeModel
from tidegate_engine.core.tenants import Tenant, TenantTable
from tidegate_engine.core.time_limits import TimeLimits
from tidegate_policies.fairness import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from tidegate_policies.snapshot import PolicySnapshot, StopPolicy
from tidegate_policies.tiers import TierShares


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
        self._memory = KvMemory(
            num_blocks=num_blocks, block_size=block_size, num_host_blocks=num_host_blocks
        )
        self._engine_limits = limits
        self._limits = limits
        self._tenants = TenantTable()
        self._running = Running()
        self._forecast = Forecast(block_size=block_size)
        self._step_times = StepTimeModel(costs or ExecutorCosts())
        self._shares = TierShares()
        self._time_limits = TimeLimits()
        self._preemptor = Preemptor(
            memory=self._memory,
            running=self._running,
            tenants=self._tenants,
            forecast=self._forecast,
            step_times=self._step_times,
            shares=self._shares,
        )
        self._admission = Admission(
            memory=self._memory,
            running=self._running,
            tenants=self._tenants,
            forecast=self._forecast,
            shares=self._shares,
            preemptor=self._preemptor,
        )
        self._mailbox: tuple[PolicySnapshot, int] | None = None
        self._revision = 0
        self._step = 0
        self._arrivals = 0
        self._live: dict[str, Sequence] = {}
        self._joining: list[Sequence] = []
        self._decodes: list[Sequence] = []
        self._has_open_plan = False
        self._planned_at = 0.0
        self._features = StepFeatures(0, 0, 0, 0)
        self._decisions: list[Decision] = []
        self._ended: list[str] = []
        self._stopped: list[str] = []

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
        return bool(self._live) or self._memory.num_open_fences > 0

    @property
    def num_waiting(self) -> int:
        """Requests that are not in the batch, preempted ones included."""
        return len(self._live) - len(self._running)

    @property
    def step_costs(self) -> ExecutorCosts:
        """What steps were found to cost."""
        return self._step_times.costs

    # -- events ----------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> Rejection | None:
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
        cap_tokens = self._memory.cap_tokens(
            tenant.name, is_preemptible=tenant.rule.preemption.preemptible
        )
        rejection = refuse_prompt(request, tenant, cap_tokens=cap_tokens) or refuse_for_queue(
            request, tenant, num_waiting=self.num_waiting, max_waiting=self._limits.max_waiting
        )
        if rejection is not None:
            return rejection
        self._arrivals += 1
        seq = self._sequence(request, tenant, now, cap_tokens=cap_tokens)
        self._live[seq.request_id] = seq
        self._tenants.enqueue(seq, now)
        self._time_limits.watch(seq)
        return None

    def cancel(self, request_id: str, now: float) -> Phase | None:  # noqa: ARG002
        """Take a request out, wherever it is.

        Its KV blocks are free at once; those that a copy reads or writes, when that has ended.

        Returns:
            The phase it was in; None = it wasn't alive. Cancelling twice, or after the end,
            changes nothing.
        """
        seq = self._live.get(request_id)
        if seq is None:
            return None
        phase = seq.phase
        seq.tenant.totals.cancelled += 1
        self._end(seq)
        return phase

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
        self._adopt_policy()
        expired = self._expire(now)
        for seq in self._joining:
            self._admission.join(seq)
        self._joining = []
        self._preemptor.relieve()
        self._grow_running()
        self._admission.run(prefill_budget(self._running, self._limits, self._step_times))
        for seq in self._admission.hopeless:
            self._end_for_lack(seq)
        return self._emit(now, expired)

    def commit_step(
        self, plan: StepPlan, result: StepResult, now: float
    ) -> tuple[TokenOutput, ...]:
        """Account for the step just executed.

        Returns:
            The new tokens, and which requests ended with them.

        Raises:
            KeyError: `result` lacks a row of `plan` that samples. Nothing has changed.
        """
        tokens = result.tokens
        missing = [row.request_id for row in plan.rows if row[4] and row[0] not in tokens]
        if missing:
            raise KeyError(f"step {plan.step}: no token for requests {missing}")
        self._has_open_plan = False
        if plan.rows:
            self._step_times.observe(self._features, now - self._planned_at)
        outputs = self._commit_rows(plan, tokens, now)
        self._memory.end_step()
        for fence in result.passed_fences:
            self._land(fence)
        return outputs

    def abandon_step(self, plan: StepPlan, now: float) -> tuple[str, ...]:
        """Drop the requests of a step that could not be executed, with what their blocks hold.

        Its own swaps count as ended; those of earlier plans are still in flight.

        Returns:
            The requests that were dropped; they count as cancelled.
        """
        self._has_open_plan = False
        swaps = (*plan.swap_out, *plan.swap_in)
        concerned = dict.fromkeys([*(r.request_id for r in plan.rows), *(s[1] for s in swaps)])
        dropped = [request_id for request_id in concerned if request_id in self._live]
        for request_id in dropped:
            self._live[request_id].computed_tokens = 0  # nothing of it may be read again
            self.cancel(request_id, now)
        self._memory.end_step()
        for swap in swaps:
            self._memory.pass_fence(swap.fence)
        return tuple(dropped)

    def stats(self) -> SchedulerStats:
        """Return the numbers at this step boundary."""
        return describe(
            step=self._step,
            revision=self._revision,
            tenants=self._tenants,
            running=self._running,
            memory=self._memory,
        )

    def check_invariants(self) -> None:
        """Verify that blocks, books and queues agree.

        Raises:
            AssertionError: They don't.
        """
        self._memory.check_invariants(list(self._live.values()))
        self._running.check_invariants()
        self._tenants.check_invariants()
        self._forecast.lengths.check_invariants()
        for tenant in self._tenants:
            own = [seq for seq in self._live.values() if seq.tenant is tenant]
            phases = [seq.phase for seq in own]
            counted = [phases.count(p) for p in (Phase.WAITING, Phase.RUNNING, Phase.SWAPPED)]
            if counted != [tenant.waiting, tenant.running, tenant.swapped]:
                raise AssertionError(f"{tenant.name} has {counted} requests by phase")
            owed = sum(s.uncharged_prompt_tokens for s in own if s.phase is Phase.RUNNING)
            if owed != tenant.admitted_prompt_tokens:
                raise AssertionError(f"{tenant.name} is to pay {owed} prompt tokens")
        landed = {seq for seq in self._running.arriving if not seq.fence}
        if landed != set(self._joining):
            raise AssertionError(f"{len(landed)} requests are back, {len(self._joining)} join")
        for seq in self._live.values():
            if seq.num_tokens != len(seq.token_ids):
                raise AssertionError(f"{seq.request_id} miscounts its tokens")
            if seq.phase is Phase.WAITING and (seq.block_table or seq.host_table):
                raise AssertionError(f"{seq.request_id} waits and holds blocks")

    # -- planning --------------------------------------------------------------------------------

    def _begin_step(self, now: float) -> None:
        self._decisions = []
        self._ended = []
        self._stopped = []
        self._planned_at = now
        for name in self._tenants.take_dropped():
            self._forecast.lengths.forget(name)
        self._memory.begin_step()
        self._preemptor.begin_step(self._decisions, now)

    def _adopt_policy(self) -> None:
        if self._mailbox is not None:
            snapshot, self._revision = self._mailbox
            self._mailbox = None
            self._limits = self._engine_limits.under(snapshot.batching)
            self._forecast.estimate = snapshot.kv_estimate
            self._memory.apply_policy(snapshot)
            self._tenants.apply_policy(snapshot)
            self._running.recount()
            self._admission.forget_promises()
            self._stop_tenants(snapshot)
        self._admission.begin_step(self._decisions, self._limits, self._planned_at)

    def _stop_tenants(self, snapshot: PolicySnapshot) -> None:
        """Drop the requests of tenants whose policy cancels them."""
        stopped = {r.tenant for r in snapshot.tenants if r.stop is StopPolicy.CANCEL}
        if not stopped:
            return
        for seq in [s for s in self._live.values() if s.tenant.name in stopped]:
            self._stopped.append(seq.request_id)
            seq.tenant.totals.cancelled += 1
            self._note(seq, Verdict.STOPPED, Reason.TENANT_STOPPED)
            self._end(seq)

    def _expire(self, now: float) -> tuple[Expiry, ...]:
        """Drop the requests that have waited, or run, for too long."""
        due = self._time_limits.pop_due(now)
        for seq, expiry in due:
            seq.tenant.totals.expired += 1
            is_wait = expiry.cause is ExpiryCause.QUEUE_TIMEOUT
            reason = Reason.QUEUE_TIMEOUT if is_wait else Reason.REQUEST_TIMEOUT
            self._note(seq, Verdict.EXPIRED, reason)
            self._end(seq)
        return tuple(expiry for _, expiry in due)

    def _grow_running(self) -> None:
        """Give every decode, oldest first, the block for its next token."""
        memory = self._memory
        lacking = [seq for seq in self._running.decoding if seq.num_tokens > seq.capacity]
        for seq in lacking:
            if seq.phase is not Phase.RUNNING or memory.try_grow(seq):
                continue
            preemptible = seq.tenant.rule.preemption.preemptible
            most = memory.cap_tokens(seq.tenant.name, is_preemptible=preemptible)
            if seq.num_tokens > most:  # a policy change took what it needs
                self._end_for_lack(seq)
                continue
            self._preemptor.make_room_to_grow(seq)
            if seq.phase is Phase.RUNNING:
                memory.try_grow(seq)  # else it stands still until copies have ended

    def _emit(self, now: float, expired: tuple[Expiry, ...]) -> StepPlan:
        shares = self._prefill_shares()
        self._decodes = [seq for seq in self._running.decoding if seq.num_tokens <= seq.capacity]
        rows = describe_batch(self._decodes, shares)
        if not rows and not self._memory.num_open_fences and len(self._running):
            # All stand still, and nobody may be taken out: the newest gives its blocks back.
            self._end_for_lack(list(self._running)[-1])
        if rows:
            self._step += 1
            self._features = features_of(self._running, shares)
        self._has_open_plan = bool(rows) or self._memory.num_open_fences > 0
        decisions = tuple(self._decisions)
        if decisions:
            self.decision_log.add(
                DecisionRecord(
                    self._step, self._revision, now, self._memory.gate.state.value, decisions
                )
            )
        return StepPlan(
            step=self._step,
            revision=self._revision,
            rows=tuple(rows),
            copies=tuple(self._memory.copies),
            swap_out=tuple(self._memory.swap_out),
            swap_in=tuple(self._memory.swap_in),
            num_open_fences=self._memory.num_open_fences,
            admitted=tuple(self._admission.admitted),
            preempted=tuple(seq.request_id for seq in self._preemptor.preempted),
            ended=tuple(self._ended),
            expired=expired,
            stopped=tuple(self._stopped),
            decisions=decisions,
            wake_at=self._wake_at(now),
        )

    def _prefill_shares(self) -> dict[Sequence, int]:
        if not self._running.prefilling:
            return {}
        return share_out(
            in_service_order(self._running),
            budget=prefill_budget(self._running, self._limits, self._step_times),
            max_partial=self._limits.max_partial_prefills,
        )

    def _wake_at(self, now: float) -> float | None:
        if self._ended:  # what they held may let somebody in
            return now
        times = (self._admission.wake_at, self._time_limits.next_at)
        return min((time for time in times if time is not None), default=None)

    # -- accounting ------------------------------------------------------------------------------

    def _commit_rows(
        self, plan: StepPlan, tokens: Mapping[str, SampledToken], now: float
    ) -> tuple[TokenOutput, ...]:
        """Book what was computed and append what was sampled."""
        num_decodes = len(self._decodes)
        outputs = _append_all(self._decodes, tokens)
        self._running.context_tokens += len(outputs)
        served = self._served_decodes(num_rows=len(outputs))
        read: list[Sequence] = []
        for row in plan.rows[num_decodes:]:
            seq = self._live.get(row.request_id)
            if seq is None:  # cancelled while the step was computed
                continue
            self._book_prefill(seq, len(row.token_ids), now)
            if row.samples:
                read.append(seq)
        outputs += _append_all(read, tokens)
        for seq in read:
            served[seq.tenant] = served.get(seq.tenant, 0) + 1
            self._memory.register(seq)
            self._running.end_prefill(seq)
        self._charge_output(served, now)
        for output in outputs:
            if output[2] is not None:
                self._complete(self._live[output.request_id])
        return tuple(outputs)

    def _served_decodes(self, *, num_rows: int) -> dict[Tenant, int]:
        """Return how many decodes of each tenant the step has served."""
        if num_rows == len(self._running.decoding):
            return dict(self._running.decodes_by_tenant)
        served = (seq.tenant for seq in self._decodes if seq.phase is Phase.RUNNING)
        return dict(Counter(served))  # somebody stood still, or was cancelled meanwhile

    def _book_prefill(self, seq: Sequence, num_tokens: int, now: float) -> None:
        """Charge computed prompt tokens, each once; what a recompute repeats is free."""
        tenant = seq.tenant
        start, end = seq.computed_tokens, seq.computed_tokens + num_tokens
        fresh = max(0, min(end, len(seq.request.prompt_ids)) - max(start, seq.charged_tokens))
        repeated = max(0, min(end, seq.charged_tokens) - start)
        seq.computed_tokens = end
        # An output token is charged when it is sampled; computing its keys belongs to that.
        seq.charged_tokens = max(seq.charged_tokens, end)
        tenant.totals.prompt_tokens += fresh
        tenant.totals.recomputed_tokens += repeated
        if fresh:
            cost = PROMPT_TOKEN_COST * fresh
            tenant.admitted_prompt_tokens -= fresh
            seq.charged_cost += cost
            weight = tenant.rule.weight
            self._tenants.counters.charge(tenant.name, cost, weight=weight)
            self._charge_tier(tenant.tier_value, cost, now)
        if seq.is_decoding:  # a recompute, of which one token is left
            self._running.end_prefill(seq)

    def _charge_output(self, served: Mapping[Tenant, int], now: float) -> None:
        """Charge the output tokens of this step, one addition per tenant."""
        by_tier: dict[int, int] = {}
        for tenant, num_tokens in served.items():
            tenant.totals.output_tokens += num_tokens
            value = tenant.tier.value
            by_tier[value] = by_tier.get(value, 0) + num_tokens
        self._tenants.counters.charge_each(
            [(t.name, num_tokens * t.output_price) for t, num_tokens in served.items()]
        )
        for value, num_tokens in by_tier.items():
            self._charge_tier(value, OUTPUT_TOKEN_COST * num_tokens, now)

    def _charge_tier(self, value: int, cost: float, now: float) -> None:
        self._shares.charge(value, cost, now)
        self._running.commit_cost(value, -cost)

    # -- ends ------------------------------------------------------------------------------------

    def _sequence(
        self, request: Request, tenant: Tenant, now: float, *, cap_tokens: int
    ) -> Sequence:
        length = len(request.prompt_ids)
        max_output_tokens = output_limit(request, tenant, cap_tokens=cap_tokens)
        pool = self._memory.pool
        seq = Sequence(
            request=request,
            request_id=request.request_id,
            tenant=tenant,
            arrival=self._arrivals,
            arrived_at=now,
            max_output_tokens=max_output_tokens,
            max_tokens=length + max_output_tokens,
            most_blocks=pool.blocks_for(length + max_output_tokens - 1),
            token_ids=list(request.prompt_ids),
            num_tokens=length,
            stop_token_ids=request.stop_token_ids,
            sampling=request.sampling,
            keys=BlockKeys(tenant.root, pool.block_size),
        )
        ttft_seconds = request.ttft_seconds or tenant.rule.service.ttft_seconds
        if ttft_seconds is not None:
            seq.deadline = now + ttft_seconds
            prefill = StepFeatures(length, 0, 0, length * (length + 1) // 2)
            seq.latest_start = seq.deadline - self._step_times.predict(prefill)
        return seq

    def _complete(self, seq: Sequence) -> None:
        seq.tenant.totals.finished += 1
        self._forecast.lengths.observe(seq.tenant.name, seq.num_output_tokens)
        self._end(seq)

    def _end_for_lack(self, seq: Sequence) -> None:
        """End a request for which there will never be the KV block that it needs."""
        self._ended.append(seq.request_id)
        self._note(seq, Verdict.ENDED, Reason.OUT_OF_MEMORY)
        seq.tenant.totals.finished += 1
        self._end(seq)

    def _end(self, seq: Sequence) -> None:
        tenant = seq.tenant
        if seq.phase is Phase.RUNNING:
            self._running.remove(seq)
        elif seq in tenant.queue:
            self._tenants.dequeue(seq)
        else:
            self._forget_preempted(seq)
        self._admission.forget(seq)
        self._memory.release(seq)
        self._preemptor.is_pressed = False
        seq.phase = Phase.ENDED
        del self._live[seq.request_id]
        self._tenants.settle(tenant)

    def _forget_preempted(self, seq: Sequence) -> None:
        if seq.phase is Phase.WAITING:
            seq.tenant.preempted -= 1
        else:
            seq.tenant.swapped -= 1
        self._tenants.tier_of(seq.tenant).resumable.pop(seq, None)
        self._running.arriving.pop(seq, None)
        if seq in self._joining:
            self._joining.remove(seq)

    def _land(self, fence: int) -> None:
        """Note that a copy has ended; a request that is back on the device joins the next step."""
        seq = self._memory.pass_fence(fence)
        if seq is not None and seq in self._running.arriving:
            self._joining.append(seq)

    def _note(self, seq: Sequence, verdict: Verdict, reason: Reason) -> None:
        self._decisions.append(Decision(seq.request_id, seq.tenant.name, verdict, reason))


def _append_all(
    sequences: Iterable[Sequence], tokens: Mapping[str, SampledToken]
) -> list[TokenOutput]:
    """Append what was sampled for these requests, and tell which of them end with it.

    Whoever has ended while the step was computed gets nothing.
    """
    outputs: list[TokenOutput] = []
    running = Phase.RUNNING
    new_output = tuple.__new__  # what TokenOutput() calls, at half its time
    for seq in sequences:
        if seq.phase is not running:
            continue
        request_id = seq.request_id
        token = tokens[request_id]
        token_id = token[0]
        seq.computed_tokens = length = seq.num_tokens
        length += 1
        seq.num_tokens = length
        seq.token_ids.append(token_id)
        if token_id in seq.stop_token_ids:
            reason = FinishReason.STOP
        elif length >= seq.max_tokens:
            reason = FinishReason.LENGTH
        else:
            reason = None
        outputs.append(new_output(TokenOutput, (request_id, token, reason)))
    return outputs
