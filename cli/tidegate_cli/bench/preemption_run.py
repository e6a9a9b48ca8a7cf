"""The measurements of `tidegate bench preemption`; `preemption` says what they are."""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path
from statistics import median

import numpy as np
import torch

from tidegate_cli.bench.errors import BenchError
from tidegate_cli.bench.preemption import PreemptionSettings
from tidegate_cli.bench.result import BenchResult
from tidegate_cli.prompts import prompt_of
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import PlanRow, SampledToken, StepPlan, SwapCopy
from tidegate_engine.core.request import Request
from tidegate_engine.core.sampling import SamplingContext, SamplingParams
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.executor.clock import VirtualClock
from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.executor.torch_executor import TorchExecutor
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.llama import Llama
from tidegate_engine.model.loader import LoadedModel, load_model
from tidegate_engine.model.tokenizer import Tokenizer
from tidegate_engine.replay.driver import Replay
from tidegate_engine.settings import Settings
from tidegate_policies.rules import (
    KvEstimate,
    PreemptionMode,
    PreemptionRule,
    TenantRule,
    TierRule,
    WatermarkRule,
)
from tidegate_policies.snapshot import PolicySnapshot

MODES = (PreemptionMode.SWAP, PreemptionMode.RECOMPUTE)

TIE = 1e-3
"""Below this gap between the two best log-probabilities, rounding may decide."""

_MODEL = "smollm2"
_GREEDY = SamplingParams(temperature=0.0)
_SPARE_BLOCKS = 2
_CACHE_BYTES = 256 << 20
_WAVES = "waves"
_VICTIMS = "victims"


def measure(settings: PreemptionSettings, progress: Callable[[str], None]) -> BenchResult:
    """Measure everything.

    Raises:
        BenchError: The model can't be loaded, or nobody was preempted.
    """
    torch.set_num_threads(settings.threads)
    progress(f"loading {_MODEL}")
    cache_dir: Path = Settings.model_fields["cache_dir"].get_default(call_default_factory=True)
    try:
        model = load_model(_MODEL, cache_dir)
    except ModelLoadError as error:
        raise BenchError(str(error)) from error
    executor, cache = _executor(model, settings)
    load = _Load.of(settings, model.tokenizer)
    served = {}
    for mode in MODES:
        progress(f"serving {len(load.requests)} requests, preemption by {mode}")
        served[mode] = _Served.of(load, executor, settings, mode)
    progress("serving each of them alone")
    alone = {request.request_id: _alone(executor, request) for request in load.requests}
    progress(f"swapping and recomputing {settings.context_tokens} tokens")
    series = {
        **_compared(served, alone),
        **_copies(executor, cache, settings),
        **_resumes(executor, settings),
    }
    return BenchResult(
        bench="preemption",
        settings={**vars(settings), "model": _MODEL, "dtype": "float32"},
        results=_results(served, series),
        series=series,
    )


def _results(
    served: "dict[PreemptionMode, _Served]", series: dict[str, list[float]]
) -> dict[str, float]:
    by_swap, by_recompute = (served[mode] for mode in MODES)
    slower = min(series["swap_out_gb_per_s"][0], series["swap_in_gb_per_s"][0])
    return {
        "recomputed_fraction_swap": by_swap.recomputed_fraction,
        "recomputed_fraction_recompute": by_recompute.recomputed_fraction,
        "swap_over_memcpy": slower / series["memcpy_gb_per_s"][0],
        "resume_swap_over_recompute": (
            series["resume_recompute_ms"][0] / series["resume_swap_ms"][0]
        ),
        "outputs_identical": float(series["differing_requests"] == [0]),
    }


