"""httpGet and tcpSocket probes: one request after the other, and the verdict when it changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import aiohttp

from tidegate_devcluster.api import Json
from tidegate_devcluster.network import PodPlace

LOWEST_FAILURE = 400


@dataclass(frozen=True)
class Probe:
    """A probe of a container at its place.

    Attributes:
        url: What is asked for; `tcp://host:port` = a connection is enough.
        failure_threshold: Failures in a row that make it fail.
        success_threshold: Successes in a row that make it pass.
    """

    url: str
    headers: Mapping[str, str]
    initial_delay_seconds: float
    period_seconds: float
    timeout_seconds: float
    failure_threshold: int
    success_threshold: int

    async def verdicts(self, session: aiohttp.ClientSession) -> AsyncIterator[bool]:
        """Yields whether the container passes: first when it is known, then at each change.

        Never ends.
        """
        await asyncio.sleep(self.initial_delay_seconds)
        verdict: bool | None = None
        last, run = False, 0
        while True:
            passed = await self._ask(session)
            run = run + 1 if passed == last else 1
            last = passed
            threshold = self.success_threshold if passed else self.failure_threshold
            if passed != verdict and run >= threshold:
                verdict = passed
                yield passed
            await asyncio.sleep(self.period_seconds)

    async def _ask(self, session: aiohttp.ClientSession) -> bool:
        if self.url.startswith("tcp://"):
            return await self._connects()
        timeout = aiohttp.ClientTimeout(total=self.timeout_seconds)
        try:
            async with session.get(
                self.url, headers=self.headers, timeout=timeout, allow_redirects=False, ssl=False
            ) as answer:
                return answer.status < LOWEST_FAILURE
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def _connects(self) -> bool:
        host, _, port = self.url.removeprefix("tcp://").rpartition(":")
        try:
            async with asyncio.timeout(self.timeout_seconds):
                _, writer = await asyncio.open_connection(host, int(port))
        except (TimeoutError, OSError):
            return False
        writer.close()
        return True


def probe_of(container: Json, kind: str, place: PodPlace) -> Probe | None:
    """Returns the container's probe of that kind, for example "readinessProbe"; None without."""
    spec = container.get(kind)
    if spec is None:
        return None
    return Probe(
        url=_url(spec, container, place),
        headers={
            header["name"]: header["value"]
            for header in spec.get("httpGet", {}).get("httpHeaders", ())
        },
        initial_delay_seconds=float(spec.get("initialDelaySeconds", 0)),
        period_seconds=float(spec.get("periodSeconds", 10)),
        timeout_seconds=float(spec.get("timeoutSeconds", 1)),
        failure_threshold=int(spec.get("failureThreshold", 3)),
        success_threshold=int(spec.get("successThreshold", 1)),
    )


def _url(spec: Json, container: Json, place: PodPlace) -> str:
    request = spec.get("httpGet") or spec["tcpSocket"]
    host, port = place.endpoint(_port(request["port"], container))
    host = request.get("host", host)
    if "httpGet" not in spec:
        return f"tcp://{host}:{port}"
    scheme = request.get("scheme", "HTTP").lower()
    return f"{scheme}://{host}:{port}/{request.get('path', '').lstrip('/')}"


def _port(port: int | str, container: Json) -> int:
    if isinstance(port, int):
        return port
    for declared in container.get("ports", ()):
        if declared.get("name") == port:
            return int(declared["containerPort"])
    return int(port)
