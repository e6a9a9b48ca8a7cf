"""`tidegate bench metrics`: scrapes of a busy engine with many tenants, and what streams notice."""

import asyncio
import hashlib
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle
from pathlib import Path

import aiohttp
from rich.console import Console

from tidegate_cli import report
from tidegate_cli.bench.engine_policy import POOL
from tidegate_cli.bench.engine_process import EngineProcess, OneTenant, running_engine
from tidegate_cli.bench.errors import BenchError
from tidegate_cli.bench.figures import quantiles
from tidegate_cli.bench.result import BenchResult
from tidegate_cli.percentiles import percentile
from tidegate_policies.rules import ServiceRule, TenantRule, TierRule
from tidegate_policies.snapshot import PolicySnapshot

_TIER = "standard"
_MODEL = "simulated"
_TOLD = re.compile(rb'^tidegate_e2e_seconds_count\{.*tenant="(bench/[^"]*)"\} [1-9]', re.MULTILINE)
"""A tenant of which a request has ended: all of its series are there."""


@dataclass(frozen=True, kw_only=True)
class MetricsSettings:
    """What is measured.

    Attributes:
        tenants: In the policy; all of them send requests.
        callers: Requests at once, of one tenant after the other.
        scrapes: How many are timed.
        pause_seconds: Between two of them.
        prompt_chars: Of each request.
        output_tokens: Of each request.
    """

    tenants: int = 1000
    callers: int = 64
    scrapes: int = 30
    pause_seconds: float = 1.0
    prompt_chars: int = 40
    output_tokens: int = 16

    def quick(self) -> "MetricsSettings":
        """Return the same with fewer scrapes."""
        return replace(self, scrapes=min(self.scrapes, 5))


def many_tenants(keys: Mapping[str, str]) -> PolicySnapshot:
    """Return a policy of tenants with targets, which gives each the most series that it can have.

    Args:
        keys: API key by tenant.
    """
    return PolicySnapshot.of(
        POOL,
        tiers=[TierRule(name=_TIER, value=0)],
        tenants=[
            TenantRule(
                tenant=tenant,
                policy=tenant,
                tier=_TIER,
                key_digests=(hashlib.sha256(key.encode()).hexdigest(),),
                service=ServiceRule(ttft_seconds=1.0, itl_seconds=0.1),
            )
            for tenant, key in keys.items()
        ],
    )


@dataclass(eq=False)
class _Callers:
    """Streams of one tenant after the other, begun and read until nobody wants them any more.

    Attributes:
        answers: Read to their end so far.
        itl_seconds: Between two events of a stream, since this was emptied.
    """

    session: aiohttp.ClientSession
    keys: Mapping[str, str]
    settings: MetricsSettings
    answers: int = 0
    itl_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._turns = cycle(self.keys.values())

    async def ask_on(self) -> None:
        """Ask again and again."""
        while True:
            await self._ask(next(self._turns))
            self.answers += 1

    async def _ask(self, key: str) -> None:
        body = {
            "model": _MODEL,
            "prompt": "x" * self.settings.prompt_chars,
            "max_tokens": self.settings.output_tokens,
            "stream": True,
        }
        headers = {"Authorization": f"Bearer {key}"}
        now = asyncio.get_running_loop().time
        async with self.session.post("/v1/completions", json=body, headers=headers) as response:
            if response.status != 200:
                raise BenchError(f"HTTP {response.status}: {(await response.text())[:300]}")
            before: float | None = None
            async for line in response.content:
                if line.startswith(b"data: {"):
                    at = now()
                    if before is not None:
                        self.itl_seconds.append(at - before)
                    before = at


@dataclass(eq=False)
class _Scraper:
    """Scrapes an engine as Prometheus does, and notes how long each takes."""

    session: aiohttp.ClientSession
    seconds: list[float] = field(default_factory=list)
    text: bytes = b""

    async def scrape(self) -> None:
        """Read the whole text.

        Raises:
            BenchError: It is the last one again, given out of the engine's cache.
        """
        now = asyncio.get_running_loop().time
        began = now()
        async with self.session.get("/metrics") as response:
            text = await response.read()
        self.seconds.append(now() - began)
        if text == self.text:
            raise BenchError("a scrape got the text of the one before it: pause longer")
        self.text = text


async def run_metrics(
    console: Console,
    *,
    settings: MetricsSettings,
    progress: Callable[[str], None],
    json_file: Path | None,
) -> None:
    """Measure, print a table, write the JSON file.

    Raises:
        BenchError: A request failed, or not every tenant has its series.
    """
    keys = {f"bench/{number}": secrets.token_urlsafe(12) for number in range(settings.tenants)}
    with OneTenant.in_force() as policy:
        policy.deliver(many_tenants(keys))
        simulated = {"TIDEGATE_EXECUTOR": "simulated", "TIDEGATE_MAX_NUM_SEQS": "64"}
        async with running_engine(policy, "engine", simulated) as engine:
            result = await _measure(engine, keys, settings, progress)
    console.print(report.figures_table("bench metrics", result.results))
    if json_file is not None:
        result.write(json_file)


async def _measure(
    engine: EngineProcess,
    keys: Mapping[str, str],
    settings: MetricsSettings,
    progress: Callable[[str], None],
) -> BenchResult:
    callers, scraper = _Callers(engine.session, keys, settings), _Scraper(engine.session)
    undisturbed: list[float] = []

    async def watch() -> None:
        progress(f"a request of each of {settings.tenants} tenants")
        while len(set(_TOLD.findall(scraper.text))) < settings.tenants:
            await asyncio.sleep(settings.pause_seconds)
            await scraper.scrape()
        scraper.seconds.clear()
        callers.itl_seconds.clear()
        progress("streams without scrapes")
        await asyncio.sleep(settings.scrapes * settings.pause_seconds)
        undisturbed.extend(callers.itl_seconds)
        callers.itl_seconds.clear()
        progress("streams beside scrapes")
        for _ in range(settings.scrapes):
            await asyncio.sleep(settings.pause_seconds)
            await scraper.scrape()

    try:
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(callers.ask_on()) for _ in range(settings.callers)]
            await watch()
            for task in asking:
                task.cancel()
    except* BenchError as group:
        # One line says what went wrong; the others say it again.
        raise group.exceptions[0] from None
    series = [line for line in scraper.text.splitlines() if not line.startswith(b"#")]
    return BenchResult(
        bench="metrics",
        settings=asdict(settings),
        results={
            "scrape_p50_ms": 1000 * (percentile(scraper.seconds, 50) or 0.0),
            "scrape_max_ms": 1000 * max(scraper.seconds),
            "text_mb": len(scraper.text) / 1e6,
            "text_series": len(series),
            "itl_p99_ms": 1000 * (percentile(callers.itl_seconds, 99) or 0.0),
            "itl_p99_ms_unscraped": 1000 * (percentile(undisturbed, 99) or 0.0),
        },
        series={
            "scrape_seconds": scraper.seconds,
            "itl_seconds_quantiles": quantiles(callers.itl_seconds),
            "itl_seconds_unscraped_quantiles": quantiles(undisturbed),
        },
    )
