"""Delivery over a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from tidegate_devcluster.redis_server import RedisServer
from tidegate_operator.compiler import CompiledPool, compile_pool
from tidegate_operator.delivery import ContestedRevisionError, Delivery
from tidegate_operator.keys import generate_signing_key, public_key_text, signer, verifier
from tidegate_policies.change import LinedPolicy, PolicyChange
from tidegate_policies.envelope import Envelope, Sign, Verify, unseal
from tidegate_policies.snapshot import text_digest
from tidegate_policies.wire import envelope_key, wake_channel
from tidegate_testing.objects import a_tenant_policy, a_view, an_engine_pool

pytestmark = pytest.mark.cluster

POOL = "team/chat"


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_server.url) as connection:
        await connection.delete(envelope_key(POOL))
        yield connection


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Sign, Verify]:
    key = generate_signing_key(tmp_path / "key.pem")
    return signer(key), verifier(public_key_text(key))


@pytest.fixture
def sign(keys: tuple[Sign, Verify]) -> Sign:
    return keys[0]


def a_compiled(weight: int = 1, *, uid: str = "uid") -> CompiledPool:
    pool = an_engine_pool()
    metadata = pool.metadata.model_copy(update={"uid": uid})
    pool = pool.model_copy(update={"metadata": metadata})
    return compile_pool(a_view(pool, a_tenant_policy(weight=weight)), pool)


async def stored_envelope(redis: Redis) -> Envelope:
    text = await cast("Awaitable[bytes]", redis.hget(envelope_key(POOL), "envelope"))
    return Envelope.from_json(text)


async def test_stored_envelope_is_what_engines_take(
    redis: Redis, keys: tuple[Sign, Verify]
) -> None:
    compiled = a_compiled()
    async with redis.pubsub(ignore_subscribe_messages=True) as pubsub:
        await pubsub.subscribe(wake_channel(POOL))
        published, is_new = await Delivery(redis, keys[0]).publish(compiled, {})
        message = await anext(pubsub.listen())
    assert (published.revision, is_new) == (1, True)
    assert message["data"] == b"1"
    envelope = await stored_envelope(redis)
    snapshot = unseal(envelope, pool=POOL, newer_than=0, verify=keys[1])
    assert snapshot == compiled.snapshot


async def test_equal_policy_makes_no_new_revision_even_after_a_restart(
    redis: Redis, sign: Sign
) -> None:
    await Delivery(redis, sign).publish(a_compiled(), {})
    before = await stored_envelope(redis)
    delivery = Delivery(redis, sign)
    for _ in range(2):
        published, is_new = await delivery.publish(a_compiled(), {})
        assert (published.revision, is_new) == (1, False)
    assert await stored_envelope(redis) == before


async def test_changed_policy_is_the_next_revision(redis: Redis, sign: Sign) -> None:
    delivery = Delivery(redis, sign)
    revisions = [
        (await delivery.publish(a_compiled(weight), {}))[0].revision for weight in (1, 2, 1)
    ]
    assert revisions == [1, 2, 3]


async def test_next_revision_is_beyond_all_that_anybody_knows(redis: Redis, sign: Sign) -> None:
    seen = {"status": (5, "x"), "engine a": (9, "y")}
    published, _ = await Delivery(redis, sign).publish(a_compiled(), seen)
    assert published.revision == 10


async def test_emptied_redis_gets_the_same_envelope_again(redis: Redis, sign: Sign) -> None:
    delivery = Delivery(redis, sign)
    await delivery.publish(a_compiled(), {})
    before = await stored_envelope(redis)
    await redis.delete(envelope_key(POOL))
    published, _ = await delivery.publish(a_compiled(), {"engine a": (1, before.digest)})
    assert published.revision == 1
    assert await stored_envelope(redis) == before


async def test_recreated_pool_goes_on_counting(redis: Redis, sign: Sign) -> None:
    delivery = Delivery(redis, sign)
    await delivery.publish(a_compiled(uid="first"), {})
    published, _ = await delivery.publish(a_compiled(uid="second"), {})
    assert published.revision == 2
    assert (await stored_envelope(redis)).pool_uid == "second"


async def test_policy_signed_with_another_key_is_signed_anew(
    redis: Redis, sign: Sign, tmp_path: Path
) -> None:
    other = signer(generate_signing_key(tmp_path / "other.pem"))
    await Delivery(redis, other).publish(a_compiled(), {})
    published, _ = await Delivery(redis, sign).publish(a_compiled(), {})
    assert published.revision == 2


@pytest.mark.parametrize(
    "junk",
    [
        {"revision": "many"},
        {"revision": "1e3"},
        {"revision": "3", "digest": "d"},
        {"revision": "3"},
        {"revision": "3", "digest": "d", "envelope": "none"},
    ],
)
async def test_junk_in_redis_is_replaced(redis: Redis, sign: Sign, junk: dict[str, str]) -> None:
    for field, value in junk.items():
        await redis.hset(envelope_key(POOL), field, value)
    await Delivery(redis, sign).publish(a_compiled(), {})
    assert (await stored_envelope(redis)).digest == a_compiled().snapshot.digest


async def test_slower_of_two_operators_never_goes_back(redis: Redis, sign: Sign) -> None:
    slow, fast = Delivery(redis, sign), Delivery(redis, sign)
    await slow.publish(a_compiled(1), {})
    for weight in (2, 3, 4):
        await fast.publish(a_compiled(weight), {})
    published, _ = await slow.publish(a_compiled(5), {})
    assert published.revision == 5
    assert (await stored_envelope(redis)).digest == a_compiled(5).snapshot.digest


async def test_writer_that_always_loses_says_so(redis: Redis, sign: Sign) -> None:
    class Unlucky(Delivery):
        async def _try_store(self, envelope: Envelope, policy: LinedPolicy) -> bool:
            await redis.hset(envelope_key(POOL), "revision", str(envelope.revision + 1))
            return await super()._try_store(envelope, policy)

    with pytest.raises(ContestedRevisionError, match="team/chat"):
        await Unlucky(redis, sign).publish(a_compiled(), {})


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_engines_are_told_what_has_changed_since_the_revision_before(
    redis: Redis, keys: tuple[Sign, Verify], *, is_restarted: bool
) -> None:
    sign, verify = keys
    delivery = Delivery(redis, sign)
    first, second = a_compiled(1), a_compiled(2)
    async with redis.pubsub(ignore_subscribe_messages=True) as pubsub:
        await pubsub.subscribe(wake_channel(POOL))
        await delivery.publish(first, {})
        if is_restarted:
            delivery = Delivery(redis, sign)
        await delivery.publish(second, {})
        messages = [await next_message(pubsub) for _ in range(2)]

    assert messages[0] == b"1"
    change = PolicyChange.from_json(messages[1])
    reached = LinedPolicy.of(first.snapshot).changed_by(change)
    assert reached.snapshot == second.snapshot
    stored = await stored_envelope(redis)
    assert replace(change.envelope, body=reached.text) == stored
    unseal(stored, pool=POOL, newer_than=1, verify=verify)


async def test_policy_that_cannot_be_read_any_more_is_replaced(redis: Redis, sign: Sign) -> None:
    unsigned = Envelope(
        pool=POOL,
        pool_uid="uid",
        revision=3,
        digest=text_digest("{}"),
        issued_at="2026-01-01T00:00:00Z",
        body="{}",
    )
    sealed = replace(unsigned, signature=sign(unsigned.message()))
    await redis.hset(
        envelope_key(POOL),
        mapping={
            "revision": sealed.revision,
            "digest": sealed.digest,
            "pool_uid": sealed.pool_uid,
            "envelope": sealed.to_json(),
        },
    )
    published, _ = await Delivery(redis, sign).publish(a_compiled(), {})
    assert published.revision == 4
    assert (await stored_envelope(redis)).digest == a_compiled().snapshot.digest


async def next_message(pubsub: PubSub) -> bytes:
    async with asyncio.timeout(10):
        while (found := await pubsub.get_message(timeout=1.0)) is None:
            continue
    data: bytes = found["data"]
    return data
