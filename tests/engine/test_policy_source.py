import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from redis.asyncio import Redis

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.redis_server import RedisServer
from tidegate_engine import policy_source
from tidegate_engine.events import PolicyApplied
from tidegate_engine.policy_board import PolicyBoard
from tidegate_engine.policy_source import PolicySource, ed25519_verifier
from tidegate_engine.state_file import StateFile
from tidegate_engine.tasks import cancel_all
from tidegate_policies.envelope import Envelope
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_policies.wire import Refusal
from tidegate_testing.control import Publisher, until
from tidegate_testing.policies import a_snapshot, a_tenant

NOWHERE = "redis://127.0.0.1:1/0"
FIRST, SECOND = a_snapshot(a_tenant("acme")), a_snapshot(a_tenant("zeta"))


@dataclass
class Follower:
    """A policy source whose policies are in force as soon as they are offered."""

    source: PolicySource
    board: PolicyBoard
    state: StateFile

    @property
    def revision(self) -> int:
        return self.board.in_force.revision if self.board.in_force else 0

    @property
    def refused(self) -> Refusal | None:
        return self.source.refused

    @property
    def degraded(self) -> bool:
        return self.source.degraded


@asynccontextmanager
async def a_follower(publisher: Publisher, folder: Path) -> AsyncIterator[Follower]:
    event_loop = asyncio.get_running_loop()

    def hand_over(_: PolicySnapshot, revision: int) -> None:
        applied = PolicyApplied(revision=revision, step=1, at=0.0, seconds=0.0)
        event_loop.call_soon(board.applied, applied)

    board = PolicyBoard(hand_over)
    state = StateFile(folder / "policy.json")
    async with Redis.from_url(publisher.url, socket_timeout=1, socket_connect_timeout=1) as redis:
        source = PolicySource(
            pool=publisher.pool,
            redis=redis,
            verify=ed25519_verifier(publisher.verify_key),
            board=board,
            state=state,
        )
        running = asyncio.create_task(source.run())
        try:
            yield Follower(source, board, state)
        finally:
            await cancel_all({running})


@pytest.fixture
def publisher(redis_server: RedisServer) -> Publisher:
    return Publisher(redis_server.url)


@pytest.fixture
def own_redis(assets: Assets, tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that the test may stop."""
    with RedisServer(tmp_path / "redis", assets) as started:
        yield started


@pytest.fixture
def rare_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave only wake-ups to notice a change in time."""
    monkeypatch.setattr(policy_source, "POLL_SECONDS", 600.0)


@pytest.fixture
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_source, "POLL_SECONDS", 0.05)


async def test_the_policy_in_redis_is_in_force_from_the_start(
    publisher: Publisher, tmp_path: Path
) -> None:
    envelope = publisher.publish(FIRST, 5)
    async with a_follower(publisher, tmp_path) as follower:
        await until(lambda: follower.revision == 5, "revision 5")
        assert follower.board.in_force is not None
        assert follower.board.in_force.digest == envelope.digest
        assert not follower.degraded


