"""The torch fleet of `tidegate bench isolation`: an engine process with SmolLM2, over HTTP."""

import asyncio
import hashlib
import os
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from tidegate_cli.bench.engine_client import StreamingClient
from tidegate_cli.bench.engine_process import EngineProcess, OneTenant, running_engine
from tidegate_cli.bench.isolation_client import Clients
from tidegate_cli.bench.isolation_figures import Run
from tidegate_cli.bench.isolation_load import Planned, Traffic
from tidegate_cli.bench.isolation_plan import Scale, gold_of
from tidegate_cli.bench.isolation_policy import Side, side_of
from tidegate_cli.bench.isolation_side import FCFS
from tidegate_cli.engine_metrics import EngineMetrics, TenantTotals
from tidegate_cli.errors import NotReadyError
from tidegate_cli.traces import TraceRequest, summarize_lengths

PROMPT_P95, OUTPUT_P95 = 256, 64
"""Tokens that 95 % of the record's requests stay within, once shortened."""

SCALE = Scale(
    gold_ttft_seconds=2.0,
    lead_in_seconds=15.0,
    seconds=180.0,
    rounds=3,
    misbehaving_seconds=60.0,
    max_running=10,
    quantum_tokens=2,
    queued=10_000,
    queued_choices=100,
    huge_prompt_tokens=1_700,
    unread_output_tokens=1_500,
)

_FLOOD = 12
"""Requests there from the start for each second, while capacity is measured: too many."""

_IDLE_SECONDS = 120.0
_POLL_SECONDS = 0.1
_STATES = ("running", "waiting", "swapped")


class TorchGround:
    """Where sides are run: one engine, which obeys one side's policy after the other."""

    def __init__(
        self, tenant: OneTenant, engine: EngineProcess, model: str, traffic: Traffic, *, seed: int
    ) -> None:
        """Run everything on one engine.

        Args:
            tenant: Delivers policies.
            engine: Obeys them.
            model: The engine's name for what it serves.
            traffic: What capacity is measured with.
            seed: Chooses the words of the prompts.
        """
        self._tenant = tenant
        self._engine = engine
        self._model = model
        self._traffic = traffic
        self._seed = seed

    async def capacity(self, scale: Scale) -> float:
        """Return the requests a second that the engine can finish.

        It has more of the record's requests than it can do there at once, first come, first
        served: the service that it gives a second, over that of the record's mean request. Before
        that it is warmed up with some of them: kernels are chosen when a shape first comes.
        """
        flood = gold_of(scale, load=1.0)
        begin, end = scale.lead_in_seconds, scale.lead_in_seconds + scale.misbehaving_seconds
        plans = [
            replace(one, at_seconds=0.0, patience_seconds=None)
            for one in self._traffic.requests_of(flood, rate=_FLOOD, seconds=end)
        ]
        run = await self.serve(
            side_of(FCFS, [flood], itl_seconds=None), plans, begin=begin, end=end
        )
        return run.service_per_s / self._traffic.mean_service

    async def serve(self, side: Side, plans: Sequence[Planned], *, begin: float, end: float) -> Run:
        """Run a side; looked at from `begin` to `end`, when its clients hang up.

        Raises:
            BenchError: An answer that no overload explains.
            NotReadyError: The engine did not become idle, or did not obey.
        """
        await self._idle()
        names = [rule.tenant for rule in side.policy.tenants]
        keys = {name: f"{self._tenant.key}-{name}" for name in names}
        digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in keys.items()}
        await self._engine.obeys(self._tenant.deliver(side.with_keys(digests)))
        clients = Clients(
            base_url=self._engine.target.base_url,
            model=self._model,
            keys={tenant: keys[name] for tenant, name in side.renamed.items()},
            seed=self._seed,
        )
        first = await self._engine.metrics()
        async with asyncio.TaskGroup() as tasks:
            before = tasks.create_task(self._metrics_after(begin))
            served = tasks.create_task(clients.run(plans, until=end))
        last = await self._engine.metrics()
        return Run(
            experiences=served.result(),
            windows=[(begin, end)],
            service=_difference(_service(last, names), _service(before.result(), names)),
            preemptions=round(
                last.value("tidegate_preemptions_total") - first.value("tidegate_preemptions_total")
            ),
        )

    def describe(self) -> dict[str, object]:
        """Return what a number depends on."""
        return {"served_model": self._model, **engine_environment()}

    async def _metrics_after(self, seconds: float) -> EngineMetrics:
        await asyncio.sleep(seconds)
        return await self._engine.metrics()

    async def _idle(self) -> None:
        """Wait until nothing of the last side is left."""
        try:
            async with asyncio.timeout(_IDLE_SECONDS):
                while True:
                    metrics = await self._engine.metrics()
                    left = sum(metrics.value("tidegate_requests", state=one) for one in _STATES)
                    if not left:
                        return
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise NotReadyError("an idle engine", limit_seconds=_IDLE_SECONDS) from None


