from collections import Counter
from dataclasses import replace

import pytest

from tidegate_cli.bench.batching import load_trace
from tidegate_cli.bench.isolation_load import PATIENCE, Label, Traffic
from tidegate_cli.bench.isolation_plan import (
    HANGS_UP,
    HUGE,
    MISBEHAVIOURS,
    NEVER_READS,
    QUEUED,
    ROGUE,
    beside_rogue,
    misbehave,
    overloaded,
    shedding,
)
from tidegate_cli.bench.isolation_policy import side_of
from tidegate_cli.bench.isolation_side import TIDEGATE
from tidegate_cli.bench.isolation_simulated import SCALE
from tidegate_cli.bench.isolation_torch import OUTPUT_P95, PROMPT_P95, shortened
from tidegate_cli.traces import summarize_lengths

RECORDED = load_trace("azure2023_conv", None)
GOLD = Label(tenant="gold", tier="gold", load=0.5, ttft_seconds=1.0)
OTHER = replace(GOLD, tenant="other", load=1.0)


def test_a_tenant_sends_the_same_whatever_the_others_do() -> None:
    traffic = Traffic(RECORDED, seed=1)

    alone = traffic.plan([GOLD], capacity=100.0, seconds=10.0)
    together = traffic.plan([GOLD, OTHER], capacity=100.0, seconds=10.0)

    assert [one for one in together if one.tenant == "gold"] == alone
    assert together == sorted(together, key=lambda one: one.at_seconds)


def test_each_tenant_asks_for_its_load_with_the_records_lengths() -> None:
    plan = Traffic(RECORDED, seed=1).plan([GOLD, OTHER], capacity=100.0, seconds=60.0)

    sent = Counter(one.tenant for one in plan)
    assert sent["gold"] == pytest.approx(3000, rel=0.1)
    assert sent["other"] == pytest.approx(6000, rel=0.1)
    lengths = {(one.prompt_tokens, one.output_tokens) for one in RECORDED}
    assert {(one.prompt_tokens, one.output_tokens) for one in plan} <= lengths
    assert len({one.request_id for one in plan}) == len(plan)
    assert {one.patience_seconds for one in plan} == {PATIENCE * 1.0}


def test_the_front_door_spreads_requests_over_all_engines() -> None:
    plan = Traffic(RECORDED, seed=1).plan([OTHER], capacity=100.0, seconds=40.0)

    shares = Counter(one.door % 8 for one in plan)
    assert len(shares) == 8
    assert max(shares.values()) < 1.3 * min(shares.values())


def test_another_seed_begins_elsewhere_in_the_record() -> None:
    first, other = (
        Traffic(RECORDED, seed=seed).plan([GOLD], capacity=100.0, seconds=5.0) for seed in (1, 2)
    )

    assert [one.prompt_tokens for one in first[:20]] != [one.prompt_tokens for one in other[:20]]


def test_all_together_ask_for_four_times_the_capacity() -> None:
    assert sum(label.load for label in overloaded(SCALE)) == pytest.approx(4.0)


def test_beside_the_one_that_misbehaves_nobody_asks_for_more_than_there_is() -> None:
    scale = replace(SCALE, quantum_tokens=3)
    labels = beside_rogue(scale)

    assert labels[-1].tenant == ROGUE
    assert sum(label.load for label in labels) < 1.0
    rules = side_of(TIDEGATE, labels, itl_seconds=None).policy.tenants
    limits = {(rule.tier, rule.max_running) for rule in rules}
    assert limits == {("gold", None), ("silver", SCALE.max_running)}
    assert all(rule.kv_nominal_percent for rule in rules)
    both = [*rules, *side_of(TIDEGATE, overloaded(scale), itl_seconds=None).policy.tenants]
    others = [rule for rule in both if rule.tier != "gold"]
    assert {rule.preemption.min_quantum_tokens for rule in others} == {3}
    assert sum(label.load for label in shedding(SCALE, load=1.5)) == pytest.approx(1.5)


@pytest.mark.parametrize("way", MISBEHAVIOURS)
def test_misbehaviour_is_the_rogues_alone_and_begins_when_it_is_counted(way: str) -> None:
    rogue = beside_rogue(SCALE)[-1]
    scale = replace(SCALE, queued=500, queued_choices=5)

    sent = misbehave(
        way,
        traffic=Traffic(RECORDED, seed=1),
        scale=scale,
        rogue=rogue,
        capacity=20.0,
        seed=1,
    )

    assert {one.tenant for one in sent} == {ROGUE}
    assert min(one.at_seconds for one in sent) >= scale.lead_in_seconds
    if way == QUEUED:
        assert {one.at_seconds for one in sent} == {scale.lead_in_seconds}
        assert sum(one.choices for one in sent) == pytest.approx(500, rel=0.2)
    if way == HUGE:
        assert {one.prompt_tokens for one in sent} == {scale.huge_prompt_tokens}
    if way == HANGS_UP:
        assert all(one.leaves_after_seconds is not None for one in sent)
    if way == NEVER_READS:
        assert not any(one.is_read for one in sent)


def test_a_record_is_shortened_by_one_factor_for_each_side_and_its_lengths_shuffled() -> None:
    short, factors = shortened(RECORDED, seed=1)
    other, _ = shortened(RECORDED, seed=2)

    lengths = summarize_lengths(short)
    assert (lengths.prompt_p95, lengths.output_p95) == (PROMPT_P95, OUTPUT_P95)
    assert [one.at_seconds for one in short] == [one.at_seconds for one in RECORDED]
    in_order = [
        (
            max(1, round(one.prompt_tokens * factors["prompt_factor"])),
            max(1, round(one.output_tokens * factors["output_factor"])),
        )
        for one in RECORDED
    ]
    drawn, drawn_anew = (
        [(one.prompt_tokens, one.output_tokens) for one in record] for record in (short, other)
    )
    assert Counter(drawn) == Counter(drawn_anew) == Counter(in_order)
    assert len({tuple(lengths[:20]) for lengths in (drawn, drawn_anew, in_order)}) == 3
