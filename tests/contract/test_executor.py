"""What every executor promises to the scheduler, whatever it computes with."""

from tidegate_engine.executor.base import Executor
from tidegate_policies.snapshot import WatermarkRule
from tidegate_testing.policies import a_snapshot
from tidegate_testing.scheduling import Run, a_request, a_scheduler

PROMPTS = [(5, 9, 2, 7), (11, 3, 3, 8, 1, 4, 6, 2, 9), (42,), tuple(range(1, 24))]
WIDE = a_snapshot(watermarks=WatermarkRule(low_percent=98, high_percent=99))


def outputs(executor: Executor, *prompts: tuple[int, ...], **sizes: int) -> list[list[int]]:
    return outputs_and_preemptions(executor, *prompts, **sizes)[0]


def outputs_and_preemptions(
    executor: Executor, *prompts: tuple[int, ...], **sizes: int
) -> tuple[list[list[int]], int]:
    """Run the prompts together; return their outputs and how often one was preempted."""
    capacity = executor.capacity
    sizes = {"blocks": capacity.num_blocks, **sizes}
    scheduler = a_scheduler(WIDE, block_size=capacity.block_size, **sizes)
    run = Run(scheduler=scheduler, executor=executor)
    requests = [a_request(prompt=prompt, output=12) for prompt in prompts]
    run.submit(*requests)
    run.drain()
    preemptions = sum(len(plan.preempted) for plan in run.plans)
    return [run.outputs[request.request_id] for request in requests], preemptions


def test_the_output_does_not_depend_on_the_neighbours(executor: Executor) -> None:
    together = outputs(executor, *PROMPTS)
    assert together == [outputs(executor, prompt)[0] for prompt in PROMPTS]


def test_the_output_does_not_depend_on_the_chunk_size(executor: Executor) -> None:
    whole = outputs(executor, *PROMPTS)
    assert outputs(executor, *PROMPTS, max_batched_tokens=8) == whole


def test_the_output_survives_preemption(executor: Executor) -> None:
    undisturbed = outputs(executor, *PROMPTS)
    disturbed, preemptions = outputs_and_preemptions(executor, *PROMPTS, blocks=9)
    assert preemptions > 0
    assert disturbed == undisturbed


def test_the_output_does_not_depend_on_what_the_blocks_held_before(executor: Executor) -> None:
    first = outputs(executor, PROMPTS[0])
    outputs(executor, *PROMPTS[1:])
    assert outputs(executor, PROMPTS[0]) == first


def test_every_sampling_row_gets_exactly_one_token(executor: Executor) -> None:
    capacity = executor.capacity
    scheduler = a_scheduler(
        WIDE, blocks=capacity.num_blocks, block_size=capacity.block_size, max_batched_tokens=8
    )
    for prompt in PROMPTS:
        scheduler.submit(a_request(prompt=prompt, output=3), 0.0)
    while scheduler.has_work:
        plan = scheduler.plan_step(0.0)
        result = executor.execute(plan)
        assert set(result.tokens) == {row.request_id for row in plan.rows if row.samples}
        scheduler.commit_step(plan, result, 0.0)
