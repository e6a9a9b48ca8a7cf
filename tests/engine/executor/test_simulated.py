from tidegate_engine.core.plan import StepPlan
from tidegate_engine.executor.simulated import StepCost
from tidegate_testing.models import plan_row


def test_a_step_costs_what_its_rows_are() -> None:
    cost = StepCost(step_seconds=100, prefill_token_seconds=10, decode_seconds=1)
    decodes = (plan_row([5], [0], start=4, is_decode=True), plan_row([6], [1], is_decode=True))
    chunks = (plan_row([1, 2, 3], [2]), plan_row([7], [3], samples=False))
    plan = StepPlan(step=1, revision=1, rows=decodes + chunks)
    assert cost.of(plan) == 100 + 4 * 10 + 2 * 1
