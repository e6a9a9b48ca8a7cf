"""Clients of `tidegate bench isolation` over HTTP: patient ones, those that leave, and worse."""

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from http import HTTPStatus

import aiohttp

from tidegate_cli.bench.errors import BenchError
from tidegate_cli.bench.isolation_figures import End, Experience
from tidegate_cli.bench.isolation_load import Planned
from tidegate_cli.prompts import prompt_of

_REFUSALS = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}


class Clients:
    """Sends requests at their times, open loop, a connection for each."""

    def __init__(self, *, base_url: str, model: str, keys: Mapping[str, str], seed: int) -> None:
        """Prepare.

        Args:
            base_url: Ends in `/v1`.
            model: Its name there.
            keys: API keys, by the requests' tenants.
            seed: Chooses the words of the prompts.
        """
        self._url = f"{base_url}/completions"
        self._model = model
        self._keys = keys
        self._rng = random.Random(seed)

    async def run(self, requests: Sequence[Planned], *, until: float) -> list[Experience]:
        """Send everything; at the end, hang up on whatever still runs.

        Args:
            requests: In order of time.
            until: In seconds from now.

        Raises:
            BenchError: An answer that no overload explains.
        """
        start = asyncio.get_running_loop().time()
        bodies = {one.request_id: self._body(one) for one in requests}
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            calls = [_Call(one, self._url, self._keys[one.tenant], start) for one in requests]
            tasks = [
                asyncio.create_task(call.send(session, bodies[call.request.request_id]))
                for call in calls
            ]
            try:
                done, _ = await asyncio.wait(
                    tasks,
                    timeout=start + until - asyncio.get_running_loop().time(),
                    return_when=asyncio.FIRST_EXCEPTION,
                )
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            if not task.cancelled():
                task.result()
        return [call.experience() for call in calls]

    def _body(self, request: Planned) -> bytes:
        # The name in front: no two prompts begin alike.
        words = prompt_of(request.prompt_tokens, self._rng)
        body = {
            "model": self._model,
            "prompt": f"{request.request_id[::-1]} {words}",
            "max_tokens": request.output_tokens,
            "n": request.choices,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        return json.dumps(body).encode()


class _Call:
    """One request and its client."""

    def __init__(self, request: Planned, url: str, key: str, start: float) -> None:
        self.request = request
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._start = start
        self._times: list[float] = []
        self._end = End.OPEN
        self._ended_at: float | None = None

    def experience(self) -> Experience:
        """Return what became of it."""
        return Experience(
            request=self.request,
            token_times=self._times,
            end=self._end,
            ended_at=self._ended_at,
        )

    async def send(self, session: aiohttp.ClientSession, body: bytes) -> None:
        """Send it at its time, and read what comes for as long as its client would."""
        await asyncio.sleep(self._start + self.request.at_seconds - self._loop_time())
        try:
            async with asyncio.timeout_at(self._leaves_at(has_token=False)) as limit:
                async with session.post(self._url, data=body, headers=self._headers) as response:
                    await self._follow(response, limit)
        except TimeoutError:
            self._finish(End.LEFT)
        except aiohttp.ClientError:
            self._finish(End.CUT)

    async def _follow(self, response: aiohttp.ClientResponse, limit: asyncio.Timeout) -> None:
        if response.status in _REFUSALS:
            self._finish(End.REFUSED)
            return
        if response.status == HTTPStatus.GATEWAY_TIMEOUT:
            self._finish(End.CUT)
            return
        if response.status != HTTPStatus.OK:
            text = (await response.text())[:300]
            raise BenchError(f"{self._url}: HTTP {response.status}: {text}")
        if not self.request.is_read:
            await asyncio.Event().wait()  # until the run ends
        end = End.DONE
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                end = End.CUT
            elif any(choice.get("text") for choice in event.get("choices", ())):
                if not self._times:
                    limit.reschedule(self._leaves_at(has_token=True))
                self._times.append(self._loop_time() - self._start)
        self._finish(end)

    def _leaves_at(self, *, has_token: bool) -> float | None:
        """Return when the client hangs up, on the loop's clock; None = never."""
        request = self.request
        waits = [request.leaves_after_seconds, None if has_token else request.patience_seconds]
        known = [seconds for seconds in waits if seconds is not None]
        return self._start + request.at_seconds + min(known) if known else None

    def _finish(self, end: End) -> None:
        self._end = end
        self._ended_at = self._loop_time() - self._start

    @staticmethod
    def _loop_time() -> float:
        return asyncio.get_running_loop().time()
