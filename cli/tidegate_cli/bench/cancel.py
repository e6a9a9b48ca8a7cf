"""`tidegate bench cancel`: from a client that leaves to its KV free, on a real model.

The engine is a real one behind real sockets, with other streams running all the while. Who holds KV
is asked at every step's beginning, so that steps are counted, not guessed from times.
"""

import asyncio
import json
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tidegate_cli import report
from tidegate_cli.bench.cancel_target import HOST, StepSeen, Target, serving
from tidegate_cli.bench.errors import BenchError
from tidegate_cli.bench.figures import quantiles
from tidegate_cli.bench.result import BenchResult
from tidegate_cli.percentiles import percentile
from tidegate_cli.prompts import prompt_of
from tidegate_engine.events import CancelCause

_OTHERS = "others"
_POLL_SECONDS = 0.002
_FREE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class CancelSettings:
    """What is measured.

    Attributes:
        cancels: How many, of all ways together.
        callers: Who cancels, one request after the other, each a tenant of its own.
        others: Streams that go on beside them.
        long_prompt_tokens: Of the requests that are left while their prompt is read.
        max_output_tokens: Of all; nobody reads that far.
        kv_blocks: Of the pool.
        threads: CPU threads of a step.
        seed: Chooses ways, moments and prompts.
    """

    cancels: int = 300
    callers: int = 6
    others: int = 4
    long_prompt_tokens: int = 1500
    max_output_tokens: int = 1000
    kv_blocks: int = 2048
    threads: int = 1
    seed: int = 1

    def quick(self) -> "CancelSettings":
        """Return the same with fewer cancels, by fewer callers, of shorter prompts."""
        return replace(
            self,
            cancels=min(self.cancels, 40),
            callers=min(self.callers, 4),
            others=min(self.others, 2),
            long_prompt_tokens=min(self.long_prompt_tokens, 600),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """What came of one cancel of a request that held KV.

    Attributes:
        way: How it was cancelled.
        steps: In flight when the client left, or begun later, until its KV was free.
        seconds: From the client's last act until the next step began without its KV.
    """

    way: str
    steps: int
    seconds: float


def freed(steps: list[StepSeen], tenant: str, *, way: str, left_at: float) -> Freed | None:
    """Look up what came of a cancel; None when no step has begun yet without the tenant's KV."""
    count = sum(step.began_at <= left_at < step.ended_at for step in steps)
    for step in steps:
        if step.began_at <= left_at:
            continue
        if tenant not in step.holders:
            return Freed(way=way, steps=count, seconds=step.began_at - left_at)
        count += 1
    return None


@dataclass(eq=False)
class Caller:
    """One tenant that begins requests and leaves them, in every way there is."""

    target: Target
    tenant: str
    settings: CancelSettings
    rng: random.Random
    freed: list[Freed] = field(default_factory=list)
    expected: dict[CancelCause, int] = field(default_factory=dict)

    async def one(self) -> None:
        """Begin a request, leave it, and wait until its KV is free."""
        ways: Mapping[str, Callable[[], Awaitable[float]]] = {
            "stream, closed": self._leave_stream,
            "stream, reset": lambda: self._leave_stream(resets=True),
            "two choices, closed": lambda: self._leave_stream(n=2),
            "whole answer, closed": self._leave_whole,
            "prompt being read, closed": self._leave_prompt,
            "stream, DELETE": self._delete,
        }
        way = self.rng.choice(list(ways))
        left_at = await ways[way]()
        cause = CancelCause.DELETE if way == "stream, DELETE" else CancelCause.DISCONNECT
        choices = 2 if way.startswith("two") else 1
        self.expected[cause] = self.expected.get(cause, 0) + choices
        self.freed.append(await self._until_free(way, left_at))

    async def _until_free(self, way: str, left_at: float) -> Freed:
        deadline = left_at + _FREE_SECONDS
        while True:
            steps = self.target.executor.steps
            # The last ones are enough: the wait began at the cancel.
            found = freed(steps[-1000:], self.tenant, way=way, left_at=left_at)
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise BenchError(f"{way}: KV still in use after {_FREE_SECONDS:g} s")
            await asyncio.sleep(_POLL_SECONDS)

    async def _leave_stream(self, *, resets: bool = False, n: int = 1) -> float:
        async with self._begun(stream=True, n=n) as (reader, writer):
            await _read_events(reader, self.rng.randint(1, 8))
            return _hang_up(writer, resets=resets)

    async def _leave_whole(self) -> float:
        async with self._begun() as (_, writer):
            await self.until_held()
            await asyncio.sleep(self.rng.uniform(0, 0.3))
            return _hang_up(writer)

    async def _leave_prompt(self) -> float:
        length = self.settings.long_prompt_tokens
        async with self._begun(prompt_tokens=length) as (_, writer):
            await self.until_held()
            return _hang_up(writer)

    async def _delete(self) -> float:
        async with self._begun(stream=True) as (reader, _):
            request_id = await _read_events(reader, self.rng.randint(1, 8))
            asked, answer = await self._send(f"DELETE /v1/requests/{request_id}", b"")
            left_at = time.monotonic()
            status = (await asked.readline()).split()[1]
            answer.close()
            if status != b"200":
                raise BenchError(f"a DELETE was answered with {status.decode()}")
            return left_at

    async def until_held(self) -> None:
        """Wait for a step in which the tenant holds KV."""
        steps = self.target.executor.steps
        while not steps or self.tenant not in steps[-1].holders:
            await asyncio.sleep(_POLL_SECONDS)

    @asynccontextmanager
    async def _begun(
        self, *, prompt_tokens: int = 40, **fields: object
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        body = {
            "model": self.target.model,
            "prompt": prompt_of(prompt_tokens, self.rng),
            "max_tokens": self.settings.max_output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            **fields,
        }
        reader, writer = await self._send("POST /v1/completions", json.dumps(body).encode())
        try:
            yield reader, writer
        finally:
            writer.close()

    async def _send(
        self, line: str, body: bytes
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(HOST, self.target.port)
        head = (
            f"{line} HTTP/1.1\r\nhost: {HOST}\r\n"
            f"authorization: Bearer {self.target.keys[self.tenant]}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        return reader, writer

    async def stream_on(self) -> None:
        """Begin a stream and read it to its end, over and over."""
        while True:
            async with self._begun(stream=True) as (reader, _):
                await reader.readuntil(b"data: [DONE]")


class CancelBench:
    """One run against a running engine."""

    def __init__(self, settings: CancelSettings, progress: Callable[[str], None]) -> None:
        """Prepare; `progress` is told what is done."""
        self._settings = settings
        self._tell = progress

    def run(self) -> BenchResult:
        """Load the model, serve it, cancel.

        Raises:
            BenchError: KV was not freed, or the engine counted other cancels than were made.
        """
        settings = self._settings
        names = [f"caller-{number}" for number in range(settings.callers)]
        self._tell("loading the model")
        with serving(
            [*names, _OTHERS],
            max_num_seqs=settings.callers * 2 + settings.others,
            kv_blocks=settings.kv_blocks,
            threads=settings.threads,
        ) as target:
            callers = [
                Caller(target, name, settings, random.Random(f"{settings.seed}.{name}"))
                for name in names
            ]
            asyncio.run(self._cancel_all(target, callers))
            stats = target.stats()
            self._check_counts(callers, stats.cancelled)
            steps = [step.began_at for step in target.executor.steps]
            return self._result(callers, steps, stats.tokens_after_cancel)

    async def _cancel_all(self, target: Target, callers: list[Caller]) -> None:
        settings = self._settings
        others = Caller(target, _OTHERS, settings, random.Random(settings.seed))
        beside = [asyncio.create_task(others.stream_on()) for _ in range(settings.others)]
        left = iter(range(settings.cancels))

        async def cancel(caller: Caller) -> None:
            for number in left:
                await caller.one()
                if number % 50 == 0:
                    self._tell(f"{number} of {settings.cancels} cancels")

        try:
            await others.until_held()
            async with asyncio.TaskGroup() as group:
                for caller in callers:
                    group.create_task(cancel(caller))
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    @staticmethod
    def _check_counts(callers: list[Caller], counted: Mapping[Any, int]) -> None:
        for cause in (CancelCause.DISCONNECT, CancelCause.DELETE):
            made = sum(caller.expected.get(cause, 0) for caller in callers)
            booked = sum(
                count
                for key, count in counted.items()
                if key.cause is cause and key.tenant != _OTHERS
            )
            if made != booked:
                raise BenchError(f"{made} requests were ended by {cause}; {booked} were counted")

    def _result(
        self, callers: list[Caller], steps: list[float], tokens_after_cancel: int
    ) -> BenchResult:
        all_freed = [one for caller in callers for one in caller.freed]
        milliseconds = [1000 * one.seconds for one in all_freed]
        step_ms = [1000 * (later - earlier) for earlier, later in pairwise(steps)]
        series: dict[str, list[float]] = {
            "steps_to_free": [one.steps for one in all_freed],
            "ms_to_free": milliseconds,
            "step_ms_p50_p90_p99": quantiles(step_ms),
        }
        for way in sorted({one.way for one in all_freed}):
            of_way = [1000 * one.seconds for one in all_freed if one.way == way]
            series[f"{way}/ms_to_free_p50_p90_p99"] = quantiles(of_way)
            series[f"{way}/cancels"] = [len(of_way)]
        return BenchResult(
            bench="cancel",
            settings=asdict(self._settings),
            results={
                "p99_steps_to_free": percentile((one.steps for one in all_freed), 99) or 0.0,
                "tokens_after_cancel": tokens_after_cancel,
                "cancels": len(all_freed),
                "p50_ms_to_free": percentile(milliseconds, 50) or 0.0,
                "p99_ms_to_free": percentile(milliseconds, 99) or 0.0,
                "step_ms": percentile(step_ms, 50) or 0.0,
            },
            series=series,
        )


def run_cancel(
    console: Console,
    *,
    settings: CancelSettings,
    progress: Callable[[str], None],
    json_file: Path | None,
) -> None:
    """Measure, print a table, write the JSON file.

    Raises:
        BenchError: KV was not freed, or the engine counted other cancels than were made.
        NotReadyError: The engine didn't get its policy.
    """
    result = CancelBench(settings, progress).run()
    console.print(_ways_table(result))
    console.print(report.figures_table("bench cancel", result.results))
    console.print(
        f"{settings.others} streams beside {settings.callers} callers, {settings.threads} threads;"
        f" seed {settings.seed}. A step in flight when the client leaves counts, too."
    )
    if json_file is not None:
        result.write(json_file)


def _ways_table(result: BenchResult) -> Table:
    table = Table(title="From a client's last act to its KV free", box=box.SIMPLE_HEAD)
    table.add_column("way")
    for heading in ("cancels", "ms, p50 p90 p99"):
        table.add_column(heading, justify="right", no_wrap=True)
    ending = "/cancels"
    for name in (name for name in result.series if name.endswith(ending)):
        way = name.removesuffix(ending)
        times = result.series[f"{way}/ms_to_free_p50_p90_p99"]
        table.add_row(
            way, f"{result.series[name][0]:.0f}", " ".join(f"{value:.3g}" for value in times)
        )
    return table


async def _read_events(reader: asyncio.StreamReader, count: int) -> str:
    """Read some events of a stream; returns the id in them."""
    event = b""
    for _ in range(count):
        await reader.readuntil(b"data: ")
        event = await reader.readuntil(b"\n\n")
    return str(json.loads(event)["id"])


def _hang_up(writer: asyncio.StreamWriter, *, resets: bool = False) -> float:
    """Close a connection; returns when."""
    if resets:
        lingering = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, lingering)
    writer.transport.abort()
    return time.monotonic()
