"""Policies on their way to the engines: signed, and stored in Redis under a growing revision."""

import logging
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

from redis.asyncio import Redis

from tidegate_operator.compiler import CompiledPool
from tidegate_operator.progress import Published, Stored, plan_revision
from tidegate_operator.verdicts import timestamp
from tidegate_policies.change import LinedPolicy
from tidegate_policies.envelope import Envelope, EnvelopeRefusedError, Sign, seal
from tidegate_policies.problems import SnapshotError
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_policies.wire import envelope_key, wake_channel

_LOG = logging.getLogger(__name__)

MAX_ATTEMPTS = 5

MAX_CHANGE_BYTES = 256 * 1024
"""A longer change wakes engines without it: they read the whole policy, each at its own time."""

# KEYS: the pool's hash. ARGV: revision, digest, pool uid, envelope, wake channel, wake message.
# Refuses to go back, and to give one revision two meanings: returns 0 then, 1 when stored.
# What isn't made of digits alone is no revision here either.
_STORE = """
local found = redis.call('HGET', KEYS[1], 'revision') or ''
local current = string.match(found, '^%d+$') and tonumber(found) or 0
local revision = tonumber(ARGV[1])
if current > revision then return 0 end
if current == revision and redis.call('HGET', KEYS[1], 'digest') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'revision', ARGV[1], 'digest', ARGV[2],
           'pool_uid', ARGV[3], 'envelope', ARGV[4])
redis.call('PUBLISH', ARGV[5], ARGV[6])
return 1
"""


class ContestedRevisionError(Exception):
    """Somebody else keeps storing policies of the same pool.

    Attributes:
        pool: `namespace/name`.
    """

    def __init__(self, pool: str) -> None:
        super().__init__(f"pool {pool!r}: another writer was faster {MAX_ATTEMPTS} times in a row")
        self.pool = pool


class Delivery:
    """Stores the newest policy of each pool in Redis and wakes its engines."""

    def __init__(self, redis: "Redis", sign: Sign) -> None:
        """Prepare to deliver.

        Args:
            redis: Owned by the caller.
            sign: Signs with the operator's private key.
        """
        self._redis = redis
        self._sign = sign
        self._store = redis.register_script(_STORE)
        self._newest: dict[str, tuple[Envelope, LinedPolicy]] = {}

    async def publish(
        self, compiled: CompiledPool, seen: Mapping[str, tuple[int, str]]
    ) -> tuple[Published, bool]:
        """Make `compiled` the newest policy of its pool, unless it already is.

        Args:
            compiled: The policy.
            seen: Revision and digest as known from status and from engines, by source.

        Returns:
            What is in force now, and whether that needed a new revision.

        Raises:
            RedisError: Redis can't be reached or refuses; nothing is in force that wasn't.
            ContestedRevisionError: Another writer of the same pool doesn't give way.
        """
        for _ in range(MAX_ATTEMPTS):
            stored = await self._own_stored(compiled.pool)
            envelope, policy = self._envelope(compiled, stored, seen)
            target = Stored(
                revision=envelope.revision, digest=envelope.digest, pool_uid=envelope.pool_uid
            )
            if stored == target or await self._try_store(envelope, policy):
                self._newest[compiled.pool] = envelope, policy
                return _published(envelope), stored is None or stored.revision != target.revision
        raise ContestedRevisionError(compiled.pool)

    async def stored(self, pool: str) -> Stored | None:
        """Return what Redis holds for `pool`; None for nothing that makes sense."""
        names = ["revision", "digest", "pool_uid"]
        fields = self._redis.hmget(envelope_key(pool), names)
        revision, digest, uid = await cast("Awaitable[list[bytes | None]]", fields)
        if revision is None or not revision.isdigit():
            return None
        return Stored(
            revision=int(revision), digest=(digest or b"").decode(), pool_uid=(uid or b"").decode()
        )

    async def _own_stored(self, pool: str) -> Stored | None:
        """Return what Redis holds, with an empty digest where it can't be used as it is.

        Looked at once after a start: the key may be a new one, and engines would refuse the policy
        that was signed with the old one. What can be used is remembered, so that engines are told
        what has changed since then instead of reading all of it again.
        """
        stored = await self.stored(pool)
        if stored is None or pool in self._newest:
            return stored
        text = await cast(
            "Awaitable[bytes | None]", self._redis.hget(envelope_key(pool), "envelope")
        )
        own = self._own(text or b"", stored)
        if own is None:
            return replace(stored, digest="")
        self._newest[pool] = own
        return stored

    def _own(self, text: bytes, stored: Stored) -> tuple[Envelope, LinedPolicy] | None:
        try:
            envelope = Envelope.from_json(text)
            policy = LinedPolicy.of(PolicySnapshot.from_text(envelope.body), envelope.body)
        except (EnvelopeRefusedError, SnapshotError):
            return None
        says = (envelope.revision, envelope.digest, policy.digest)
        # Ed25519 signatures are a function of key and message.
        is_signed = envelope.signature == self._sign(envelope.message())
        if is_signed and says == (stored.revision, stored.digest, stored.digest):
            return envelope, policy
        return None

    def forget(self, pool: str) -> None:
        """Drop what is remembered of a pool that is gone."""
        self._newest.pop(pool, None)

    def _envelope(
        self,
        compiled: CompiledPool,
        stored: Stored | None,
        seen: Mapping[str, tuple[int, str]],
    ) -> tuple[Envelope, LinedPolicy]:
        newest = self._newest.get(compiled.pool)
        if newest is not None and newest[0].pool_uid != compiled.pool_uid:
            newest = None
        remembered = {"memory": (newest[0].revision, newest[0].digest)} if newest else {}
        snapshot = compiled.snapshot
        revision = plan_revision(
            snapshot.digest,
            pool_uid=compiled.pool_uid,
            stored=stored,
            seen={**seen, **remembered},
        )
        if newest is not None and remembered["memory"] == (revision, snapshot.digest):
            return newest
        sealed = seal(
            snapshot,
            pool_uid=compiled.pool_uid,
            revision=revision,
            issued_at=timestamp(datetime.now(UTC)),
            sign=self._sign,
        )
        return sealed, LinedPolicy.of(snapshot)

    def _message(self, envelope: Envelope, policy: LinedPolicy) -> str:
        """Return what wakes the engines: what has changed, or the revision's number alone."""
        _, last = self._newest.get(envelope.pool, (None, None))
        if last is not None:
            change = last.change_to(policy, envelope).to_json()
            if len(change) <= MAX_CHANGE_BYTES:
                return change
        return str(envelope.revision)

    async def _try_store(self, envelope: Envelope, policy: LinedPolicy) -> bool:
        pool = envelope.pool
        arguments: list[Any] = [
            envelope.revision,
            envelope.digest,
            envelope.pool_uid,
            envelope.to_json(),
            wake_channel(pool),
            self._message(envelope, policy),
        ]
        is_stored = bool(await self._store(keys=[envelope_key(pool)], args=arguments))
        if is_stored:
            _LOG.info("pool %s: revision %d stored", pool, envelope.revision)
        return is_stored


def _published(envelope: Envelope) -> Published:
    return Published(revision=envelope.revision, digest=envelope.digest, time=envelope.issued_at)
