from tidegate_policies.admission import Watermark, WatermarkGate
from tidegate_policies.snapshot import WatermarkRule


def test_the_gate_follows_usage_and_red_lasts_down_to_the_low_watermark() -> None:
    gate = WatermarkGate(WatermarkRule(low_percent=50, high_percent=90), num_blocks=100)
    seen = [gate.observe(used) for used in (0, 49, 50, 89, 90, 60, 51, 50, 49)]
    green, yellow, red = Watermark.GREEN, Watermark.YELLOW, Watermark.RED
    assert seen == [green, green, yellow, yellow, red, red, red, yellow, green]


def test_in_a_small_pool_the_levels_stay_apart() -> None:
    gate = WatermarkGate(WatermarkRule(low_percent=80, high_percent=81), num_blocks=50)
    assert [gate.observe(used) for used in (40, 41)] == [Watermark.YELLOW, Watermark.RED]


def test_a_changed_rule_counts_from_the_next_look_on() -> None:
    gate = WatermarkGate(WatermarkRule(low_percent=50, high_percent=90), num_blocks=100)
    assert gate.observe(60) is Watermark.YELLOW
    gate.apply_rule(WatermarkRule(low_percent=70, high_percent=90))
    assert gate.observe(60) is Watermark.GREEN
