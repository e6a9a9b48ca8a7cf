from __future__ import annotations

from tidegate_devcluster.container import BackOff


def test_waits_double_up_to_half_a_minute() -> None:
    back_off = BackOff()

    assert [back_off.after(0.1) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]


def test_a_minute_of_running_forgives_earlier_crashes() -> None:
    back_off = BackOff()
    for _ in range(5):
        back_off.after(59.9)

    assert back_off.after(60.0) == 1
    assert back_off.after(0.1) == 2
