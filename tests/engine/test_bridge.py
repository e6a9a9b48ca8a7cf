from tidegate_engine.bridge import engine_stats
from tidegate_testing.control import until
from tidegate_testing.engines import a_running_engine
from tidegate_testing.scheduling import a_request


async def test_a_count_that_nobody_waited_for_is_the_next_ones_last() -> None:
    with a_running_engine() as running:
        engine = running.service.engine
        engine.submit(a_request(output=10_000, request_id="long")).result()
        running.gate.shut()
        before = engine.last_stats
        assert await engine_stats(engine, patience_seconds=0.01) is before
        running.gate.open()
        await until(lambda: engine.last_stats.scheduler.running == 1, "a newer count")
