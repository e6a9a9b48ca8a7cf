"""Rate limits while Redis can't be asked, and once it can again."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tidegate_devcluster.redis_server import RedisServer
from tidegate_engine.fleet.bucket import LocalBucket
from tidegate_engine.fleet.rates import FleetRates, Reservation
from tidegate_engine.fleet.size import FleetSize
from tidegate_engine.state_file import StateFile
from tidegate_policies.rules import RateRule
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.rates import Fleet, a_fleet, renew, taken

POLICY = a_snapshot(a_tenant(rate=RateRule(tokens_per_minute=600)))


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_server.url, socket_timeout=2)
    yield client
    await client.aclose()


def cut_off(fleet: Fleet, *, is_cut_off: bool = True) -> None:
    """Cut all engines off, or let them reach Redis again."""
    for store in fleet.stores.values():
        store.is_cut_off = is_cut_off


async def used(rates: FleetRates, tokens: int) -> int:
    """Reserve until it is refused."""
    total = 0
    while isinstance(await rates.reserve("acme", tokens), Reservation):
        total += tokens
    return total


# -- parts ----------------------------------------------------------------------------------------


async def test_an_engine_counts_all_of_the_pool_whether_they_have_traffic_or_not(
    redis: Redis,
) -> None:
    fleet = await a_fleet(redis)
    engines = [fleet.rates(f"engine-{number}") for number in range(4)]
    for rates in engines:
        rates.use_policy(POLICY)
    await renew(engines)
    await renew(engines)
    cut_off(fleet)
    await renew(engines)
    assert all(rates.is_alone for rates in engines)
    totals = [0, 0, 0, 0]
    for _ in range(60):
        fleet.elapsed += 1
        for number, rates in enumerate(engines):
            totals[number] += await used(rates, 5)
    assert totals == [150, 150, 150, 150]


async def test_a_limit_that_is_new_while_redis_is_away_is_divided_at_once(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    rates = fleet.rates("one")
    cut_off(fleet)
    await rates.renew()
    rates.use_policy(POLICY)
    assert await used(rates, 10) == 0
    assert fleet.stores["one"].num_calls == 0
    fleet.elapsed += 10
    assert await used(rates, 10) == 100


async def test_a_start_without_redis_knows_how_many_there_were(
    redis: Redis, tmp_path: Path
) -> None:
    file = StateFile(tmp_path / "engines")
    fleet = await a_fleet(redis)
    engines = [fleet.rates(name, FleetSize(file)) for name in ("one", "other")]
    await renew(engines)
    await renew(engines)
    cut_off(fleet)
    restarted = fleet.rates("restarted", FleetSize(file))
    fleet.stores["restarted"].is_cut_off = True
    await restarted.renew()
    restarted.use_policy(POLICY)
    fleet.elapsed += 10
    assert await used(restarted, 10) == 50


@pytest.mark.parametrize("text", ["", "no number", "0", "-3"])
def test_of_a_file_without_a_number_an_engine_is_the_only_one_it_knows(
    tmp_path: Path, text: str
) -> None:
    file = StateFile(tmp_path / "engines")
    assert FleetSize(file).num_engines == 1
    file.write(text)
    assert FleetSize(file).num_engines == 1


async def test_engines_that_leave_are_counted_until_that_is_sure() -> None:
    size = FleetSize()
    heard = []
    answers = [(4, 0), (1, 2), (2, 4), (4, 6), (3, 8), (3, 10), (3, 13), (3, 14), (5, 15)]
    for num_engines, now in answers:
        await size.note(num_engines, now=now, patience_seconds=6)
        heard.append(size.num_engines)
    assert heard == [4, 4, 4, 4, 4, 4, 4, 3, 5]
    await size.note(1, now=16, patience_seconds=6)
    size.note_silence()
    await size.note(1, now=100, patience_seconds=6)
    assert size.num_engines == 5


async def test_an_engine_that_died_is_not_counted_though_the_clock_was_set_back(
    redis: Redis,
) -> None:
    fleet = await a_fleet(redis)
    await renew([fleet.rates("dead"), fleet.rates("other")])
    store = fleet.stores["other"]
    await fleet.jump(-3600)
    assert await store.count_engines() == 2
    await fleet.wait(6.5)
    assert await store.count_engines() == 1


async def test_a_request_beyond_the_part_of_an_engine_passes_now_and_then(redis: Redis) -> None:
    fleet = await a_fleet(redis, per_minute=600, depth=600)
    one = fleet.bucket("one", num_engines=4)
    cut_off(fleet)
    passed = 0
    for _ in range(120):
        fleet.elapsed += 1
        passed += await one.reserve(200) == 0
    assert passed == pytest.approx(120 * 2.5 / 200, abs=1)  # a quarter of 10 a second


async def test_nobody_waits_for_redis_but_the_first(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    one, store = fleet.bucket("one"), fleet.stores
    cut_off(fleet)
    waits = await asyncio.gather(*(one.reserve(10) for _ in range(20)))
    assert min(waits) > 0
    assert store["one"].num_calls == 1
    await one.renew()
    assert store["one"].num_calls == 2


# -- afterwards -----------------------------------------------------------------------------------


async def test_what_was_used_without_asking_is_charged_however_often_that_failed(
    redis: Redis,
) -> None:
    fleet = await a_fleet(redis)
    one, other = fleet.bucket("one", num_engines=2), fleet.bucket("other")
    for engine in (one, other):
        assert await engine.reserve(300) == 0
    fleet.stores["one"].is_cut_off = True
    assert await one.reserve(1) > 0
    was_alone = [one.is_alone]
    fleet.elapsed += 10
    assert await taken(one, 10, times=20) == 5  # 10 s of half the limit
    await one.renew()
    await one.renew()
    fleet.stores["one"].is_cut_off = False
    await one.renew()
    assert [*was_alone, one.is_alone] == [True, False]
    await fleet.wait(1)
    assert await other.reserve(1) == pytest.approx(4.1)  # 50 used without asking, 10 flowed in


@pytest.mark.parametrize("is_emptied", [False, True])
@pytest.mark.parametrize(("per_second", "level"), [(3, 0), (1, 600)])
async def test_what_was_used_within_the_parts_is_charged_against_the_refill_of_the_time(
    redis: Redis, per_second: int, level: float, *, is_emptied: bool
) -> None:
    fleet = await a_fleet(redis)
    engines = [fleet.bucket(f"engine-{number}", num_engines=4) for number in range(4)]
    assert [await engine.reserve(10) for engine in engines] == [0, 0, 0, 0]
    cut_off(fleet)
    for _ in range(600):
        await fleet.wait(1)
        for engine in engines:
            await engine.reserve(per_second)
    if is_emptied:
        await fleet.forget_all()
    cut_off(fleet, is_cut_off=False)
    await renew(engines)
    assert await fleet.level() == pytest.approx(level, abs=30)
    assert await engines[0].reserve(1) < 1


async def test_who_saved_its_part_up_and_spends_it_at_last_has_spent_it(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    engines = [fleet.bucket(f"engine-{number}", num_engines=4) for number in range(4)]
    cut_off(fleet)
    for engine in engines:
        assert await engine.reserve(1) > 0
    await fleet.wait(600)
    assert [await taken(engine, 10, times=100) for engine in engines] == [15, 15, 15, 15]
    cut_off(fleet, is_cut_off=False)
    await renew(engines)
    assert await fleet.level() == pytest.approx(0, abs=1e-6)


async def test_what_one_engine_used_while_others_used_the_rest_is_debt(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    one, other = fleet.bucket("one", num_engines=2), fleet.bucket("other")
    assert await taken(one, 10, times=1) == 1
    assert await taken(other, 10, times=100) == 59
    await one.renew()
    fleet.stores["one"].is_cut_off = True
    used_apart = 0
    for _ in range(120):
        await fleet.wait(1)
        used_apart += 5 * await taken(one, 5, times=10)
        assert await taken(other, 10, times=10) == 1
        await other.renew()
    assert used_apart == pytest.approx(600, abs=10)
    fleet.stores["one"].is_cut_off = False
    await one.renew()
    assert await fleet.level() == pytest.approx(-used_apart, abs=20)


async def test_what_flowed_past_a_full_bucket_covers_what_was_used_apart_only_once(
    redis: Redis,
) -> None:
    fleet = await a_fleet(redis)
    apart = [fleet.bucket(name, num_engines=3) for name in ("one", "two")]
    third = fleet.bucket("third")
    for engine in (*apart, third):
        assert await engine.reserve(1) == 0
    for name in ("one", "two"):
        fleet.stores[name].is_cut_off = True
    total = 0
    for second in range(360):
        await fleet.wait(1)
        total += 5 * await taken(third, 5, times=1 + second % 2)
        for engine in apart:
            total += 5 * await taken(engine, 5, times=10)
        await third.renew()
    for name, engine in zip(("one", "two"), apart, strict=True):
        fleet.stores[name].is_cut_off = False
        await engine.renew()
    assert total > 600 + 3600
    assert await fleet.level() == pytest.approx(600 + 3600 - total, abs=30)


async def test_of_limits_that_nobody_used_meanwhile_redis_is_not_asked(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    rates, store = fleet.rates("one"), fleet.stores
    rates.use_policy(POLICY)
    cut_off(fleet)
    await rates.renew()
    cut_off(fleet, is_cut_off=False)
    await rates.renew()
    assert not rates.is_alone
    assert store["one"].num_calls == 0


# -- lost answers ---------------------------------------------------------------------------------


async def lose_answers(fleet: Fleet, bucket: LocalBucket, *, times: int) -> None:
    fleet.stores["one"].loses_answers = True
    for _ in range(times):
        await bucket.renew()
    fleet.stores["one"].loses_answers = False


async def test_what_was_spent_is_charged_once_however_often_the_answer_is_lost(
    redis: Redis,
) -> None:
    fleet = await a_fleet(redis)
    one, other = fleet.bucket("one"), fleet.bucket("other")
    assert await one.reserve(300) == 0
    await lose_answers(fleet, one, times=3)
    await fleet.wait(20)
    assert await other.reserve(500) == 0  # 200 flowed in; what `one` had leased is known as dead
    await one.renew()
    assert await fleet.level() == pytest.approx(0)


async def test_what_comes_back_is_credited_once_however_often_the_answer_is_lost(
    redis: Redis,
) -> None:
    fleet = await a_fleet(redis)
    one = fleet.bucket("one")
    assert await one.reserve(600) == 0
    await one.renew()
    one.give_back(300)
    await lose_answers(fleet, one, times=3)
    await one.renew()
    assert await taken(one, 10, times=100) == 30


async def test_what_was_leased_by_a_lost_answer_returns(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    one, other = fleet.bucket("one"), fleet.bucket("other")
    fleet.stores["one"].loses_answers = True
    assert await one.reserve(600) > 0
    fleet.stores["one"].loses_answers = False
    assert await other.reserve(600) > 0
    assert await one.reserve(600) > 0
    await one.reserve(1)
    await one.renew()
    await one.renew()
    assert await other.reserve(590) == 0


async def test_a_caller_that_leaves_while_redis_is_asked_is_charged_nothing(
    redis: Redis,
) -> None:
    fleet = await a_fleet(redis)
    one = fleet.bucket("one")
    assert await one.reserve(300) == 0
    store = fleet.stores["one"]
    asked, real = asyncio.Event(), store.lease

    async def held_up(*what: object) -> object:
        await real(*what)  # type: ignore[arg-type]
        asked.set()
        return await asyncio.Event().wait()

    for _ in range(3):
        asked.clear()
        store.lease = held_up  # type: ignore[method-assign, assignment]
        leaving = asyncio.create_task(one.reserve(200))
        await asked.wait()
        leaving.cancel()
        await asyncio.wait({leaving})
        store.lease = real  # type: ignore[method-assign]
    assert await taken(one, 10, times=100) == 30
