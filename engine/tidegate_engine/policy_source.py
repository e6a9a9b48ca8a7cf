"""Where policies come from: Redis, and the disk while Redis is away.

Correct by level, fast by edge: the envelope in Redis is read at the start, on every wake-up, after
every reconnect and every few seconds anyway, so that a lost message only costs time. Redis may be
away for as long as it likes: the policy in force stays in force, and the engine says `degraded`.
"""

import asyncio
import base64
import logging
import random
from collections.abc import Callable

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from tidegate_engine.policy_board import PolicyBoard
from tidegate_engine.state_file import StateFile
from tidegate_policies.envelope import Envelope, EnvelopeRefusedError, Verify, unseal
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_policies.wire import Refusal, envelope_key, wake_channel

POLL_SECONDS = 4.0
"""How often the envelope is looked at without a wake-up; half to one and a half times this."""

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
        self._has_tried_disk = False
        self._seen: tuple[bytes | str | None, ...] = ()
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
        """Follow the envelope until cancelled."""
        while True:
            try:
                await self._follow()
            except (RedisError, OSError) as error:
                self._note_unreachable(error)
            await self._start_from_disk()
            await asyncio.sleep(_jittered(_RECONNECT_SECONDS))

    async def _follow(self) -> None:
        """Subscribe, then read: a change between the two is in either the one or the other."""
        async with self._redis.pubsub() as channel:
            await channel.subscribe(wake_channel(self._pool))
            self._seen = ()
            await self._read()
            await self._start_from_disk()
            while True:
                if await _is_woken(channel):
                    self._seen = ()
                await self._read()

    async def _read(self) -> None:
        """Take the envelope if it isn't the one already seen."""
        key = envelope_key(self._pool)
        fields = tuple(await self._redis.hmget(key, _FIELDS))
        text = None
        if fields != self._seen and fields != (None, None):
            text = await self._redis.hget(key, "envelope")
        if not self._is_reachable:
            _log.info("Redis is reachable, pool %s", self._pool)
            self._is_reachable = True
            self._tell()
        self._seen = fields
        if text is not None:
            await self._consider(text)

    async def _consider(self, text: bytes | str) -> None:
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
            self._board.offer(snapshot, revision=revision, digest=envelope.digest)
            await self._store(envelope)

    def _unseal(self, envelope: Envelope) -> PolicySnapshot | None:
        """Check an envelope; None = it is the very one that was offered last."""
        newest = self._board.newest_revision
        is_same = (envelope.revision, envelope.digest) == (newest, self._board.newest_digest)
        newer_than = newest - 1 if is_same else newest
        snapshot = unseal(envelope, pool=self._pool, newer_than=newer_than, verify=self._verify)
        return None if is_same else snapshot

    async def _start_from_disk(self) -> None:
        """Offer the last good envelope, once: an old policy is better than none."""
        if self._has_tried_disk or self._board.newest_revision:
            return
        self._has_tried_disk = True
        text = await asyncio.to_thread(self._state.read)
        if text is None:
            return
        try:
            envelope = Envelope.from_json(text)
            snapshot = unseal(envelope, pool=self._pool, newer_than=0, verify=self._verify)
        except EnvelopeRefusedError as error:
            _log.warning("the policy on disk is not used: %s: %s", error.reason, error)
            return
        _log.warning("starting from the policy on disk, revision %d", envelope.revision)
        self._board.offer(snapshot, revision=envelope.revision, digest=envelope.digest)

    async def _store(self, envelope: Envelope) -> None:
        try:
            await asyncio.to_thread(self._state.write, envelope.to_json())
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


async def _is_woken(channel: PubSub) -> bool:
    """Wait for a wake-up; False when it is time to look without one."""
    message = await channel.get_message(
        ignore_subscribe_messages=True, timeout=_jittered(POLL_SECONDS)
    )
    return message is not None


def _jittered(seconds: float) -> float:
    """Spread engines that were started together."""
    return seconds * random.uniform(0.5, 1.5)