# -- under pressure --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Load:
    """Requests that fill the pool, and waves of others that displace them.

    Attributes:
        num_blocks: As many as the victims need at their longest.
    """

    victims: Sequence[Request]
    waves: Sequence[Sequence[Request]]
    num_blocks: int

    @classmethod
    def of(cls, settings: PreemptionSettings, tokenizer: Tokenizer) -> "_Load":
        """Make them up: by turns greedy and seeded."""
        rng = random.Random(settings.seed)
        numbers = count()

        def request(tenant: str, prompt_tokens: int, output_tokens: int) -> Request:
            number = next(numbers)
            # Of eight tokens, so that hardly ever a draw falls where rounding decides it.
            seeded = SamplingParams(seed=number, temperature=1.0, top_k=8)
            text = f"{number}. {prompt_of(prompt_tokens, rng)}"
            return Request(
                request_id=f"{tenant}-{number}",
                tenant=tenant,
                prompt_ids=tuple(tokenizer.encode(text)[:prompt_tokens]),
                max_output_tokens=output_tokens,
                sampling=seeded if number % 2 else _GREEDY,
            )

        victims = [
            request(_VICTIMS, settings.victim_prompt_tokens, settings.victim_output_tokens)
            for _ in range(settings.victims)
        ]
        waves = [
            [
                request(_WAVES, settings.wave_prompt_tokens, settings.wave_output_tokens)
                for _ in range(settings.wave_requests)
            ]
            for _ in range(settings.waves)
        ]
        each = settings.victim_prompt_tokens + settings.victim_output_tokens
        num_blocks = settings.victims * -(-each // settings.block_size) + _SPARE_BLOCKS
        return cls(victims, waves, num_blocks)

    @property
    def requests(self) -> list[Request]:
        """All of them."""
        return [*self.victims, *(request for wave in self.waves for request in wave)]


@dataclass(kw_only=True)
class _Served:
    """What became of a load.

    Attributes:
        outputs: Tokens, by request.
        preemptions: How often each was taken out, by request.
        computed: Tokens computed.
        recomputed: Those of them that had been computed before.
    """

    outputs: dict[str, list[int]] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)
    computed: int = 0
    recomputed: int = 0
    _ends: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        load: _Load,
        executor: TorchExecutor,
        settings: PreemptionSettings,
        mode: PreemptionMode,
    ) -> "_Served":
        """Serve a load; a wave comes whenever the victims have produced one more share of theirs.

        Raises:
            BenchError: Nobody was preempted.
        """
        scheduler = Scheduler(
            num_blocks=load.num_blocks,
            block_size=settings.block_size,
            num_host_blocks=executor.capacity.num_host_blocks,
            limits=EngineLimits(max_batched_tokens=settings.max_batched_tokens),
        )
        scheduler.apply_policy(_policy(mode), 1)
        replay = Replay(scheduler=scheduler, executor=executor, clock=VirtualClock())
        scheduler.plan_step(0.0)
        for request in load.victims:
            replay.submit(request)
        served = cls()
        share = settings.victims * settings.victim_output_tokens // (settings.waves + 1)
        waiting = [*load.waves]

        def at_step(plan: StepPlan) -> None:
            served._count(plan)
            produced = sum(len(replay.log.requests[r.request_id].token_ids) for r in load.victims)
            if waiting and produced >= share * (1 + settings.waves - len(waiting)):
                for request in waiting.pop(0):
                    replay.submit(request)

        replay.run(at_step=at_step)
        for request_id, trace in replay.log.requests.items():
            served.outputs[request_id] = trace.token_ids
            served.preemptions[request_id] = trace.preemptions
        if not any(served.preemptions.values()):
            raise BenchError(f"nobody was preempted by {mode}")
        return served

    @property
    def recomputed_fraction(self) -> float:
        """The share of all computed tokens that had been computed before."""
        return self.recomputed / self.computed

    def _count(self, plan: StepPlan) -> None:
        for row in plan.rows:
            end = self._ends.get(row.request_id, 0)
            self.computed += row.end - row.start
            self.recomputed += max(0, min(row.end, end) - row.start)
            self._ends[row.request_id] = max(row.end, end)


def _policy(mode: PreemptionMode) -> PolicySnapshot:
    rule = PreemptionRule(mode=mode, min_quantum_tokens=2, max_preemptions=100)
    return PolicySnapshot.of(
        "bench/preemption",
        tiers=[TierRule(name="high", value=10), TierRule(name="low", value=0)],
        tenants=[
            TenantRule(tenant=_WAVES, policy="bench/waves", tier="high", kv_nominal_percent=95),
            TenantRule(tenant=_VICTIMS, policy="bench/victims", tier="low", preemption=rule),
        ],
        watermarks=WatermarkRule(low_percent=98, high_percent=99),
        kv_estimate=KvEstimate.OPTIMISTIC,
    )


def _alone(executor: TorchExecutor, request: Request) -> list[SampledToken]:
    """Compute a request without a scheduler, its prompt in one chunk."""
    tokens = [*request.prompt_ids]
    blocks = range(executor.capacity.num_blocks)
    context = SamplingContext(
        params=replace(request.sampling, logprobs=2),
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
    )
    output: list[SampledToken] = []
    start = 0
    while len(output) < request.max_output_tokens:
        row = PlanRow("r", start, tokens[start:], blocks, samples=True, sampling=context)
        [token] = executor.execute(StepPlan(step=1, revision=1, rows=(row,))).tokens.values()
        start = len(tokens)
        tokens.append(token.token_id)
        output.append(token)
    return output


def _compared(
    served: dict[PreemptionMode, _Served], alone: dict[str, list[SampledToken]]
) -> dict[str, list[float]]:
    """Hold outputs against those of each request alone, greedy ones up to the first near tie."""
    num_compared = num_differing = 0
    for request_id, tokens in alone.items():
        expected = [token.token_id for token in tokens]
        is_seeded = int(request_id.rpartition("-")[2]) % 2
        decided = len(expected) if is_seeded else sum(1 for _ in takewhile(_is_decided, tokens))
        for one in served.values():
            output = one.outputs[request_id]
            num_compared += decided
            num_differing += len(output) != len(expected) or output[:decided] != expected[:decided]
    return {
        "compared_tokens": [num_compared],
        "output_tokens": [len(served) * sum(map(len, alone.values()))],
        "differing_requests": [num_differing],
        **{f"preemptions_{m}": [*one.preemptions.values()] for m, one in served.items()},
        **{f"computed_tokens_{m}": [one.computed] for m, one in served.items()},
    }


