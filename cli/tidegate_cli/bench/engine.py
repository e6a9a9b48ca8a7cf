"""`tidegate bench engine`: a real engine process, served to streaming clients over HTTP.

Workload W (64 requests, see `recorded/README.md`) comes at once, then as Poisson arrivals; a
recorded trace, shortened, compares continuous with static batching. What the same steps take
without an engine around them is measured in the same run, and so are other servers.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from tidegate_cli.bench.engine_bare import BareSteps, BareWork
from tidegate_cli.bench.engine_client import RunFigures, StreamingClient, Target
from tidegate_cli.bench.engine_figures import (
    BatchingFigures,
    BurstFigures,
    EngineFigures,
    PeerFigures,
    print_figures,
)
from tidegate_cli.bench.engine_part import Part
from tidegate_cli.bench.engine_process import EngineProcess, OneTenant, running_engine
from tidegate_cli.bench.engine_usage import CpuTimes, CpuUse, StepUse, peak_resident_mb
from tidegate_cli.bench.engine_workload import (
    PromptWriter,
    SizedRequest,
    Vocabulary,
    at_once,
    capped,
    padding_bound,
    scaled_trace,
    workload_w,
)
from tidegate_cli.bench.errors import BenchError
from tidegate_cli.bench.result import BenchResult
from tidegate_cli.traces import TraceRequest
from tidegate_engine.model.bytes_tokenizer import BytesTokenizer
from tidegate_engine.settings import Settings

_WARM_UP_OUTPUT_TOKENS = 4
_INHERITED = ("TIDEGATE_", "LD_PRELOAD", "OMP_", "KMP_", "GOMP_", "MKL_", "MALLOC_", "TCMALLOC_")
"""Variables that change what an engine does or how fast."""

_KV_BLOCKS = 1280
"""Enough for all of W, and for a static batch of 32 of the longest prompts and outputs."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What is measured, and how much of it.

    Attributes:
        threads: CPU threads of a step; None = one for each core that this process may use.
        peers: URLs of OpenAI-compatible servers that get the same workload.
        parts: Are measured; whatever else there is, is left out.
        executor: `simulated` is for trying the benchmark itself.
        max_num_seqs: Most requests of W in one step.
        max_batched_tokens: Most tokens in one step.
        poisson_itl_seconds: What the policy promises between two tokens while arrivals are Poisson;
            the engine bounds the prompts in a step by it. At once W has no such target.
        poisson_partial_prefills: Prompts that may be half read at a time meanwhile.
        max_requests: Of W; the first ones.
        max_output_tokens: Longer outputs of W are cut.
        rate: Poisson arrivals of W, in requests a second.
        padded_requests: Of the recorded trace; the first ones.
        padded_longest: Its longest prompt and output after shortening.
        padded_slots: Requests in a step while continuous and static are compared.
        profiles: Whether to look into the steps; takes as long as W once more.
        seed: Chooses the words of the prompts.
    """

    dtype: str = "float32"
    quantization: str = "none"
    temperature: float = 0.0
    threads: int | None = None
    peers: tuple[str, ...] = ()
    parts: tuple[Part, ...] = tuple(Part)
    executor: str = "torch"
    max_num_seqs: int = 64
    max_batched_tokens: int = 512
    poisson_itl_seconds: float = 0.15
    poisson_partial_prefills: int = 1
    max_requests: int = 64
    max_output_tokens: int = 256
    rate: float = 1.0
    padded_requests: int = 640
    padded_longest: int = 256
    padded_slots: int = 32
    profiles: bool = True
    seed: int = 1

    def quick(self) -> "EngineSettings":
        """Return the same with few and short requests."""
        return replace(
            self,
            max_requests=8,
            max_output_tokens=8,
            rate=8.0,
            padded_requests=16,
            padded_longest=8,
            padded_slots=4,
            profiles=False,
        )

    @property
    def num_threads(self) -> int:
        """CPU threads of a step."""
        return self.threads or len(os.sched_getaffinity(0))

    @property
    def engine_environment(self) -> dict[str, str]:
        """What an engine is told beside its policy."""
        return {
            "TIDEGATE_EXECUTOR": self.executor,
            "TIDEGATE_DTYPE": self.dtype,
            "TIDEGATE_QUANTIZATION": self.quantization,
            "TIDEGATE_THREADS": str(self.num_threads),
            "TIDEGATE_MAX_NUM_SEQS": str(self.max_num_seqs),
            "TIDEGATE_MAX_BATCHED_TOKENS": str(self.max_batched_tokens),
            "TIDEGATE_KV_BLOCKS": str(_KV_BLOCKS),
        }


class EngineBench:
    """One run."""

    def __init__(
        self, settings: EngineSettings, tenant: OneTenant, tell: Callable[[str], None]
    ) -> None:
        """Prepare.

        Args:
            settings: What is measured.
            tenant: Whose policy the engines obey.
            tell: Told what is measured.
        """
        self._settings = settings
        self._tenant = tenant
        self._tell = tell
        self._lengths = capped(
            workload_w(settings.rate)[: settings.max_requests],
            prompt_tokens=sys.maxsize,
            output_tokens=settings.max_output_tokens,
        )
        self._padded = scaled_trace(settings.padded_requests, longest=settings.padded_longest)
        self._writer = PromptWriter(self._vocabulary(), settings.seed)

    async def run(self) -> EngineFigures:
        """Measure the parts that the settings name.

        Raises:
            CommandError: Something didn't start, or a request was not served as it should be.
            StartError: An engine ended.
        """
        settings, parts = self._settings, self._settings.parts
        self._tell("starting an engine")
        self._tenant.publish(settings.max_num_seqs)
        async with (
            running_engine(self._tenant, "continuous", settings.engine_environment) as engine,
            self._client(engine.target) as client,
        ):
            await client.run(self._warm_up())
            burst = await self._serve_burst(engine, client) if Part.BURST in parts else None
            poisson = await self._serve_poisson(engine, client) if Part.POISSON in parts else None
            resident_mb = peak_resident_mb(engine.pid)
            continuous = (
                await self._serve_continuous(engine, client) if Part.STATIC in parts else None
            )
        return EngineFigures(
            burst=burst,
            bare=await self._replay_bare() if burst else None,
            poisson=poisson,
            resident_mb=resident_mb,
            batching=await self._batching(continuous) if continuous else None,
            max_batched_tokens=settings.max_batched_tokens,
            poisson_itl_seconds=settings.poisson_itl_seconds,
            peers=[await self._measure_peer(url) for url in settings.peers],
        )

    async def _serve_burst(self, engine: EngineProcess, client: StreamingClient) -> BurstFigures:
        requests = self._burst()
        self._tell(f"W at once: {len(requests)} requests")
        first, cpu_first = await engine.metrics(), CpuTimes.read(engine.pid)
        run = await client.run(requests)
        cpu_last, last = CpuTimes.read(engine.pid), await engine.metrics()
        steps = StepUse.between(first, last)
        if steps.cached_tokens:
            raise BenchError(f"{steps.cached_tokens} prompt tokens came from the prefix cache")
        self._tell(f"{run.output_tokens_per_s:.1f} output tokens/s")
        cpu = CpuUse.between(
            cpu_first,
            cpu_last,
            seconds=run.seconds,
            num_compute_threads=self._settings.num_threads,
        )
        return BurstFigures(run=run, steps=steps, cpu=cpu)

    async def _serve_poisson(self, engine: EngineProcess, client: StreamingClient) -> RunFigures:
        settings = self._settings
        self._tell(f"W as Poisson arrivals, {settings.rate:g} requests/s")
        await engine.obeys(
            self._tenant.publish(
                settings.max_num_seqs,
                itl_seconds=settings.poisson_itl_seconds,
                max_partial_prefills=settings.poisson_partial_prefills,
            )
        )
        return await client.run(self._writer.write(self._lengths))

    async def _serve_continuous(self, engine: EngineProcess, client: StreamingClient) -> RunFigures:
        await engine.obeys(self._tenant.publish(self._settings.padded_slots))
        return await self._serve_padded(client, "continuous")

    async def _batching(self, continuous: RunFigures) -> BatchingFigures:
        return BatchingFigures(
            continuous=continuous,
            static=await self._serve_static(),
            padded=self._padded,
            padding_bound=padding_bound(self._padded.requests, self._settings.padded_slots),
        )

    async def _serve_static(self) -> RunFigures:
        self._tell("starting an engine that batches statically")
        self._tenant.publish(self._settings.padded_slots)
        environment = {**self._settings.engine_environment, "TIDEGATE_BATCHING": "static"}
        async with (
            running_engine(self._tenant, "static", environment) as engine,
            self._client(engine.target) as client,
        ):
            await client.run(
                self._writer.write(self._padded.requests[: self._settings.padded_slots])
            )
            return await self._serve_padded(client, "static")

    async def _serve_padded(self, client: StreamingClient, way: str) -> RunFigures:
        count = len(self._padded.requests)
        self._tell(f"{count} requests of the recorded trace, {way} batching")
        return await client.run(self._writer.write(self._padded.requests))

    async def _measure_peer(self, url: str) -> PeerFigures:
        target, parts = Target.of(url), self._settings.parts
        async with self._client(target) as client:
            self._tell(f"{target.base_url}: {client.model}")
            await client.run(self._warm_up())
            burst = await client.run(self._burst()) if Part.BURST in parts else None
            poisson = (
                await client.run(self._writer.write(self._lengths))
                if Part.POISSON in parts
                else None
            )
        return PeerFigures(
            url=target.base_url,
            model=client.model,
            takes_token_ids=client.takes_token_ids,
            burst=burst,
            poisson=poisson,
        )

    async def _replay_bare(self) -> BareSteps:
        """Replay W without an engine, in a process of its own."""
        self._tell("W once more, without HTTP")
        settings = self._settings
        work = BareWork(
            warm_up=_as_pairs(self._warm_up()),
            timed=_as_pairs(self._burst()),
            max_num_seqs=settings.max_num_seqs,
            temperature=settings.temperature,
            profiles=settings.profiles,
        )
        return await replay_bare(work, self._environment())

    def _client(self, target: Target) -> StreamingClient:
        return StreamingClient(target, temperature=self._settings.temperature)

    def _burst(self) -> tuple[SizedRequest, ...]:
        return self._writer.write(at_once(self._lengths))

    def _warm_up(self) -> tuple[SizedRequest, ...]:
        # All prompts of W: kernels are chosen, and memory is taken, when a shape first comes.
        requests: Sequence[TraceRequest] = at_once(self._lengths)
        return self._writer.write(
            capped(requests, prompt_tokens=sys.maxsize, output_tokens=_WARM_UP_OUTPUT_TOKENS)
        )

    def _environment(self) -> dict[str, str]:
        own = {**self._tenant.environment("bare"), **self._settings.engine_environment}
        return {**os.environ, **own}

    def _vocabulary(self) -> Vocabulary:
        if self._settings.executor == "simulated":
            return BytesTokenizer()
        from tidegate_engine.model.loader import load_model

        settings = _engine_settings(self._tenant.environment("bench"))
        return load_model(settings.model_source, settings.cache_dir).tokenizer


async def replay_bare(work: BareWork, environment: Mapping[str, str]) -> BareSteps:
    """Have work replayed in a process with this environment.

    Raises:
        BenchError: It failed; the message is the last that it said.
    """
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tidegate_cli.bench.engine_bare",
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, said = await child.communicate(json.dumps(asdict(work)).encode())
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise BenchError(f"the steps could not be replayed: {last}")
    return BareSteps(**json.loads(output))


async def run_engine_bench(
    console: Console,
    *,
    settings: EngineSettings,
    progress: Callable[[str], None],
    json_file: Path | None,
) -> None:
    """Start what is needed, measure, print, write the JSON file, stop everything.

    Raises:
        CommandError: Something didn't start, or a request was not served as it should be.
        DevClusterError: Redis or an engine didn't start, or ended.
    """
    began = time.monotonic()

    def tell(line: str) -> None:
        progress(f"[{time.monotonic() - began:6.1f} s] {line}")

    with OneTenant.in_force() as tenant:
        figures = await EngineBench(settings, tenant, tell).run()
    print_figures(console, figures)
    if json_file is not None:
        result = BenchResult(
            bench="engine",
            settings=_described(settings),
            results=figures.results(),
            series=figures.series(),
        )
        result.write(json_file)


def _described(settings: EngineSettings) -> dict[str, object]:
    """Return the settings, and what else of the environment reaches the engines."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_INHERITED) and "KEY" not in name
    }
    return {
        **asdict(settings),
        "threads": settings.num_threads,
        "parts": [str(part) for part in settings.parts],
        # Without the keys that the URLs may hold.
        "peers": [Target.of(url).base_url for url in settings.peers],
        "environment": inherited,
    }


def _as_pairs(requests: Sequence[SizedRequest]) -> list[tuple[Sequence[int], int]]:
    return [(request.token_ids, request.output_tokens) for request in requests]


def _engine_settings(environment: Mapping[str, str]) -> Settings:
    """Return an engine's settings: this process's environment, and `environment` on top."""
    given = {name.removeprefix("TIDEGATE_").lower(): value for name, value in environment.items()}
    return Settings(**given)  # type: ignore[arg-type]  # pydantic parses the texts
