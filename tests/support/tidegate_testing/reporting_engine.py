"""An engine without a model: takes policies and reports as the real one does, over real Redis."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import redis

from tidegate_operator.keys import verifier
from tidegate_policies.envelope import Envelope, EnvelopeRefusedError, unseal
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_policies.wire import (
    REPORT_EXPIRY_SECONDS,
    EngineReport,
    Refusal,
    TenantCounters,
    envelope_key,
    report_key,
    reports_channel,
    wake_channel,
)


class ReportingEngine:
    """Speaks an engine's side of the protocol in a thread, from `start` to `stop`.

    Attributes:
        snapshots: Every policy applied, by revision.
        paused: While set, policies are neither read nor acknowledged; heartbeats go on.
        cut_off: While set, nothing is read or reported, as without a way to Redis.
        tenants: Counters to report.
        running: Requests to report.
    """

    def __init__(self, redis_url: str, pool: str, pod: str, public_key: str) -> None:
        self.pod = pod
        self.snapshots: dict[int, PolicySnapshot] = {}
        self.paused = threading.Event()
        self.cut_off = threading.Event()
        self.tenants: Sequence[TenantCounters] = ()
        self.running = 0
        self._pool = pool
        self._verify = verifier(public_key)
        self._redis = redis.Redis.from_url(redis_url)
        self._incarnation = uuid.uuid4().hex
        self._sequence = 0
        self._revision = 0
        self._digest = ""
        self._refused: Refusal | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"engine {pod}")

    @property
    def revision(self) -> int:
        return self._revision

    @property
    def newest(self) -> PolicySnapshot:
        """The policy in force."""
        return self.snapshots[self._revision]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=10)
        self._redis.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except redis.RedisError:
                self._stopping.wait(0.1)

    def _follow(self) -> None:
        pubsub = self._redis.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        with pubsub:
            pubsub.subscribe(wake_channel(self._pool))
            while not self._stopping.is_set():
                if not self.cut_off.is_set():
                    self._read_policy()
                    self._report()
                pubsub.get_message(timeout=0.25)

    def _read_policy(self) -> None:
        key = envelope_key(self._pool)
        stored, digest = self._redis.hmget(key, ["revision", "digest"])
        is_known = (stored, digest) == (str(self._revision).encode(), self._digest.encode())
        if self.paused.is_set() or not isinstance(stored, bytes) or is_known:
            return
        text = self._redis.hget(key, "envelope")
        assert isinstance(text, bytes)
        self._apply(Envelope.from_json(text))

    def _apply(self, envelope: Envelope) -> None:
        try:
            snapshot = unseal(
                envelope, pool=self._pool, newer_than=self._revision, verify=self._verify
            )
        except EnvelopeRefusedError as error:
            self._refused = Refusal(
                revision=envelope.revision, reason=error.reason, message=str(error)
            )
            return
        self.snapshots[envelope.revision] = snapshot
        self._revision, self._digest, self._refused = envelope.revision, envelope.digest, None

    def _report(self) -> None:
        self._sequence += 1
        report = EngineReport(
            pool=self._pool,
            pod=self.pod,
            incarnation=self._incarnation,
            sequence=self._sequence,
            revision=self._revision,
            digest=self._digest,
            refused=self._refused,
            running=self.running,
            kv_blocks=100,
            kv_used_blocks=sum(counters.kv_used_blocks for counters in self.tenants),
            tenants=tuple(self.tenants),
        ).to_json()
        key = report_key(self._pool, self.pod)
        self._redis.set(key, report, px=int(REPORT_EXPIRY_SECONDS * 1000))
        self._redis.publish(reports_channel(self._pool), report)


@contextmanager
def reporting_engine(
    redis_url: str, pool: str, pod: str, public_key: str, *, is_paused: bool = False
) -> Iterator[ReportingEngine]:
    """Run an engine for the length of the block."""
    engine = ReportingEngine(redis_url, pool, pod, public_key)
    if is_paused:
        engine.paused.set()
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