def _is_decided(token: SampledToken) -> bool:
    (_, best), (_, second) = token.top_logprobs
    return best - second >= TIE


# -- copies and resumes ----------------------------------------------------------------------------


def _executor(model: LoadedModel, settings: PreemptionSettings) -> tuple[TorchExecutor, KvCache]:
    each = settings.victim_prompt_tokens + settings.victim_output_tokens
    num_blocks = max(
        settings.victims * -(-each // settings.block_size) + _SPARE_BLOCKS,
        4 * -(-settings.context_tokens // settings.block_size),
    )
    cache = KvCache.allocate(
        model.config,
        num_blocks=num_blocks,
        num_host_blocks=num_blocks,
        block_size=settings.block_size,
    )
    torch.set_num_threads(settings.threads)
    return TorchExecutor(Llama(model.config, model.weights), cache), cache


class _Swaps:
    """Swaps a context of scattered blocks out and in, waiting for each."""

    def __init__(self, executor: TorchExecutor, settings: PreemptionSettings) -> None:
        capacity = executor.capacity
        blocks = [*range(capacity.num_blocks)]
        random.Random(settings.seed).shuffle(blocks)
        self.blocks = blocks[: -(-settings.context_tokens // capacity.block_size)]
        self._executor = executor
        self._fences = count(1)

    def swap_out(self) -> None:
        self._wait(StepPlan(step=1, revision=1, swap_out=(self._swap(),), num_open_fences=1))

    def swap_in(self) -> None:
        self._wait(StepPlan(step=1, revision=1, swap_in=(self._swap(),), num_open_fences=1))

    def _swap(self) -> SwapCopy:
        host = tuple(range(len(self.blocks)))
        return SwapCopy(next(self._fences), "r", tuple(self.blocks), host)

    def _wait(self, plan: StepPlan) -> None:
        self._executor.execute(plan)


def _copies(
    executor: TorchExecutor, cache: KvCache, settings: PreemptionSettings
) -> dict[str, list[float]]:
    """Time swaps and memcpys of the same bytes by turns.

    A swap is copied by a thread that has slept. So is the memcpy that it is held against: a core
    that has to wake up first copies a fifth less in these few milliseconds than one that was busy.
    """
    swaps = _Swaps(executor, settings)
    num_bytes = len(swaps.blocks) * cache.pool[0].nbytes
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    elsewhere = np.ones(_CACHE_BYTES, np.uint8)
    with ThreadPoolExecutor(max_workers=1) as thread:
        ways: dict[str, Callable[[], None]] = {
            "swap_out": swaps.swap_out,
            "swap_in": swaps.swap_in,
            "memcpy": lambda: thread.submit(np.copyto, target, source).result(),
            "busy_memcpy": lambda: np.copyto(target, source),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(settings.swaps):
            for way, copy in ways.items():
                # Steps between them would have driven the blocks out of the processor's caches.
                elsewhere.fill(number)
                seconds[way].append(_timed(copy))
    return {
        "swap_bytes": [num_bytes],
        **{f"{name}_gb_per_s": [num_bytes / median(s) / 1e9] for name, s in seconds.items()},
        **{f"{name}_seconds": s for name, s in seconds.items()},
    }


def _resumes(executor: TorchExecutor, settings: PreemptionSettings) -> dict[str, list[float]]:
    """Time, by turns, how long a preempted request takes to its next token."""
    swaps = _Swaps(executor, settings)
    length = settings.context_tokens
    rng = random.Random(settings.seed)
    tokens = [rng.randrange(3, 250) for _ in range(length + 1)]
    context = SamplingContext(params=_GREEDY, token_ids=tokens, num_prompt_tokens=length)
    blocks = [*swaps.blocks, *set(range(executor.capacity.num_blocks)).difference(swaps.blocks)]

    def compute(start: int, end: int) -> None:
        samples = end == length + 1
        row = PlanRow("r", start, tokens[start:end], blocks, samples=samples, sampling=context)
        executor.execute(StepPlan(step=1, revision=1, rows=(row,)))

    def by_recompute() -> None:
        for start in range(0, length + 1, settings.max_batched_tokens):
            compute(start, min(start + settings.max_batched_tokens, length + 1))

    def by_swap() -> None:
        swaps.swap_in()
        compute(length, length + 1)

    seconds: dict[str, list[float]] = {"recompute": [], "swap": []}
    for _ in range(settings.resumes):
        seconds["recompute"].append(_timed(by_recompute))
        swaps.swap_out()
        seconds["swap"].append(_timed(by_swap))
    return {
        **{f"resume_{name}_ms": [1000 * median(s)] for name, s in seconds.items()},
        **{f"resume_{name}_seconds": s for name, s in seconds.items()},
    }


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
