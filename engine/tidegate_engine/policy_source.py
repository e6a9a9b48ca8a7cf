"""Where policies come from: Redis, and the disk while Redis is away.

Correct by level, fast by edge: on every wake-up and every few seconds anyway the envelope in Redis
is compared with the policy that was offered last, and read when it is another one, so that a lost
message only costs time. Mostly a wake-up brings what has changed, so that a thousand tenants need
not be read again for one of them. Redis may be away for as long as it likes: the policy in force
stays in force, and the engine says `degraded`. A restart doesn't go back: of the same pool, nothing
older than the disk's is taken.
"""

import asyncio
import base64
import logging
import random
import threading
from collections.abc import Callable
from dataclasses import replace

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from tidegate_engine.policy_board import PolicyBoard
from tidegate_engine.state_file import StateFile
from tidegate_engine.tasks import cancel_all
from tidegate_policies.change import ChangeError, LinedPolicy, PolicyChange
from tidegate_policies.envelope import (
    Envelope,
    EnvelopeRefusedError,
    Verify,
    check_envelope,
    unseal,
)
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_policies.wire import Refusal, envelope_key, wake_channel

POLL_SECONDS = 4.0
"""How often the envelope is looked at without a wake-up; half to one and a half times this."""

MESSAGE_SECONDS = 0.1
"""How long the message of what was found without one is waited for."""

STORE_SECONDS = 1.0
"""How long a policy waits to be written to disk: of a burst of changes only the last is worth it,
and while engines take one, their processors have better to do."""

_RECONNECT_SECONDS = 0.5
_FIELDS = ("revision", "digest")
_log = logging.getLogger(__name__)


def ed25519_verifier(public_key: str) -> Verify:
    """Return the check of signatures (base64) against the operator's raw public key (base64)."""
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public_key))

    def verify(message: bytes, signature: str) -> bool:
        try:
            key.verify(base64.b64decode(signature, validate=True), message)
        except (ValueError, InvalidSignature):
            return False
        return True

    return verify


