"""A streaming client of `/v1/completions`, of our engine or of any OpenAI-compatible server."""

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from tidegate_cli.bench.engine_workload import SizedRequest
from tidegate_cli.bench.errors import BenchError
from tidegate_cli.percentiles import percentile

_ANSWER_SECONDS = 600.0
"""For a whole answer, time in the queue included; a server that hangs must not hang the bench."""


@dataclass(slots=True, kw_only=True)
class Call:
    """One request as its caller sees it; times are the event loop's, in seconds.

    Attributes:
        token_times: When each piece of text came; about one per token.
        prompt_tokens: As the server counted them; None where it doesn't say.
        output_tokens: The same.
    """

    sent_at: float
    token_times: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """What the callers of one run saw.

    Attributes:
        seconds: From the first request to the last token.
        ttft_seconds: Of every request, in order of sending.
        itl_seconds: All times between two pieces of text of a request.
        prompt_tokens: As the server counted them, or as they were asked for.
    """

    seconds: float
    prompt_tokens: int
    output_tokens: int
    ttft_seconds: tuple[float, ...]
    itl_seconds: tuple[float, ...]

    @property
    def output_tokens_per_s(self) -> float:
        """Over the whole run."""
        return self.output_tokens / self.seconds

    @property
    def ttft_p99(self) -> float:
        """In seconds."""
        return percentile(self.ttft_seconds, 99) or 0.0

    @property
    def itl_p99_ms(self) -> float:
        """In milliseconds."""
        return 1000 * (percentile(self.itl_seconds, 99) or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server to measure.

    Attributes:
        base_url: Ends in `/v1`.
        key: API key; empty = none is sent.
    """

    base_url: str
    key: str = ""

    @classmethod
    def of(cls, url: str) -> "Target":
        """Read a URL, with or without `/v1`; an API key may stand in it as the password.

        Raises:
            BenchError: It is no HTTP URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise BenchError(f"--peer {url}: not a URL like http://HOST:PORT")
        host = parts.netloc.rpartition("@")[2]
        path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        return cls(
            base_url=urlunsplit((parts.scheme, host, path, "", "")), key=parts.password or ""
        )


class StreamingClient:
    """Sends requests at their times, each over a connection of its own, and reads the streams.

    Attributes:
        model: The first one that the server names.
        takes_token_ids: Whether prompts are sent as token ids; else as text.
    """

    model: str
    takes_token_ids: bool

    def __init__(self, target: Target, *, temperature: float) -> None:
        self._target = target
        self._temperature = temperature

    async def __aenter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self._target.key}"} if self._target.key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=_ANSWER_SECONDS, sock_connect=30),
        )
        try:
            self.model = await self._first_model()
            self.takes_token_ids = await self._accepts([1])
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def run(self, requests: Sequence[SizedRequest]) -> RunFigures:
        """Send everything, open loop, and wait for every answer.

        Raises:
            BenchError: A request failed, or got another number of tokens than it asked for.
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            async with asyncio.TaskGroup() as tasks:
                calls = [tasks.create_task(self._call(one, start)) for one in requests]
        except* BenchError as group:
            # One line says what went wrong; the others say it again.
            raise group.exceptions[0] from None
        return _figures([call.result() for call in calls], requests)

    async def _call(self, request: SizedRequest, start: float) -> Call:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(start + request.at_seconds - loop.time())
        prompt = list(request.token_ids) if self.takes_token_ids else request.text
        body = self._body(prompt, request.output_tokens) | {
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        call = Call(sent_at=loop.time())
        try:
            async with self._session.post(self._completions, json=body) as response:
                if response.status != 200:
                    text = (await response.text())[:300]
                    raise BenchError(f"{self._completions}: HTTP {response.status}: {text}")
                async for line in response.content:
                    self._take(call, line, loop.time())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BenchError(f"{self._completions}: {type(error).__name__}: {error}") from error
        self._check(call, request)
        return call

    def _take(self, call: Call, line: bytes, now: float) -> None:
        """Take in one line of the event stream."""
        if not line.startswith(b"data: {"):
            return
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise BenchError(f"{self._completions}: {event['error']}")
        if any(choice.get("text") for choice in event.get("choices", ())):
            call.token_times.append(now)
        if usage := event.get("usage"):
            call.prompt_tokens = usage["prompt_tokens"]
            call.output_tokens = usage["completion_tokens"]

    def _check(self, call: Call, request: SizedRequest) -> None:
        got = len(call.token_times) if call.output_tokens is None else call.output_tokens
        if got != request.output_tokens or not call.token_times:
            raise BenchError(
                f"{self._completions}: {got} tokens instead of {request.output_tokens}"
            )

    @property
    def _completions(self) -> str:
        return f"{self._target.base_url}/completions"

    def _body(self, prompt: str | list[int], output_tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": self._temperature,
            "ignore_eos": True,
        }

    async def _accepts(self, prompt: list[int]) -> bool:
        async with self._session.post(self._completions, json=self._body(prompt, 1)) as response:
            return response.status == 200

    async def _first_model(self) -> str:
        url = f"{self._target.base_url}/models"
        try:
            async with self._session.get(url) as response:
                if response.status != 200:
                    raise BenchError(f"{url}: HTTP {response.status}")
                return str((await response.json(content_type=None))["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BenchError(f"{url}: {type(error).__name__}: {error}") from error


def _figures(calls: Sequence[Call], requests: Iterable[SizedRequest]) -> RunFigures:
    return RunFigures(
        seconds=max(call.token_times[-1] for call in calls) - min(call.sent_at for call in calls),
        prompt_tokens=sum(
            len(request.token_ids) if call.prompt_tokens is None else call.prompt_tokens
            for call, request in zip(calls, requests, strict=True)
        ),
        output_tokens=sum(
            len(call.token_times) if call.output_tokens is None else call.output_tokens
            for call in calls
        ),
        ttft_seconds=tuple(call.token_times[0] - call.sent_at for call in calls),
        itl_seconds=tuple(
            later - earlier for call in calls for earlier, later in pairwise(call.token_times)
        ),
    )
