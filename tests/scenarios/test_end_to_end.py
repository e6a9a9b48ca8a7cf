"""From `kubectl apply` to what running engines do, with nothing replaced.

One cluster serves all tests of this module: a Deployment of two engine pods with SmolLM2, the
process kubelet, Redis, the operator, and the official client in front of the service. Tests judge
by the engines' token counters, from the acknowledged policy until so many tokens later, never by
time. Each begins by applying the policies that it is about.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from tidegate_cli.errors import KubectlError
from tidegate_cli.local import LocalSettings, LocalTidegate
from tidegate_devcluster.assets import Assets
from tidegate_testing.helm import Helm, operator_kubeconfig

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

TENANTS = ("gold", "silver", "batch")
WATCHED_SECONDS = 120.0
IN_FLIGHT = 36
"""Requests that each backlogged tenant keeps open: so many more than both engines run at a time
that its queue is never empty while an answer is on its way back."""


class AsInstalled(LocalTidegate):
    """Its operator has the rights of the chart's ServiceAccount and no others."""

    async def operator_kubeconfig(self) -> Path:
        helm = Helm(Assets.from_environment().tool("helm"), self.work_folder / "helm")
        plane, kubectl = self.cluster.control_plane, self.cluster.kubectl
        return await asyncio.to_thread(operator_kubeconfig, plane, kubectl, helm)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def tidegate() -> AsyncIterator[LocalTidegate]:
    settings = LocalSettings(kv_blocks=256, max_num_seqs=6)
    async with AsInstalled(settings, progress=print) as running:
        yield running


def policy(tenant: str, *, tier: str = "standard", weight: int = 100, pool: str = "chat") -> str:
    return f"""
apiVersion: tidegate.io/v1alpha1
kind: TenantPolicy
metadata:
  name: {tenant}
spec:
  poolRefs: [{{name: {pool}}}]
  priorityTier: {tier}
  weight: {weight}
  apiKeySecretRefs: [{{name: {tenant}-api-key, key: key}}]
"""


async def apply(tidegate: LocalTidegate, *policies: str) -> None:
    """Apply policies and wait until every engine has acknowledged them."""
    await tidegate.kubectl("apply", "-f", "-", input="---".join(policies))
    await tidegate.kubectl(
        "wait", "tenantpolicy", "--all", "--for=condition=Programmed", "--timeout=60s"
    )
    # `wait` may have seen the condition of an earlier generation: insist on the current one.
    for tenant in TENANTS:
        await wait_for(tidegate, tenant, "Programmed", "True")


async def wait_for(tidegate: LocalTidegate, name: str, condition: str, status: str) -> str:
    """Wait for a condition of the current generation; return its reason."""
    async with asyncio.timeout(WATCHED_SECONDS):
        while True:
            found = await tidegate.get("tenantpolicy", name)
            generation = found["metadata"]["generation"]
            for one in found.get("status", {}).get("conditions", ()):
                is_current = one["observedGeneration"] == generation
                if one["type"] == condition and one["status"] == status and is_current:
                    return str(one["reason"])


def client(tidegate: LocalTidegate, tenant: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=tidegate.base_url, api_key=tidegate.keys[tenant], max_retries=0, timeout=300
    )


@asynccontextmanager
async def backlog(tidegate: LocalTidegate, *tenants: str) -> AsyncIterator[None]:
    """Keep requests of `tenants` waiting at all times, until the context is left."""

    async def ask_for_ever(tenant: str) -> None:
        async with client(tidegate, tenant) as api:
            while True:
                await api.completions.create(
                    model=tidegate.model,
                    prompt="The tide comes in, and then it",
                    max_tokens=12,
                    extra_body={"ignore_eos": True},
                )

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask_for_ever(t)) for t in tenants for _ in range(IN_FLIGHT)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


@dataclass(frozen=True)
class Counted:
    """Output tokens by tenant, over all engines."""

    tokens: dict[str, float]

    @classmethod
    async def now(cls, tidegate: LocalTidegate) -> "Counted":
        engines = (await tidegate.engine_metrics()).values()
        name = "tidegate_tokens_total"
        return cls(
            {
                tenant: sum(e.value(name, tenant=f"demo/{tenant}", kind="output") for e in engines)
                for tenant in TENANTS
            }
        )

    def since(self, earlier: "Counted") -> dict[str, float]:
        return {t: count - earlier.tokens[t] for t, count in self.tokens.items()}


async def tokens_until(tidegate: LocalTidegate, total: int) -> dict[str, float]:
    """Return the output tokens by tenant from now until the engines gave `total`."""
    begin = await Counted.now(tidegate)
    while True:
        gained = (await Counted.now(tidegate)).since(begin)
        if sum(gained.values()) >= total:
            return gained


