"""A real engine process, with all of a control plane that it needs: Redis and a signed policy."""

import asyncio
import hashlib
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from redis import Redis

from tidegate_cli.bench.engine_client import Target
from tidegate_cli.bench.engine_policy import POOL, everything_for_one_tenant
from tidegate_cli.engine_metrics import EngineMetrics
from tidegate_cli.errors import NotReadyError
from tidegate_devcluster.assets import Assets
from tidegate_devcluster.processes import Child, Lifeline, free_port
from tidegate_devcluster.redis_server import RedisServer
from tidegate_operator.keys import public_key_text, signer
from tidegate_policies.envelope import seal
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_policies.wire import envelope_key, wake_channel

START_SECONDS = 120.0
"""For an engine to load its model, measure itself and get its policy, on a busy machine."""

_POLL_SECONDS = 0.05
_ISSUED_AT = "2026-01-01T00:00:00Z"
_GRACE_SECONDS = 5.0


@dataclass
class OneTenant:
    """A policy under which one tenant may have everything, signed and delivered by Redis.

    Attributes:
        folder: For the state and logs of engines.
        key: The tenant's API key.
        revision: Of the newest policy.
    """

    redis_url: str
    folder: Path
    lifeline: Lifeline
    key: str = field(default_factory=lambda: secrets.token_urlsafe(18))
    revision: int = 0
    _signing_key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)

    @classmethod
    @contextmanager
    def in_force(cls) -> Iterator["OneTenant"]:
        """Start Redis; stop it, and remove every file, at the end of the block."""
        with (
            Lifeline() as lifeline,
            tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder,
        ):
            lifeline.remove_at_end(Path(folder))
            root = Path(folder)
            assets = Assets.from_environment()
            with RedisServer(root / "redis", assets, lifeline=lifeline) as redis:
                yield cls(redis_url=redis.url, folder=root, lifeline=lifeline)

    def publish(
        self,
        max_num_seqs: int,
        *,
        itl_seconds: float | None = None,
        max_partial_prefills: int | None = None,
    ) -> int:
        """Deliver a policy with these bounds of a batch and this target; returns its revision."""
        digest = hashlib.sha256(self.key.encode()).hexdigest()
        return self.deliver(
            everything_for_one_tenant(
                max_num_seqs,
                digest,
                itl_seconds=itl_seconds,
                max_partial_prefills=max_partial_prefills,
            )
        )

    def deliver(self, policy: PolicySnapshot) -> int:
        """Deliver a policy of `POOL`; returns its revision."""
        self.revision += 1
        envelope = seal(
            policy,
            pool_uid="bench",
            revision=self.revision,
            issued_at=_ISSUED_AT,
            sign=signer(self._signing_key),
        )
        fields = {
            "revision": envelope.revision,
            "digest": envelope.digest,
            "envelope": envelope.to_json(),
        }
        with Redis.from_url(self.redis_url) as redis:
            redis.hset(envelope_key(POOL), mapping=fields)
            redis.publish(wake_channel(POOL), str(self.revision))
        return self.revision

    def environment(self, name: str) -> dict[str, str]:
        """Return what an engine has to know to obey this policy."""
        return {
            "TIDEGATE_POOL": POOL,
            "TIDEGATE_POD_NAME": name,
            "TIDEGATE_REDIS_URL": self.redis_url,
            "TIDEGATE_VERIFY_KEY": public_key_text(self._signing_key),
            "TIDEGATE_STATE_DIR": str(self.folder / name),
        }


@dataclass(frozen=True)
class EngineProcess:
    """A running `python -m tidegate_engine`, ready to serve."""

    child: Child
    target: Target
    session: aiohttp.ClientSession

    @property
    def pid(self) -> int:
        """Process id."""
        return self.child.pid

    async def metrics(self) -> EngineMetrics:
        """Scrape."""
        async with self.session.get("/metrics") as response:
            return EngineMetrics(await response.text())

    async def obeys(self, revision: int) -> None:
        """Wait until the engine has this policy in force.

        Raises:
            NotReadyError: It never was.
            StartError: The engine ended.
        """

        async def is_in_force() -> bool:
            return (await self.metrics()).value("tidegate_policy_revision") >= revision

        await _wait(self.child, is_in_force, f"revision {revision} in force")

    async def is_ready(self) -> bool:
        """Whether it serves."""
        try:
            async with self.session.get("/readyz") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False


@asynccontextmanager
async def running_engine(
    tenant: OneTenant, name: str, settings: Mapping[str, str]
) -> AsyncIterator[EngineProcess]:
    """Run an engine for the length of the block.

    Args:
        tenant: Whose policy it obeys; one must have been published.
        name: Of its own among the engines of `tenant`.
        settings: Further variables of its environment.

    Raises:
        NotReadyError: It didn't become ready.
        StartError: It ended.
    """
    port = free_port()
    child = Child(
        name,
        [sys.executable, "-m", "tidegate_engine"],
        log=tenant.folder / f"{name}.log",
        lifeline=tenant.lifeline,
        environment={
            **tenant.environment(name),
            "TIDEGATE_HOST": "127.0.0.1",
            "TIDEGATE_PORT": str(port),
            **settings,
        },
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession(url) as session:
            target = Target(base_url=f"{url}/v1", key=tenant.key)
            engine = EngineProcess(child, target, session)
            await _wait(child, engine.is_ready, f"engine {name}")
            yield engine
    finally:
        await asyncio.to_thread(child.stop, grace_seconds=_GRACE_SECONDS)


async def _wait(child: Child, is_true: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        async with asyncio.timeout(START_SECONDS):
            while not await is_true():
                child.raise_if_ended()
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise NotReadyError(what, limit_seconds=START_SECONDS) from None