class PolicySource:
    """Follows the envelope of one pool and offers what is new and good to the board.

    Attributes:
        on_change: Called when `refused` or `degraded` has changed.
    """

    def __init__(
        self, *, pool: str, redis: Redis, verify: Verify, board: PolicyBoard, state: StateFile
    ) -> None:
        """Know nothing yet; `run` begins.

        Args:
            pool: `namespace/name` of the engine's pool.
            redis: Its commands must time out, or a black-holed connection goes unnoticed.
            verify: Checks a signature against the operator's key.
            board: Gets the policies.
            state: Keeps the last good envelope.
        """
        self._pool = pool
        self._redis = redis
        self._verify = verify
        self._board = board
        self._state = state
        self._refused: Refusal | None = None
        self._is_reachable = False
        # Until Redis has confirmed it, a policy from the disk may be an old one.
        self._is_confirmed = False
        self._stored: tuple[Envelope, PolicySnapshot] | None = None
        # The policy that was offered last, as the operator wrote it.
        self._lined: LinedPolicy | None = None
        self._seen: tuple[bytes | str | None, ...] = ()
        self._unstored: tuple[Envelope, LinedPolicy] | None = None
        self._is_to_store = asyncio.Event()
        self._storing = threading.Lock()
        self.on_change: list[Callable[[], None]] = []

    @property
    def refused(self) -> Refusal | None:
        """The newest policy that was not taken; None once Redis holds a good one again."""
        return self._refused

    @property
    def degraded(self) -> bool:
        """Whether Redis can't be read, or the policy in force is the disk's alone."""
        return not (self._is_reachable and self._is_confirmed)

    async def run(self) -> None:
        """Follow the envelope until cancelled; then the newest policy is on the disk."""
        self._stored = await self._read_disk()
        storing = asyncio.create_task(self._store_for_ever())
        try:
            while True:
                try:
                    await self._follow()
                except (RedisError, OSError) as error:
                    self._note_unreachable(error)
                self._start_from_disk()
                await asyncio.sleep(_jittered(_RECONNECT_SECONDS))
        finally:
            await cancel_all([storing])
            self._store(self._unstored)

    async def _follow(self) -> None:
        """Subscribe, then read: a change between the two is in either the one or the other."""
        async with self._redis.pubsub() as channel:
            await channel.subscribe(wake_channel(self._pool))
            self._seen = ()
            await self._read()
            self._start_from_disk()
            while True:
                message = await _wake_up(channel, seconds=_jittered(POLL_SECONDS))
                if message is None:
                    if await self._stored_fields() == self._seen:
                        continue
                    # Whoever stored it has also sent what has changed, which is sooner taken.
                    message = await _wake_up(channel, seconds=MESSAGE_SECONDS)
                if message is not None and self._take_change(message):
                    continue
                self._seen = ()
                await self._read()

    async def _read(self) -> None:
        """Take the envelope if it isn't the one already seen."""
        fields = await self._stored_fields()
        text = None
        if fields != self._seen and fields != (None, None):
            text = await self._redis.hget(envelope_key(self._pool), "envelope")
        if not self._is_reachable:
            _log.info("Redis is reachable, pool %s", self._pool)
            self._is_reachable = True
            self._tell()
        self._seen = fields
        if text is not None:
            self._consider(text)

    async def _stored_fields(self) -> tuple[bytes | str | None, ...]:
        return tuple(await self._redis.hmget(envelope_key(self._pool), _FIELDS))

    def _take_change(self, message: bytes | str) -> bool:
        """Take what has changed, if the message says so and it can be used.

        Nothing is refused here: what can't be used makes the whole policy be read. What was read
        already, with a later one, needs no more than to be passed over.
        """
        base = self._lined
        if base is None or base.digest != self._board.newest_digest:
            return False
        try:
            change = PolicyChange.from_json(message)
            envelope = change.envelope
            if self._is_overtaken(envelope):
                return True
            check_envelope(
                envelope,
                pool=self._pool,
                newer_than=self._board.newest_revision,
                verify=self._verify,
            )
            lined = base.changed_by(change)
        except (ChangeError, EnvelopeRefusedError) as error:
            _log.debug("the whole policy is read: %s", error)
            return False
        self._seen = str(envelope.revision).encode(), envelope.digest.encode()
        self._note_good()
        self._offer(envelope, lined)
        return True

    def _is_overtaken(self, envelope: Envelope) -> bool:
        """Tell whether what was offered last is as new, while there is no doubt about that one."""
        if self.degraded or self._refused is not None:
            return False
        revision, digest = self._newest_offered()
        return (envelope.revision, envelope.digest) == (revision, digest) or (
            envelope.revision < revision
        )

    def _consider(self, text: bytes | str) -> None:
        revision = 0
        try:
            envelope = Envelope.from_json(text)
            revision = envelope.revision
            snapshot = self._unseal(envelope)
        except EnvelopeRefusedError as error:
            self._refuse(Refusal(revision=revision, reason=error.reason, message=str(error)))
            return
        self._note_good()
        if snapshot is not None:
            self._offer(envelope, LinedPolicy.of(snapshot, envelope.body))

    def _offer(self, envelope: Envelope, policy: LinedPolicy) -> None:
        self._lined = policy
        self._board.offer(policy.snapshot, revision=envelope.revision, digest=envelope.digest)
        self._unstored = envelope, policy
        self._is_to_store.set()

    def _unseal(self, envelope: Envelope) -> PolicySnapshot | None:
        """Check an envelope; None = it is the very one that was offered last."""
        key = envelope.revision, envelope.digest
        newest = self._newest_known(envelope.pool_uid)
        newer_than = newest[0] - 1 if key == newest else newest[0]
        snapshot = unseal(envelope, pool=self._pool, newer_than=newer_than, verify=self._verify)
        return None if key == self._newest_offered() else snapshot

    def _newest_offered(self) -> tuple[int, str]:
        return self._board.newest_revision, self._board.newest_digest

    def _newest_known(self, pool_uid: str) -> tuple[int, str]:
        """Return revision and digest of what was offered last, or, before that, of the disk's."""
        if self._stored is not None and not self._board.newest_revision:
            stored, _ = self._stored
            # A recreated pool is another one, which counts anew.
            if stored.pool_uid == pool_uid:
                return stored.revision, stored.digest
        return self._newest_offered()

    async def _read_disk(self) -> tuple[Envelope, PolicySnapshot] | None:
        """Return the last good envelope of an earlier run."""
        text = await asyncio.to_thread(self._state.read)
        if text is None:
            return None
        try:
            envelope = Envelope.from_json(text)
            snapshot = unseal(envelope, pool=self._pool, newer_than=0, verify=self._verify)
        except EnvelopeRefusedError as error:
            _log.warning("the policy on disk is not used: %s: %s", error.reason, error)
            return None
        return envelope, snapshot

    def _start_from_disk(self) -> None:
        """Offer the disk's policy where Redis had none to offer: an old one is better than none."""
        if self._stored is None or self._board.newest_revision:
            return
        envelope, snapshot = self._stored
        _log.warning("starting from the policy on disk, revision %d", envelope.revision)
        self._board.offer(snapshot, revision=envelope.revision, digest=envelope.digest)

    async def _store_for_ever(self) -> None:
        while True:
            await self._is_to_store.wait()
            await asyncio.sleep(STORE_SECONDS)
            self._is_to_store.clear()
            newest, self._unstored = self._unstored, None
            await asyncio.to_thread(self._store, newest)

    def _store(self, newest: tuple[Envelope, LinedPolicy] | None) -> None:
        """Keep a policy on the disk; never two at a time, or the older might come last."""
        if newest is None:
            return
        envelope, policy = newest
        with self._storing:
            try:
                self._state.write(replace(envelope, body=policy.text).to_json())
            except OSError as error:
                # The policy counts all the same; only a restart without Redis would miss it.
                _log.warning("the policy can't be stored: %s", error)

    # -- what others see -------------------------------------------------------------------------

    def _note_good(self) -> None:
        """Redis holds the policy in force, or a newer one that is taken now."""
        has_changed = not self._is_confirmed or self._refused is not None
        self._is_confirmed = True
        self._refused = None
        if has_changed:
            self._tell()

    def _refuse(self, refusal: Refusal) -> None:
        if refusal == self._refused:
            return
        _log.warning(
            "policy revision %d refused: %s: %s",
            refusal.revision,
            refusal.reason,
            refusal.message,
        )
        self._refused = refusal
        self._tell()

    def _note_unreachable(self, error: Exception) -> None:
        if self._is_reachable:
            _log.warning("Redis is unreachable, the policy stays in force: %s", error)
            self._is_reachable = False
            self._tell()

    def _tell(self) -> None:
        for callback in self.on_change:
            callback()


async def _wake_up(channel: PubSub, *, seconds: float) -> bytes | str | None:
    """Wait for a wake-up, and return its message; None when none came for so long."""
    found = await channel.get_message(ignore_subscribe_messages=True, timeout=seconds)
    return None if found is None else found["data"]


def _jittered(seconds: float) -> float:
    """Spread engines that were started together."""
    return seconds * random.uniform(0.5, 1.5)