@asynccontextmanager
async def torch_ground(
    traffic: Traffic, *, seed: int, executor: str = "torch"
) -> AsyncIterator[TorchGround]:
    """Start what is needed, and stop it at the end of the block.

    Args:
        traffic: What capacity is measured with.
        seed: Chooses the words of the prompts.
        executor: `simulated` is for trying the benchmark itself.
    """
    with OneTenant.in_force() as tenant:
        tenant.publish(1)
        settings = {**engine_environment(), "TIDEGATE_EXECUTOR": executor}
        async with running_engine(tenant, "isolation", settings) as engine:
            async with StreamingClient(engine.target, temperature=0.0) as client:
                model = client.model
            yield TorchGround(tenant, engine, model, traffic, seed=seed)


def engine_environment() -> dict[str, str]:
    """Return the engine's settings; the clients keep a core for themselves where there are two."""
    cores = len(os.sched_getaffinity(0))
    return {
        "TIDEGATE_THREADS": str(max(1, cores - 1)),
        "TIDEGATE_MAX_NUM_SEQS": "32",
        "TIDEGATE_MAX_BATCHED_TOKENS": "128",
        "TIDEGATE_KV_BLOCKS": "1280",
    }


def shortened(
    recorded: Sequence[TraceRequest], *, seed: int
) -> tuple[tuple[TraceRequest, ...], dict[str, float]]:
    """Shorten a record for the small model, and shuffle its lengths.

    Gaps stay in their order, and a prompt with its output. In the few hundred requests that a
    tenant sends, the record's own order would make one's outputs half as long again as another's,
    and whoever serves that one would seem to be faster.

    Args:
        recorded: The record.
        seed: Of the order.

    Returns:
        The requests, and the factors of prompts and outputs: those by which the 95th percentiles
        become `PROMPT_P95` and `OUTPUT_P95`. By the longest, a few very long prompts would make
        all others so short that a step takes longer than reading them.
    """
    lengths = summarize_lengths(recorded)
    by_prompt = PROMPT_P95 / lengths.prompt_p95
    by_output = OUTPUT_P95 / lengths.output_p95
    shuffled = random.Random(f"{seed}/lengths").sample(recorded, len(recorded))
    requests = tuple(
        replace(
            lengths,
            at_seconds=one.at_seconds,
            prompt_tokens=max(1, round(lengths.prompt_tokens * by_prompt)),
            output_tokens=max(1, round(lengths.output_tokens * by_output)),
        )
        for one, lengths in zip(recorded, shuffled, strict=True)
    )
    return requests, {"prompt_factor": by_prompt, "output_factor": by_output}


def _service(metrics: EngineMetrics, tenants: Sequence[str]) -> dict[str, float]:
    return {name: TenantTotals([metrics], name).service for name in tenants}


def _difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in after.items()}
