"""The control plane as an engine sees it: signed policies in Redis, reports out of it."""

import asyncio
import base64
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from redis import Redis

from tidegate_policies.change import LinedPolicy, PolicyChange
from tidegate_policies.envelope import Envelope, seal
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_policies.wire import EngineReport, envelope_key, report_key, wake_channel

T = TypeVar("T")


async def until(ask: Callable[[], T | None], what: str, *, timeout_seconds: float = 20.0) -> T:
    """Ask, without blocking the event loop, until the answer is true; return it.

    Raises:
        AssertionError: It never was.
    """
    deadline = time.monotonic() + timeout_seconds
    while not (answer := ask()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_seconds:g} s for {what}; last: {answer!r}")
        await asyncio.sleep(0.01)
    return answer


@dataclass
class Publisher:
    """Puts signed policies of one pool into Redis, as the operator does.

    Attributes:
        pool: Of its own, so that tests can share a Redis.
    """

    url: str
    pool: str = field(default_factory=lambda: f"serving/{uuid.uuid4().hex[:10]}")
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    pool_uid: str = "uid"

    @property
    def verify_key(self) -> str:
        """What engines check signatures with."""
        return base64.b64encode(self.key.public_key().public_bytes_raw()).decode()

    def envelope(self, policy: PolicySnapshot, revision: int) -> Envelope:
        """Sign `policy` for this pool."""
        return seal(
            replace(policy, pool=self.pool),
            pool_uid=self.pool_uid,
            revision=revision,
            issued_at="2026-01-01T00:00:00Z",
            sign=lambda message: base64.b64encode(self.key.sign(message)).decode(),
        )

    def publish(self, policy: PolicySnapshot, revision: int) -> Envelope:
        """Deliver a policy and wake the engines."""
        envelope = self.envelope(policy, revision)
        self.put(envelope)
        self.wake(revision)
        return envelope

    def change(self, old: PolicySnapshot, new: PolicySnapshot, revision: int) -> PolicyChange:
        """Return what leads from one policy of this pool to a revision."""
        before, after = (LinedPolicy.of(replace(one, pool=self.pool)) for one in (old, new))
        return before.change_to(after, self.envelope(new, revision))

    def announce(self, message: str) -> None:
        """Wake the engines with any message."""
        with Redis.from_url(self.url) as redis:
            redis.publish(wake_channel(self.pool), message)

    def put(self, envelope: Envelope) -> None:
        """Store an envelope without a wake-up."""
        fields = {
            "revision": envelope.revision,
            "digest": envelope.digest,
            "envelope": envelope.to_json(),
        }
        with Redis.from_url(self.url) as redis:
            redis.hset(envelope_key(self.pool), mapping=fields)

    def put_text(self, text: str) -> None:
        """Store what is no envelope."""
        fields = {"revision": 1, "digest": "x", "envelope": text}
        with Redis.from_url(self.url) as redis:
            redis.hset(envelope_key(self.pool), mapping=fields)

    def wake(self, revision: int) -> None:
        """Wake the engines without telling them what has changed."""
        self.announce(str(revision))

    def subscribers(self) -> int:
        """Count the engines that wait for a wake-up."""
        channel = wake_channel(self.pool)
        with Redis.from_url(self.url) as redis:
            return int(redis.pubsub_numsub(channel)[0][1])

    def report(self, pod: str) -> EngineReport | None:
        """Return the last report of an engine; None when it has expired."""
        with Redis.from_url(self.url) as redis:
            text = redis.get(report_key(self.pool, pod))
        return None if text is None else EngineReport.from_json(text)
