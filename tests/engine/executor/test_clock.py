import time

from tidegate_engine.executor.clock import VirtualClock, WallClock


def test_virtual_time_passes_when_it_is_told_to() -> None:
    clock = VirtualClock(now=5.0)
    clock.advance(3600.0)
    assert clock.now() == 3605.0
    clock.advance_to(4000.0)
    assert clock.now() == 4000.0


def test_virtual_time_never_goes_back() -> None:
    clock = VirtualClock(now=5.0)
    clock.advance(-1.0)
    clock.advance_to(4.0)
    assert clock.now() == 5.0


def test_wall_time_passes_by_itself_and_advancing_sleeps() -> None:
    clock = WallClock()
    began, outside = clock.now(), time.monotonic()
    clock.advance(0.01)
    clock.advance(-1.0)
    assert 0.01 <= clock.now() - began <= time.monotonic() - outside + 0.01
