"""One pool of two engine processes and a real Redis, and hundreds of clients that ask both."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tidegate_policies.rules import KvEstimate
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_policies.wire import EngineReport, TenantCounters
from tidegate_testing.cluster import eventually
from tidegate_testing.control import Publisher, until
from tidegate_testing.engine_process import EngineProcess, an_engine_process
from tidegate_testing.engines import MODEL, a_keyed_tenant, key_of
from tidegate_testing.policies import a_snapshot

PODS = ("engine-0", "engine-1")


@dataclass
class Pool:
    """Two engines, and the control plane of their pool."""

    publisher: Publisher
    engines: tuple[EngineProcess, ...]
    revision: int = 0

    def apply(self, policy: PolicySnapshot) -> None:
        """Put a policy in force in both."""
        self.revision += 1
        self.publisher.publish(policy, self.revision)
        eventually(
            lambda: [report.revision for report in self.reports()] == [self.revision] * len(PODS),
            f"revision {self.revision} in both engines",
        )

    def reports(self) -> list[EngineReport]:
        found = [self.publisher.report(pod) for pod in PODS]
        return [report for report in found if report is not None]

    def counters(self, tenant: str = "acme") -> list[TenantCounters]:
        """Return what each engine reports of a tenant; those that report nothing are left out."""
        return [c for report in self.reports() for c in report.tenants if c.tenant == tenant]

    def total(self, field: str, tenant: str = "acme") -> float:
        return sum(float(getattr(counters, field)) for counters in self.counters(tenant))

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum over both engines."""
        total = 0.0
        for engine in self.engines:
            answer = engine.get("/metrics")
            assert answer is not None
            for family in text_string_to_metric_families(answer.text):
                for sample in family.samples:
                    if sample.name == name and labels.items() <= sample.labels.items():
                        total += sample.value
        return total

    def url(self, number: int) -> str:
        """Return the URL of completions at one engine after the other."""
        return f"http://127.0.0.1:{self.engines[number % 2].port}/v1/completions"


@contextmanager
def two_engines(redis_url: str, folder: Path, **settings: str) -> Iterator[Pool]:
    """Start the engines of a pool of their own; nobody is served yet.

    Their steps take 5 ms, whatever is in them, unless `settings` say otherwise.
    """
    publisher = Publisher(redis_url)
    with ExitStack() as stack:
        engines = []
        for pod in PODS:
            (folder / pod).mkdir()
            own = {
                "TIDEGATE_POD_NAME": pod,
                "TIDEGATE_KV_BLOCKS": "4096",
                "TIDEGATE_MAX_NUM_SEQS": "128",
                "TIDEGATE_SIMULATED_STEP_SECONDS": "0.005",
                "TIDEGATE_SIMULATED_DECODE_SECONDS": "0",
                "TIDEGATE_SIMULATED_PREFILL_TOKEN_SECONDS": "0",
                **settings,
            }
            engines.append(stack.enter_context(an_engine_process(publisher, folder / pod, **own)))
        pool = Pool(publisher, tuple(engines), revision=1)
        publisher.publish(a_snapshot(a_keyed_tenant("nobody")), pool.revision)
        for engine in engines:
            engine.wait_until_ready()
        yield pool


@pytest.fixture
def pool(processes: Pool) -> Pool:
    """Both engines, without anything that an earlier test left."""
    processes.apply(a_snapshot(a_keyed_tenant("nobody")))
    return processes


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=1000)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        yield client


def policy(**fields: object) -> PolicySnapshot:
    acme = a_keyed_tenant("acme", **fields)
    return a_snapshot(acme, a_keyed_tenant("zeta"), kv_estimate=KvEstimate.OPTIMISTIC)


def a_body(number: int, *, prompt: int = 5, output: int = 5) -> dict[str, object]:
    """Return a request whose prompt nobody else has."""
    ids = [number % 50, number // 50 % 50, *[7] * (prompt - 2)]
    return {"model": MODEL, "prompt": ids, "max_tokens": output, "ignore_eos": True}


def ask(
    client: httpx.AsyncClient,
    pool: Pool,
    number: int,
    *,
    tenant: str = "acme",
    headers: Mapping[str, str] | None = None,
    **sizes: int,
) -> Awaitable[httpx.Response]:
    """Ask with the tenant's key, unless `headers` have another one."""
    given = {"authorization": f"Bearer {key_of(tenant)}", **(headers or {})}
    sent = {name.encode(): value.encode() for name, value in given.items()}
    return client.post(pool.url(number), json=a_body(number, **sizes), headers=sent)


async def stream(
    client: httpx.AsyncClient,
    pool: Pool,
    number: int,
    *,
    began: Callable[[], None],
    output: int,
    prompt: int = 5,
    tenant: str = "acme",
) -> str:
    """Return how a stream ended: by its finish reason, or the code of the error in it."""
    headers = {"authorization": f"Bearer {key_of(tenant)}"}
    body = {**a_body(number, prompt=prompt, output=output), "stream": True}
    end = ""
    async with client.stream("POST", pool.url(number), json=body, headers=headers) as answer:
        if answer.status_code != 200:
            await answer.aread()
            return str(answer.json()["error"]["code"])
        began()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return str(event["error"]["code"])
            end = event["choices"][0]["finish_reason"] or end if event["choices"] else end
    return end


class Streams:
    """Open streams over both engines."""

    def __init__(
        self, client: httpx.AsyncClient, pool: Pool, *, count: int, output: int, prompt: int = 5
    ) -> None:
        self.num_begun = 0
        self.tasks = [
            asyncio.create_task(
                stream(client, pool, n, began=self._begin, output=output, prompt=prompt)
            )
            for n in range(count)
        ]

    async def all_begun(self) -> None:
        await until(lambda: self.num_begun == len(self.tasks), "all streams open")

    async def ends(self) -> Counter[str]:
        async with asyncio.timeout(60):
            return Counter(await asyncio.gather(*self.tasks))

    def _begin(self) -> None:
        self.num_begun += 1


def codes(answers: list[httpx.Response]) -> Counter[str]:
    return Counter(answer.headers.get("x-tidegate-reason", "ok") for answer in answers)