async def test_a_changed_weight_changes_the_measured_shares(tidegate: LocalTidegate) -> None:
    await apply(tidegate, *map(policy, TENANTS))
    async with backlog(tidegate, "silver", "batch"):
        await tokens_until(tidegate, 300)  # until both have requests waiting everywhere
        equal = await tokens_until(tidegate, 1500)
        await apply(tidegate, policy("silver", weight=300))
        tripled = await tokens_until(tidegate, 2000)
    assert equal["silver"] / sum(equal.values()) == pytest.approx(0.5, abs=0.08)
    assert tripled["silver"] / sum(tripled.values()) == pytest.approx(0.75, abs=0.08)


async def test_a_changed_tier_changes_the_order(tidegate: LocalTidegate) -> None:
    await apply(tidegate, *map(policy, TENANTS))
    async with backlog(tidegate, "silver", "batch"):
        await tokens_until(tidegate, 300)
        await apply(tidegate, policy("batch", tier="premium"))
        await tokens_until(tidegate, 300)  # what was in the batch before the change ends
        after = await tokens_until(tidegate, 1000)
        assert after["batch"] / sum(after.values()) > 0.95
        await apply(tidegate, policy("batch", tier="background"))
        await tokens_until(tidegate, 300)
        back = await tokens_until(tidegate, 1000)
    assert back["silver"] / sum(back.values()) > 0.95


async def test_an_invalid_policy_leaves_the_others_in_force(tidegate: LocalTidegate) -> None:
    await apply(tidegate, *map(policy, TENANTS))
    with pytest.raises(KubectlError, match=r"spec\.weight"):
        await tidegate.kubectl("apply", "-f", "-", input=policy("batch", weight=-1))
    rival = policy("rival").replace("spec:", "spec:\n  tenant: demo/silver")
    await tidegate.kubectl("apply", "-f", "-", input=rival)
    assert await wait_for(tidegate, "rival", "Accepted", "False") == "TenantConflict"
    await apply_beside_invalid(tidegate, policy("silver", weight=7))
    async with client(tidegate, "silver") as silver, client(tidegate, "batch") as batch:
        for api in (silver, batch):
            answer = await api.completions.create(
                model=tidegate.model, prompt="Still there?", max_tokens=2
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens >= 1
    await tidegate.kubectl("delete", "tenantpolicy", "rival")


async def apply_beside_invalid(tidegate: LocalTidegate, changed: str) -> None:
    await tidegate.kubectl("apply", "-f", "-", input=changed)
    await wait_for(tidegate, "silver", "Programmed", "True")


async def test_a_policy_deleted_while_the_operator_is_down_is_gone_after_its_restart(
    tidegate: LocalTidegate,
) -> None:
    await apply(tidegate, *map(policy, TENANTS))
    async with client(tidegate, "batch") as api:
        await api.completions.create(model=tidegate.model, prompt="Hello", max_tokens=1)
        await tidegate.stop_operator(kill=True)
        await tidegate.kubectl("delete", "tenantpolicy", "batch")
        # Without the operator nothing changes: the engines go on with what they have.
        await api.completions.create(model=tidegate.model, prompt="Hello", max_tokens=1)
        await tidegate.start_operator()
        await until_refused(tidegate, api)
    await wait_for(tidegate, "silver", "Programmed", "True")
    await apply(tidegate, policy("batch"))
    async with client(tidegate, "batch") as api:
        await api.completions.create(model=tidegate.model, prompt="Hello", max_tokens=1)


async def until_refused(tidegate: LocalTidegate, api: openai.AsyncOpenAI) -> None:
    """Ask until the key is no tenant's any more."""
    async with asyncio.timeout(WATCHED_SECONDS):
        while True:
            try:
                await api.completions.create(model=tidegate.model, prompt="Hello", max_tokens=1)
            except openai.AuthenticationError:
                return


async def test_a_client_that_hangs_up_frees_its_place(tidegate: LocalTidegate) -> None:
    """Streams and answers in one piece alike: the engines end what nobody reads any more."""
    await apply(tidegate, *map(policy, TENANTS))
    async with client(tidegate, "gold") as api:
        stream = await api.completions.create(
            model=tidegate.model,
            prompt="Count for ever:",
            max_tokens=2000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            break
        await stream.close()
        whole = asyncio.create_task(
            api.completions.create(
                model=tidegate.model,
                prompt="Count for ever:",
                max_tokens=2000,
                extra_body={"ignore_eos": True},
            )
        )
        await until_cancelled(tidegate, 1)
        await until_running(tidegate, 1)
        whole.cancel()
        with suppress(asyncio.CancelledError):
            await whole
        await until_cancelled(tidegate, 2)
        await until_running(tidegate, 0)


async def until_cancelled(tidegate: LocalTidegate, count: int) -> None:
    await until_sum(tidegate, "tidegate_cancelled_total", count, tenant="demo/gold")


async def until_running(tidegate: LocalTidegate, count: int) -> None:
    await until_sum(tidegate, "tidegate_requests", count, tenant="demo/gold", state="running")


async def until_sum(tidegate: LocalTidegate, name: str, expected: int, **labels: str) -> None:
    async with asyncio.timeout(WATCHED_SECONDS):
        while True:
            engines = (await tidegate.engine_metrics()).values()
            if sum(engine.value(name, **labels) for engine in engines) == expected:
                return