@pytest.mark.usefixtures("rare_polls")
async def test_a_wake_up_brings_a_new_policy_at_once(publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish(FIRST, 1)
    async with a_follower(publisher, tmp_path) as follower:
        await until(lambda: follower.revision == 1, "revision 1")
        publisher.publish(SECOND, 2)
        await until(lambda: follower.revision == 2, "revision 2", timeout_seconds=5)


@pytest.mark.usefixtures("quick_polls")
async def test_a_lost_wake_up_only_costs_time(publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish(FIRST, 1)
    async with a_follower(publisher, tmp_path) as follower:
        await until(lambda: follower.revision == 1, "revision 1")
        publisher.put(publisher.envelope(SECOND, 2))
        await until(lambda: follower.revision == 2, "revision 2")


@pytest.mark.usefixtures("rare_polls")
async def test_the_same_policy_again_is_nothing_new(publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish(FIRST, 1)
    async with a_follower(publisher, tmp_path) as follower:
        await until(lambda: follower.revision == 1, "revision 1")
        changes: list[int] = []
        follower.board.on_change.append(lambda policy: changes.append(policy.revision))
        publisher.publish(FIRST, 1)
        publisher.publish(SECOND, 2)
        await until(lambda: follower.revision == 2, "revision 2")
        assert changes == [2]
        assert follower.refused is None


@pytest.mark.usefixtures("rare_polls")
async def test_a_change_is_taken_without_reading_the_whole_policy(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.publish(FIRST, 1)
    async with a_follower(publisher, tmp_path) as follower:
        await until(lambda: follower.revision == 1, "revision 1")
        change = publisher.change(FIRST, SECOND, 2)
        # What can't be read as an envelope would be refused.
        publisher.put(replace(change.envelope, body="never read"))
        publisher.announce(change.to_json())
        await until(lambda: follower.revision == 2, "revision 2", timeout_seconds=5)
        assert follower.board.in_force is not None
        assert follower.board.in_force.snapshot.tenants == SECOND.tenants
        assert follower.refused is None
        stored = await until(follower.state.read, "a file")
        await until(lambda: Envelope.from_json(follower.state.read() or "").revision == 2, "2")
    assert Envelope.from_json(stored).pool == publisher.pool
    # What is on the disk is whole: a start without Redis needs no more.
    async with a_follower(replace(publisher, url=NOWHERE), tmp_path) as restarted:
        await until(lambda: restarted.revision == 2, "revision 2 from the disk")


@pytest.mark.usefixtures("quick_polls")
async def test_a_change_that_is_on_its_way_is_waited_for(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    look = PolicySource._stored_fields

    async def looked(source: PolicySource) -> tuple[bytes | str | None, ...]:
        fields = await look(source)
        seen.append(fields[0])
        return fields

    monkeypatch.setattr(policy_source, "MESSAGE_SECONDS", 600.0)
    monkeypatch.setattr(PolicySource, "_stored_fields", looked)
    publisher.publish(FIRST, 1)
    async with a_follower(publisher, tmp_path) as follower:
        await until(lambda: follower.revision == 1, "revision 1")
        change = publisher.change(FIRST, SECOND, 2)
        publisher.put(replace(change.envelope, body="never read"))
        await until(lambda: b"2" in seen, "a look at revision 2")
        publisher.announce(change.to_json())
        await until(lambda: follower.revision == 2, "revision 2")
        assert follower.refused is None


@pytest.mark.usefixtures("rare_polls")
async def test_a_change_that_was_read_already_is_passed_over(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.publish(FIRST, 1)
    async with a_follower(publisher, tmp_path) as follower:
        await until(lambda: follower.revision == 1, "revision 1")
        publisher.publish(SECOND, 2)
        await until(lambda: follower.revision == 2, "revision 2")
        refused: list[Refusal | None] = []
        follower.source.on_change.append(lambda: refused.append(follower.refused))
        late, next_one = publisher.change(FIRST, SECOND, 2), publisher.change(SECOND, FIRST, 3)
        publisher.put(replace(late.envelope, body="never read"))
        publisher.announce(late.to_json())
        publisher.announce(next_one.to_json())
        await until(lambda: follower.revision == 3, "revision 3")
        assert refused == []


@pytest.mark.usefixtures("rare_polls")
@pytest.mark.parametrize("kind", ["forged", "tampered", "from elsewhere", "foreign", "no change"])
async def test_a_change_that_is_not_good_makes_the_whole_policy_be_read(
    publisher: Publisher, tmp_path: Path, kind: str
) -> None:
    publisher.publish(FIRST, 1)
    change = publisher.change(FIRST, SECOND, 2)
    announced = {
        "forged": replace(publisher, key=Ed25519PrivateKey.generate()).change(FIRST, SECOND, 2),
        "tampered": replace(change, tenants=tuple(t.replace(":", ": ") for t in change.tenants)),
        "from elsewhere": replace(change, base="0" * 64),
        "foreign": replace(publisher, pool="serving/other").change(FIRST, SECOND, 2),
    }
    async with a_follower(publisher, tmp_path) as follower:
        await until(lambda: follower.revision == 1, "revision 1")
        publisher.put(publisher.envelope(SECOND, 2))
        message = announced[kind].to_json() if kind in announced else "no change"
        publisher.announce(message)
        await until(lambda: follower.revision == 2, "revision 2", timeout_seconds=5)
        assert follower.refused is None


@pytest.mark.usefixtures("rare_polls")
async def test_a_change_alone_without_the_policy_in_redis_is_noticed_at_the_next_look(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.publish(FIRST, 1)
    async with a_follower(publisher, tmp_path) as follower:
        await until(lambda: follower.revision == 1, "revision 1")
        publisher.announce(publisher.change(FIRST, SECOND, 2).to_json())
        await until(lambda: follower.revision == 2, "revision 2", timeout_seconds=5)
        # Redis holds an older one than the engine was told of.
        publisher.wake(2)
        refusal = await until(lambda: follower.refused, "a refusal")
        assert refusal.reason == "StaleRevision"


def forged(publisher: Publisher) -> Envelope:
    return replace(publisher, key=Ed25519PrivateKey.generate()).envelope(SECOND, 7)


def foreign(publisher: Publisher) -> Envelope:
    return replace(publisher, pool="serving/other").envelope(SECOND, 7)


def changed(publisher: Publisher) -> Envelope:
    return replace(publisher.envelope(SECOND, 7), body=FIRST.to_text())


def unsigned(publisher: Publisher) -> Envelope:
    return replace(publisher.envelope(SECOND, 7), signature="no base64!")


@pytest.mark.usefixtures("rare_polls")
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (forged, "BadSignature"),
        (unsigned, "BadSignature"),
        (foreign, "WrongPool"),
        (changed, "DigestMismatch"),
        (lambda publisher: publisher.envelope(SECOND, 3), "StaleRevision"),
        (lambda publisher: publisher.envelope(SECOND, 4), "StaleRevision"),
    ],
)
async def test_what_is_not_good_is_refused_until_something_good_comes(
    publisher: Publisher, tmp_path: Path, spoil: object, reason: str
) -> None:
    publisher.publish(FIRST, 4)
    async with a_follower(publisher, tmp_path) as follower:
        await until(lambda: follower.revision == 4, "revision 4")
        bad = spoil(publisher)  # type: ignore[operator]
        publisher.put(bad)
        publisher.wake(bad.revision)
        refusal = await until(lambda: follower.refused, "a refusal")
        assert (refusal.reason, refusal.revision) == (reason, bad.revision)
        assert follower.revision == 4
        publisher.publish(SECOND, 8)
        await until(lambda: follower.revision == 8, "revision 8")
        assert follower.refused is None


@pytest.mark.usefixtures("rare_polls")
async def test_what_is_no_envelope_is_refused(publisher: Publisher, tmp_path: Path) -> None:
    publisher.put_text('{"pool": 5}')
    async with a_follower(publisher, tmp_path) as follower:
        refusal = await until(lambda: follower.refused, "a refusal")
        assert refusal.reason == "Malformed"
        publisher.publish(FIRST, 1)
        await until(lambda: follower.revision == 1, "revision 1")


async def test_the_engine_starts_from_its_disk_when_redis_is_away(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    publisher = Publisher(own_redis.url)
    publisher.publish(FIRST, 3)
    async with a_follower(publisher, tmp_path) as follower:
        await until(lambda: follower.state.read() is not None, "a stored policy")
    own_redis.stop()
    async with a_follower(publisher, tmp_path) as follower:
        await until(lambda: follower.revision == 3, "revision 3")
        assert follower.degraded
        own_redis.restart()
        await until(lambda: publisher.subscribers() == 1, "a reconnect")
        assert follower.degraded  # Redis is back, but empty
        publisher.publish(FIRST, 3)
        await until(lambda: not follower.degraded, "a confirmed policy")
        assert follower.revision == 3


async def test_redis_going_away_leaves_the_policy_in_force(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    publisher = Publisher(own_redis.url)
    publisher.publish(FIRST, 1)
    async with a_follower(publisher, tmp_path) as follower:
        await until(lambda: follower.revision == 1, "revision 1")
        changes: list[bool] = []
        follower.source.on_change.append(lambda: changes.append(follower.degraded))
        own_redis.stop()
        await until(lambda: follower.degraded, "a degraded engine")
        assert follower.revision == 1
        own_redis.restart()
        publisher.publish(SECOND, 2)
        await until(lambda: follower.revision == 2, "revision 2")
        assert not follower.degraded
        assert changes == [True, False]


async def test_what_redis_holds_goes_before_the_disk(publisher: Publisher, tmp_path: Path) -> None:
    StateFile(tmp_path / "policy.json").write(publisher.envelope(FIRST, 1).to_json())
    publisher.publish(SECOND, 2)
    async with a_follower(publisher, tmp_path) as follower:
        seen: list[int] = []
        follower.board.on_change.append(lambda policy: seen.append(policy.revision))
        await until(lambda: follower.revision, "a policy")
        assert seen == [2]


async def test_a_restart_does_not_go_back_when_redis_does(
    publisher: Publisher, tmp_path: Path
) -> None:
    stored = publisher.envelope(SECOND, 8).to_json()
    StateFile(tmp_path / "policy.json").write(stored)
    publisher.publish(FIRST, 5)
    async with a_follower(publisher, tmp_path) as follower:
        await until(lambda: follower.revision, "a policy")
        assert (follower.revision, follower.degraded) == (8, True)
        assert follower.refused is not None
        assert (follower.refused.reason, follower.refused.revision) == ("StaleRevision", 5)
        assert follower.state.read() == stored
        publisher.publish(FIRST, 9)
        await until(lambda: follower.revision == 9, "revision 9")
        assert not follower.degraded


async def test_of_a_burst_the_last_policy_is_on_the_disk_when_the_engine_ends(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.publish(FIRST, 1)
    async with a_follower(publisher, tmp_path) as follower:
        await until(follower.state.read, "a file")
        for revision in range(2, 8):
            publisher.publish(SECOND if revision % 2 else FIRST, revision)
        await until(lambda: follower.revision == 7, "the last revision")
        # The disk was not written for each of them.
        assert Envelope.from_json(follower.state.read() or "").revision < 7

    assert Envelope.from_json(follower.state.read() or "").revision == 7


async def test_a_policy_that_is_on_disk_too_is_no_old_one(
    publisher: Publisher, tmp_path: Path
) -> None:
    envelope = publisher.publish(FIRST, 5)
    StateFile(tmp_path / "policy.json").write(envelope.to_json())
    async with a_follower(publisher, tmp_path) as follower:
        await until(lambda: follower.revision == 5, "revision 5")
        assert not follower.degraded
        assert follower.refused is None


async def test_the_disk_of_a_pool_that_was_recreated_counts_for_nothing(
    publisher: Publisher, tmp_path: Path
) -> None:
    earlier = replace(publisher, pool_uid="earlier").envelope(SECOND, 8)
    StateFile(tmp_path / "policy.json").write(earlier.to_json())
    publisher.publish(FIRST, 1)
    async with a_follower(publisher, tmp_path) as follower:
        await until(lambda: follower.revision, "a policy")
        assert follower.revision == 1


@pytest.mark.usefixtures("rare_polls")
async def test_a_forged_policy_on_disk_is_not_used(publisher: Publisher, tmp_path: Path) -> None:
    StateFile(tmp_path / "policy.json").write(forged(publisher).to_json())
    async with a_follower(publisher, tmp_path) as follower:
        await until(lambda: publisher.subscribers() == 1, "a subscription")
        publisher.publish(FIRST, 1)
        await until(lambda: follower.revision, "a policy")
        assert follower.revision == 1


async def test_a_disk_that_is_full_or_read_only_does_not_stop_policies(
    publisher: Publisher, tmp_path: Path
) -> None:
    (tmp_path / "policy.json").mkdir()
    publisher.publish(FIRST, 1)
    async with a_follower(publisher, tmp_path) as follower:
        await until(lambda: follower.revision == 1, "revision 1")
        publisher.publish(SECOND, 2)
        await until(lambda: follower.revision == 2, "revision 2")
