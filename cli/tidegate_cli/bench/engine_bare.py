"""An engine's steps without the engine: scheduler and executor alone, nobody to talk to.

    python -m tidegate_cli.bench.engine_bare < WORK > STEPS

A process of its own, with the engine's environment: the settings, and so model, kernels and
threads, are the engine's, and so is an allocator or OpenMP library that is preloaded.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tidegate_cli.bench.engine_policy import BENCH_TENANT, everything_for_one_tenant
from tidegate_cli.bench.engine_profile import ProfiledExecutor
from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import StepPlan, StepResult
from tidegate_engine.core.request import Request
from tidegate_engine.core.sampling import SamplingParams
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.executor.base import Capacity, Executor
from tidegate_engine.executor.clock import WallClock
from tidegate_engine.parts import load_parts
from tidegate_engine.replay.driver import Arrival, Replay
from tidegate_engine.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class BareWork:
    """What is replayed.

    Attributes:
        warm_up: Prompts and output lengths that are served before, untimed.
        timed: Prompts and output lengths; all are there at the start.
        profiles: Whether to look into the steps afterwards.
    """

    warm_up: Sequence[tuple[Sequence[int], int]]
    timed: Sequence[tuple[Sequence[int], int]]
    max_num_seqs: int
    temperature: float
    profiles: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BareSteps:
    """What replaying took.

    Attributes:
        step_seconds: Of executing each step, in order: planning and committing not counted.
        output_tokens: Of all.
        profile: Share of the steps' time by what it was spent on; empty = not looked at.
        quality: What quantisation costs, by the results' keys; empty where there is none.
    """

    step_seconds: Sequence[float]
    output_tokens: int
    profile: dict[str, float] = field(default_factory=dict)
    quality: dict[str, float] = field(default_factory=dict)

    @property
    def output_tokens_per_s(self) -> float:
        """What the executor allows if nothing else takes any time."""
        return self.output_tokens / sum(self.step_seconds)


class TimedExecutor:
    """An executor that notes how long its steps take.

    Attributes:
        step_seconds: Of each step, in order.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.step_seconds: list[float] = []

    @property
    def capacity(self) -> Capacity:
        """KV memory, as of the executor."""
        return self._executor.capacity

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry a plan out."""
        began = time.perf_counter()
        result = self._executor.execute(plan)
        self.step_seconds.append(time.perf_counter() - began)
        return result

    def measure(self) -> ExecutorCosts:
        """Measure the executor."""
        return self._executor.measure()


class BareEngine:
    """A scheduler and an executor as the engine's settings make them."""

    def __init__(self, settings: Settings, work: BareWork) -> None:
        self._work = work
        self._settings = settings
        parts = load_parts(settings, created=0)
        self._executor, self._costs = parts.executor, parts.costs
        self._limits = EngineLimits(
            max_num_seqs=work.max_num_seqs, max_batched_tokens=settings.max_batched_tokens
        )

    def run(self) -> BareSteps:
        """Replay everything."""
        self._serve(self._executor, self._work.warm_up)
        timed = TimedExecutor(self._executor)
        output_tokens = self._serve(timed, self._work.timed)
        return BareSteps(
            step_seconds=timed.step_seconds,
            output_tokens=output_tokens,
            profile=self._profile() if self._work.profiles else {},
            quality=self._quality(),
        )

    def _profile(self) -> dict[str, float]:
        profiled = ProfiledExecutor(self._executor)
        self._serve(profiled, self._work.timed)
        return profiled.shares()

    def _quality(self) -> dict[str, float]:
        settings = self._settings
        if settings.executor != "torch" or settings.quantization == "none":
            return {}
        # Imported here, as simulated executors need no PyTorch.
        from tidegate_engine.executor.quality import measure_quality_loss
        from tidegate_engine.model.loader import load_model

        model = load_model(settings.model_source, settings.cache_dir)
        loss = measure_quality_loss(model, settings.quantization)
        return {
            "perplexity": loss.perplexity,
            "quantized_perplexity": loss.quantised_perplexity,
            "quantized_same_choice": loss.same_choice,
        }

    def _serve(self, executor: Executor, requests: Sequence[tuple[Sequence[int], int]]) -> int:
        """Run requests to their ends; returns how many output tokens they got."""
        # A fresh scheduler each time: none finds what an earlier one has cached.
        scheduler = Scheduler(
            num_blocks=executor.capacity.num_blocks,
            block_size=executor.capacity.block_size,
            num_host_blocks=executor.capacity.num_host_blocks,
            costs=self._costs,
            limits=self._limits,
        )
        scheduler.apply_policy(everything_for_one_tenant(self._work.max_num_seqs), 1)
        clock = WallClock()
        replay = Replay(scheduler=scheduler, executor=executor, clock=clock)
        now = clock.now()
        scheduler.plan_step(now)
        log = replay.run(
            Arrival(now, self._request(number, prompt, output))
            for number, (prompt, output) in enumerate(requests)
        )
        return log.output_tokens

    def _request(self, number: int, prompt: Sequence[int], output: int) -> Request:
        return Request(
            request_id=f"r{number}",
            tenant=BENCH_TENANT,
            prompt_ids=tuple(prompt),
            max_output_tokens=output,
            sampling=SamplingParams(temperature=self._work.temperature, seed=number),
        )


def main() -> None:
    """Read the work from standard input, write what it took to standard output."""
    document: dict[str, Any] = json.load(sys.stdin)
    engine = BareEngine(Settings.from_environment(), BareWork(**document))
    json.dump(asdict(engine.run()), sys.stdout)


if __name__ == "__main__":
    main()
