"""Open-loop traffic through the OpenAI-compatible API, and what its callers saw of it.

Open loop: a request is sent at its time, whatever has become of the earlier ones. That is how real
callers behave, and the only way in which a queue grows.
"""

import asyncio
import json
import random
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import aiohttp

from tidegate_cli.percentiles import percentile
from tidegate_cli.prompts import prompt_of
from tidegate_cli.traces import TraceRequest


@dataclass(slots=True, kw_only=True)
class Call:
    """One request as its caller sees it; times are the event loop's, in seconds.

    Attributes:
        token_times: When each piece of text came; about one per token.
        ended_at: None while it runs, and for ever when the caller hung up.
        error: What the server answered instead of text.
    """

    tenant: str
    sent_at: float
    token_times: list[float] = field(default_factory=list)
    ended_at: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Latency:
    """A percentile of a latency.

    Attributes:
        at_least: True when requests were still waiting, so that the real value is this or larger.
    """

    seconds: float
    at_least: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFigures:
    """What the callers of one tenant saw in a span of time; None where nothing was measured."""

    sent: int
    finished: int
    failed: int
    ttft_p50: Latency | None
    ttft_p99: Latency | None
    itl_p99: Latency | None


class Traffic:
    """Sends requests and keeps a `Call` of each.

    Leaving the context hangs up on whatever still runs.

    Attributes:
        calls: In the order of sending.
    """

    def __init__(
        self, *, base_url: str, model: str, keys: Mapping[str, str], seed: int = 1
    ) -> None:
        """Prepare for the tenants in `keys`, which maps them to their API keys."""
        self.calls: list[Call] = []
        self._url = f"{base_url}/completions"
        self._model = model
        self._keys = keys
        self._rng = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            # As many connections as there are callers, and no limit on how long a queue may be.
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    def start(self, requests: Iterable[TraceRequest]) -> None:
        """Begin to send `requests` at their times, counted from now, in the background."""
        self._spawn(self._send_on_time(requests))

    def send(self, request: TraceRequest) -> None:
        """Send one request now, in the background."""
        call = Call(tenant=request.tenant, sent_at=asyncio.get_running_loop().time())
        self.calls.append(call)
        prompt = prompt_of(request.prompt_tokens, self._rng)
        self._spawn(self._call(call, prompt, request.output_tokens))

    def errors(self) -> list[str]:
        """Return what went wrong with which tenant's calls, in the order of sending."""
        return [f"{call.tenant}: {call.error}" for call in self.calls if call.error is not None]

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_on_time(self, requests: Iterable[TraceRequest]) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        for request in requests:
            await asyncio.sleep(start + request.at_seconds - loop.time())
            self.send(request)

    async def _call(self, call: Call, prompt: str, output_tokens: int) -> None:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        headers = {"Authorization": f"Bearer {self._keys[call.tenant]}"}
        loop = asyncio.get_running_loop()
        try:
            async with self._session.post(self._url, json=body, headers=headers) as response:
                if response.status != 200:
                    call.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                    return
                async for line in response.content:
                    self._take(call, line, loop.time())
        except aiohttp.ClientError as error:
            call.error = f"{type(error).__name__}: {error}"
            return
        if call.error is None:
            call.ended_at = loop.time()

    @staticmethod
    def _take(call: Call, line: bytes, now: float) -> None:
        """Take in one line of the event stream."""
        if not line.startswith(b"data: {"):
            return
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            call.error = str(event["error"].get("message", event["error"]))
        elif any(choice.get("text") for choice in event.get("choices", ())):
            call.token_times.append(now)


def summarize_calls(calls: Sequence[Call], tenant: str, *, start: float, end: float) -> CallFigures:
    """Take the figures of `tenant` for the span from `start` to `end`.

    Time to first token is of the calls sent in the span; who still waits at its end counts with
    its age. Inter-token latency is of the tokens that came in the span, whenever they were asked
    for.
    """
    mine = [call for call in calls if call.tenant == tenant]
    sent = [call for call in mine if start <= call.sent_at < end]
    served = [call for call in sent if call.error is None]
    gaps = [
        later - earlier
        for call in mine
        for earlier, later in zip(call.token_times, call.token_times[1:], strict=False)
        if start <= later < end
    ]
    itl = percentile(gaps, 99)
    return CallFigures(
        sent=len(sent),
        finished=sum(call.ended_at is not None and start <= call.ended_at < end for call in mine),
        failed=len(sent) - len(served),
        ttft_p50=_ttft(served, 50, end),
        ttft_p99=_ttft(served, 99, end),
        itl_p99=None if itl is None else Latency(itl),
    )


def _ttft(calls: Sequence[Call], percent: float, end: float) -> Latency | None:
    known = []
    waited = []
    for call in calls:
        if call.token_times and call.token_times[0] < end:
            known.append(call.token_times[0] - call.sent_at)
        else:
            waited.append(end - call.sent_at)
    value = percentile([*known, *waited], percent)
    if value is None:
        return None
    # Whoever has waited less than this so far may yet turn out to wait longer.
    return Latency(value, at_least=any(age <= value for age in waited))
