"""Static batching: the baseline that continuous batching is compared with.

A batch is collected, its prompts are padded to the longest and read, and then it decodes until its
last request has finished; nobody joins meanwhile. Bucketed batching is the same with batches of one
bucket of prompt lengths each. What padding costs is computed as rows that are thrown away, by the
executor that also computes the others.

It is static batching at its best: KV is taken for the longest output that the batch may have, not
for the model's longest; an output token is handed over as it comes; a decode reads its own context,
not the padded one; and a cancelled request costs nothing more.

Source: Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models",
OSDI 2022, which calls it scheduling at the granularity of requests.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import inf

from tidegate_engine.core.arrival import RETRY_SECONDS
from tidegate_engine.core.block_pool import BlockPool
from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.padded_batch import Member, PaddedBatch
from tidegate_engine.core.plan import SampledToken, StepPlan, StepResult
from tidegate_engine.core.request import (
    FinishReason,
    Rejection,
    RejectionCode,
    Request,
    SchedulerStats,
    TenantStats,
    TokenOutput,
)
from tidegate_engine.core.sequence import Phase
from tidegate_engine.core.static_standings import StaticStandings
from tidegate_policies.admission import Watermark
from tidegate_policies.fairness import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from tidegate_policies.snapshot import PolicySnapshot


@dataclass(slots=True)
class _Totals:
    """What one tenant has had since the start; the fields are those of `TenantStats`."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    service: float = 0.0
    cancelled: int = 0
    finished: int = 0


