"""One trace through one way of batching, on a simulated GPU: what came out and how fast."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from tidegate_cli.bench.errors import BenchError
from tidegate_cli.bench.figures import quantiles
from tidegate_cli.traces import TraceRequest
from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.request import Request
from tidegate_engine.core.sampling import SamplingParams
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.core.static_batching import StaticScheduler
from tidegate_engine.executor.base import Capacity
from tidegate_engine.executor.clock import VirtualClock
from tidegate_engine.executor.hardware import Gpu, ModelShape, fitting_capacity
from tidegate_engine.executor.simulated import SimulatedExecutor
from tidegate_engine.executor.step_cost import Roofline
from tidegate_engine.replay.driver import Arrival, Replay
from tidegate_engine.replay.log import ReplayLog
from tidegate_policies.rules import TenantRule, TierRule, WatermarkRule
from tidegate_policies.snapshot import PolicySnapshot

STATIC, BUCKETED, CONTINUOUS = "static", "bucketed", "continuous"
WAYS = (STATIC, BUCKETED, CONTINUOUS)
"""Of batching, the one that is measured last."""

_TENANT = "everybody"
_SAMPLING = SamplingParams(temperature=0.0)


@dataclass(frozen=True, kw_only=True)
class Served:
    """What one way of batching made of a trace.

    Attributes:
        output_tokens_per_s: Over the time from the first arrival to the end of the last step.
        ttft_seconds: p50, p90 and p99, counted from arrival.
        itl_seconds: p50, p90 and p99 of the times between two tokens of a request.
        decodes_mean: Decodes in a step that has any, padding not counted.
        padding_share: Of all computed tokens.
        slot_bound: Slots times steps over output tokens, if those who are admitted together hold
            their slots until the last of them ends: what padding of outputs costs.
        outputs_hash: Of all output tokens by request, the same in this process alone.
    """

    output_tokens_per_s: float
    ttft_seconds: list[float]
    itl_seconds: list[float]
    decodes_mean: float
    padding_share: float
    slot_bound: float
    num_preemptions: int
    outputs_hash: int


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The hardware and the bounds that every way of batching gets alike."""

    gpu: Gpu
    model: ModelShape
    max_num_seqs: int
    max_batched_tokens: int

    @cached_property
    def capacity(self) -> Capacity:
        """KV memory beside the model's weights."""
        return fitting_capacity(self.gpu, self.model)

    def serve(self, way: str, trace: Sequence[TraceRequest], *, at_once: bool) -> Served:
        """Replay a trace.

        Args:
            way: One of `WAYS`.
            trace: Every request runs to its recorded length.
            at_once: All arrive at the start, so that only batching bounds the throughput; else
                they arrive as recorded.

        Raises:
            BenchError: A request did not get all of its output.
        """
        clock = VirtualClock()
        cost = Roofline(gpu=self.gpu, model=self.model, block_size=self.capacity.block_size)
        executor = SimulatedExecutor(
            capacity=self.capacity, vocab_size=self.model.vocab_size, cost=cost, clock=clock
        )
        scheduler = self._scheduler(way, costs=cost.costs, max_waiting=len(trace))
        replay = Replay(scheduler=scheduler, executor=executor, clock=clock)
        log = replay.run(
            Arrival(0.0 if at_once else one.at_seconds, _request(number, one))
            for number, one in enumerate(trace)
        )
        return _figures(way, log, trace)

    def _scheduler(
        self, way: str, *, costs: ExecutorCosts, max_waiting: int
    ) -> Scheduler | StaticScheduler:
        limits = EngineLimits(
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            max_waiting=max_waiting,
        )
        num_blocks, block_size = self.capacity.num_blocks, self.capacity.block_size
        scheduler: Scheduler | StaticScheduler
        if way == CONTINUOUS:
            scheduler = Scheduler(
                num_blocks=num_blocks, block_size=block_size, limits=limits, costs=costs
            )
        else:
            scheduler = StaticScheduler(
                num_blocks=num_blocks,
                block_size=block_size,
                limits=limits,
                is_bucketed=way == BUCKETED,
            )
        scheduler.apply_policy(_one_tenant(), 1)
        scheduler.plan_step(0.0)
        return scheduler


def _one_tenant() -> PolicySnapshot:
    """Return a policy under which all KV up to the low watermark is the only tenant's own."""
    return PolicySnapshot.of(
        "bench/batching",
        tiers=[TierRule(name="standard", value=0)],
        tenants=[
            TenantRule(
                tenant=_TENANT,
                policy="bench/everybody",
                tier="standard",
                kv_nominal_percent=WatermarkRule().low_percent,
            )
        ],
    )


def _request(number: int, one: TraceRequest) -> Request:
    return Request(
        request_id=f"r{number}",
        tenant=_TENANT,
        # Each begins with a token of its own: the traces don't say what prompts share.
        prompt_ids=(number, *(0,) * (one.prompt_tokens - 1)),
        max_output_tokens=one.output_tokens,
        sampling=_SAMPLING,
    )


def _figures(way: str, log: ReplayLog, trace: Sequence[TraceRequest]) -> Served:
    traces = list(log.requests.values())
    for one, recorded in zip(traces, trace, strict=True):
        if len(one.token_ids) != recorded.output_tokens:
            got = one.rejection.message if one.rejection else f"{len(one.token_ids)} tokens"
            raise BenchError(
                f"{way}: {one.request_id} should have {recorded.output_tokens} output tokens: {got}"
            )
    started = min(one.arrived_at for one in traces)
    padding = sum(step.padding_tokens for step in log.steps)
    computed = padding + sum(step.decodes + step.prefill_tokens for step in log.steps)
    return Served(
        output_tokens_per_s=log.output_tokens / (log.busy_until - started),
        ttft_seconds=quantiles(one.ttft_seconds or 0.0 for one in traces),
        itl_seconds=quantiles(gap for one in traces for gap in one.itl_seconds),
        decodes_mean=fmean(step.decodes for step in log.steps if step.decodes),
        padding_share=padding / computed,
        slot_bound=_slot_bound(log),
        num_preemptions=sum(one.preemptions for one in traces),
        outputs_hash=hash(tuple(tuple(one.token_ids) for one in traces)),
    )


def _slot_bound(log: ReplayLog) -> float:
    together: dict[float | None, list[int]] = {}
    for one in log.requests.values():
        together.setdefault(one.admitted_at, []).append(len(one.token_ids))
    slot_steps = sum(max(lengths) * len(lengths) for lengths in together.values())
    return slot_steps / log.output_tokens
