"""One pool of two engine processes, and requests to both."""

from collections.abc import Awaitable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tidegate_policies.snapshot import PolicySnapshot
from tidegate_policies.wire import EngineReport, TenantCounters
from tidegate_testing.cluster import eventually
from tidegate_testing.control import Publisher
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
            lambda: all(report.revision == self.revision for report in self.reports()),
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
def a_pool(
    redis_url: str, folder: Path, *, step_seconds: float, **variables: str
) -> Iterator[Pool]:
    """Start both engines, whose steps all take as long, under a policy that names nobody of tests.

    Args:
        redis_url: Of the control plane.
        folder: For what they keep.
        step_seconds: Of every step, whatever is computed in it.
        variables: Of both engines' environment.
    """
    publisher = Publisher(redis_url)
    with ExitStack() as stack:
        engines: list[EngineProcess] = []
        for pod in PODS:
            (folder / pod).mkdir()
            starting = an_engine_process(
                publisher,
                folder / pod,
                TIDEGATE_POD_NAME=pod,
                TIDEGATE_KV_BLOCKS="4096",
                TIDEGATE_SIMULATED_STEP_SECONDS=str(step_seconds),
                TIDEGATE_SIMULATED_DECODE_SECONDS="0",
                TIDEGATE_SIMULATED_PREFILL_TOKEN_SECONDS="0",
                **variables,
            )
            engines.append(stack.enter_context(starting))
        pool = Pool(publisher, tuple(engines))
        publisher.publish(a_snapshot(a_keyed_tenant("nobody")), 1)
        pool.revision = 1
        for engine in engines:
            engine.wait_until_ready()
        yield pool


def a_body(number: int, *, prompt: int = 5, output: int = 5) -> dict[str, object]:
    """Return a request whose prompt nobody else has."""
    ids = [number % 50, number // 50 % 50, *[7] * (prompt - 2)]
    return {"model": MODEL, "prompt": ids, "max_tokens": output, "ignore_eos": True}


def ask(
    client: httpx.AsyncClient, pool: Pool, number: int, *, tenant: str = "acme", **sizes: int
) -> Awaitable[httpx.Response]:
    headers = {"authorization": f"Bearer {key_of(tenant)}"}
    return client.post(pool.url(number), json=a_body(number, **sizes), headers=headers)