class StaticScheduler:
    """Static batching behind the interface of `Scheduler`: first come, first served, one queue.

    Tenants are counted and treated alike; of the policy only the bounds of a batch are obeyed.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        limits: EngineLimits,
        costs: ExecutorCosts | None = None,
        is_bucketed: bool = False,
    ) -> None:
        """Start empty and without a policy: nothing is let in until one is in force.

        Args:
            num_blocks: KV blocks on the device.
            block_size: Tokens per block.
            num_host_blocks: Reported and never used: nobody is preempted.
            limits: Of the batch and the queue.
            costs: Told as they are: nothing here is decided by cost.
            is_bucketed: Whether a batch holds prompts of one bucket of lengths only; buckets end
                at powers of two, and the oldest request chooses.
        """
        self.step_costs = costs or ExecutorCosts()
        self._pool = BlockPool(num_blocks=num_blocks, block_size=block_size)
        self._batch = PaddedBatch(self._pool)
        self._num_host_blocks = num_host_blocks
        self._engine_limits = limits
        self._limits = limits
        self._is_bucketed = is_bucketed
        # By bucket; ordered dictionaries, so that cancelling doesn't depend on how many wait.
        self._queues: dict[int, OrderedDict[str, Member]] = {}
        self._mailbox: tuple[PolicySnapshot, int] | None = None
        self._revision = 0
        self._step = 0
        self._arrivals = 0
        self._totals: dict[str, _Totals] = {}
        self._has_open_plan = False
        self.standings = StaticStandings(waiting=self._waiting, batch=self._batch)

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
        return bool(self._batch) or self.num_waiting > 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a batch."""
        return sum(len(queue) for queue in self._queues.values())

    def submit(self, request: Request, now: float) -> Rejection | None:
        """Queue a request behind all earlier ones, or say why not.

        Raises:
            ValueError: Another live request has this id.
        """
        if self._find(request.request_id) is not None:
            raise ValueError(f"request {request.request_id!r} is live already")
        rejection = self._refuse(request)
        if rejection is not None:
            return rejection
        self._arrivals += 1
        # The last output token is never cached, hence one more than the context has room for.
        room = self._capacity_tokens - len(request.prompt_ids) + 1
        member = Member(
            request=request,
            arrival=self._arrivals,
            submitted_at=now,
            max_output_tokens=max(1, min(request.max_output_tokens, room)),
            token_ids=list(request.prompt_ids),
        )
        self._queue_of(member)[member.request_id] = member
        self._totals.setdefault(member.tenant, _Totals())
        return None

    def cancel(self, request_id: str, now: float) -> Phase | None:  # noqa: ARG002
        """Take a request out, wherever it is; its KV blocks are free at once.

        Returns:
            The phase it was in; None = it wasn't alive. Cancelling twice, or after the end,
            changes nothing.
        """
        member = self._find(request_id)
        if member is None:
            return None
        phase = Phase.RUNNING if member.block_table else Phase.WAITING
        self._totals[member.tenant].cancelled += 1
        self._take_out(member)
        return phase

    def finish(self, request_id: str, now: float) -> bool:  # noqa: ARG002
        """End a request whose output contains a stop string: as finished, not as cancelled.

        Returns:
            Whether it was alive.
        """
        member = self._find(request_id)
        if member is None:
            return False
        self._end(member)
        if self._batch.get(request_id) is member:
            self._batch.close_if_over()
        else:
            self._take_out(member)
        return True

    def note_elsewhere(self, service: Mapping[str, float], active: Iterable[str]) -> None:
        """Ignore it: whoever comes first is served first."""

    def apply_policy(
        self,
        snapshot: PolicySnapshot,
        revision: int,
        *,
        at: float = inf,  # noqa: ARG002
    ) -> None:
        """Leave a policy in the mailbox; the next `plan_step` puts it in force, whole."""
        self._mailbox = (snapshot, revision)

    def plan_step(self, now: float) -> StepPlan:
        """Collect a batch when there is none, and describe its next step.

        Returns:
            The plan; without rows when nothing waits, or when the batch may still fill up.

        Raises:
            RuntimeError: The last plan was not committed. Nothing has changed.
        """
        if self._has_open_plan:
            raise RuntimeError(f"step {self._step} was planned and not committed")
        self._adopt_policy()
        wake_at = None if self._batch else self._when_full(now)
        admitted = [] if self._batch or wake_at is not None else self._collect()
        rows = self._batch.rows(token_budget=self._limits.max_batched_tokens)
        if rows:
            self._step += 1
            self._has_open_plan = True
        return StepPlan(
            step=self._step,
            revision=self._revision,
            rows=rows,
            admitted=tuple(member.request_id for member in admitted),
            wake_at=wake_at,
        )

    def commit_step(
        self,
        plan: StepPlan,
        result: StepResult,
        now: float,
    ) -> tuple[TokenOutput, ...]:
        """Account for the step just executed.

        Requests that failed in it are dropped, and count as cancelled.

        Returns:
            The new tokens, and which requests ended with them.

        Raises:
            KeyError: `result` lacks a row of `plan` that samples. Nothing has changed.
        """
        answered = result.tokens.keys() | result.failures.keys()
        missing = [r.request_id for r in plan.rows if r.samples and r.request_id not in answered]
        if missing:
            raise KeyError(f"step {plan.step}: no token for requests {missing}")
        self._has_open_plan = False
        for request_id in result.failures:
            self.cancel(request_id, now)
        outputs: list[TokenOutput] = []
        for row in plan.rows:
            member = self._batch.get(row.request_id)
            if member is None:  # cancelled while the step was computed
                continue
            member.computed_tokens += len(row.token_ids)
            if not (row.is_padding or row.is_decode):
                self._charge_prompt(member, len(row.token_ids))
            if row.samples and not member.has_ended:
                outputs.append(self._append(member, result.tokens[row.request_id]))
        self._batch.close_if_over()
        return tuple(outputs)

    def abandon_step(self, plan: StepPlan, now: float) -> tuple[str, ...]:
        """Drop the requests of a step that could not be executed.

        Returns:
            The requests that were dropped; they count as cancelled.
        """
        self._has_open_plan = False
        ids = dict.fromkeys(row.request_id for row in plan.rows if not row.is_padding)
        return tuple(request_id for request_id in ids if self.cancel(request_id, now) is not None)

    def stats(self) -> SchedulerStats:
        """Return the numbers at this step boundary."""
        running = Counter(m.tenant for m in self._batch if not m.has_ended)
        waiting = Counter(m.tenant for m in self._waiting())
        return SchedulerStats(
            step=self._step,
            revision=self._revision,
            running=running.total(),
            waiting=waiting.total(),
            swapped=0,
            kv_blocks=self._pool.num_blocks,
            kv_used_blocks=self._pool.num_used,
            kv_cached_blocks=0,
            host_blocks=self._num_host_blocks,
            host_used_blocks=0,
            swap_out_blocks=0,
            swap_in_blocks=0,
            watermark=Watermark.GREEN,
            tenants={
                name: TenantStats(
                    running=running[name],
                    waiting=waiting[name],
                    kv_used_blocks=sum(len(m.block_table) for m in self._batch if m.tenant == name),
                    **asdict(totals),
                )
                for name, totals in self._totals.items()
            },
        )

    def check_invariants(self) -> None:
        """Verify that blocks, batch and queues agree.

        Raises:
            AssertionError: They don't.
        """
        self._batch.check_invariants()
        for member in self._waiting():
            if member.block_table or member.computed_tokens or member.has_ended:
                raise AssertionError(f"{member.request_id} waits and has begun")

    # -- arrival -----------------------------------------------------------------------------

    @property
    def _capacity_tokens(self) -> int:
        return self._pool.num_blocks * self._pool.block_size

    def _refuse(self, request: Request) -> Rejection | None:
        if not self._revision:
            return Rejection(
                code=RejectionCode.NO_POLICY,
                message="no policy is in force yet",
                retry_after_seconds=RETRY_SECONDS,
            )
        length, limit = len(request.prompt_ids), self._capacity_tokens - 1
        if not length:
            return Rejection(code=RejectionCode.EMPTY_PROMPT, message="the prompt has no tokens")
        if length > limit:
            return Rejection(
                code=RejectionCode.PROMPT_TOO_LONG,
                message=f"the prompt has {length} tokens, the limit is {limit}",
            )
        if self.num_waiting >= self._limits.max_waiting:
            return Rejection(
                code=RejectionCode.QUEUE_FULL,
                message=f"{self._limits.max_waiting} requests are waiting already",
                retry_after_seconds=RETRY_SECONDS,
            )
        return None

    def _adopt_policy(self) -> None:
        if self._mailbox is None:
            return
        snapshot, self._revision = self._mailbox
        self._mailbox = None
        self._limits = self._engine_limits.under(snapshot.batching)
        # Tenants that have left and have no work are forgotten, or they would pile up.
        kept = {rule.tenant for rule in snapshot.tenants}
        kept |= {member.tenant for member in (*self._batch, *self._waiting())}
        self._totals = {name: totals for name, totals in self._totals.items() if name in kept}

    # -- the batch ---------------------------------------------------------------------------

    def _oldest(self) -> Member | None:
        heads = (next(iter(queue.values())) for queue in self._queues.values() if queue)
        return min(heads, key=lambda member: member.arrival, default=None)

    def _when_full(self, now: float) -> float | None:
        """Return until when the next batch may still fill up; None = it is to start now."""
        oldest = self._oldest()
        if oldest is None or len(self._queue_of(oldest)) >= self._limits.max_num_seqs:
            return None
        closes_at = oldest.submitted_at + self._limits.wait_window_seconds
        return closes_at if now < closes_at else None

    def _collect(self) -> list[Member]:
        oldest = self._oldest()
        if oldest is None:
            return []
        queue = self._queue_of(oldest)
        started = self._batch.start(queue.values(), max_members=self._limits.max_num_seqs)
        for _ in started:
            queue.popitem(last=False)
        return started

    # -- accounting and ends -----------------------------------------------------------------

    def _charge_prompt(self, member: Member, num_tokens: int) -> None:
        totals = self._totals[member.tenant]
        totals.prompt_tokens += num_tokens
        totals.service += PROMPT_TOKEN_COST * num_tokens

    def _append(self, member: Member, token: SampledToken) -> TokenOutput:
        member.token_ids.append(token.token_id)
        totals = self._totals[member.tenant]
        totals.output_tokens += 1
        totals.service += OUTPUT_TOKEN_COST
        reason = None
        if token.token_id in member.request.stop_token_ids:
            reason = FinishReason.STOP
        elif member.num_output_tokens >= member.max_output_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(member)
        return TokenOutput(member.request_id, token, reason)

    def _end(self, member: Member) -> None:
        """Count a request as finished; in the batch it goes on as padding."""
        member.has_ended = True
        self._totals[member.tenant].finished += 1

    def _take_out(self, member: Member) -> None:
        if self._batch.get(member.request_id) is member:
            self._batch.take_out(member)
            self._batch.close_if_over()
        else:
            del self._queue_of(member)[member.request_id]

    # -- looking things up -------------------------------------------------------------------

    def _queue_of(self, member: Member) -> OrderedDict[str, Member]:
        # The exponent of the least power of two that is no smaller.
        bucket = (member.prompt_tokens - 1).bit_length() if self._is_bucketed else 0
        return self._queues.setdefault(bucket, OrderedDict())

    def _find(self, request_id: str) -> Member | None:
        """Return a live request."""
        member = self._batch.get(request_id)
        if member is not None and not member.has_ended:
            return member
        return next((q[request_id] for q in self._queues.values() if request_id in q), None)

    def _waiting(self) -> Iterator[Member]:
        return (member for queue in self._queues.values() for member in queue.values())
