"""A long prompt neither holds a short one up nor makes running decodes miss their target.

On an H100 with Llama-3.1-8B, as the roofline model has it.
"""

from itertools import pairwise

import pytest

from tidegate_policies.rules import ServiceRule
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import (
    Simulation,
    a_prompt,
    a_simulation,
    an_h100_with_llama_8b,
    quantile,
)

ITL_SECONDS = 0.030
LONG_PROMPT, SHORT_PROMPT = 32 * 1024, 64
LATER_SECONDS = 0.1


def serve(num_decodes: int) -> Simulation:
    """Let A's long prompt come while others decode, and B's short one 100 ms later."""
    promised = ServiceRule(itl_seconds=ITL_SECONDS)
    engine = an_h100_with_llama_8b(
        a_snapshot(a_tenant("a"), a_tenant("b"), a_tenant("chat", service=promised))
    )
    for number in range(num_decodes):
        prompt = a_prompt(number + 100, 128 + 4 * number)
        engine.accept(a_request("chat", prompt=prompt, output=600, request_id=f"chat{number}"))
    while not all(engine.output(f"chat{number}") for number in range(num_decodes)):
        engine.step()
    prompt = a_prompt(1, LONG_PROMPT)
    engine.accept(a_request("a", prompt=prompt, output=4, request_id="long"))
    engine.run_until(engine.clock.now() + LATER_SECONDS)
    prompt = a_prompt(2, SHORT_PROMPT)
    engine.accept(a_request("b", prompt=prompt, output=4, request_id="short"))
    return engine


@pytest.mark.parametrize("num_decodes", [1, 32, 128])
def test_a_short_prompt_behind_a_long_one_has_its_first_token_by_the_second_step(
    num_decodes: int,
) -> None:
    engine = serve(num_decodes)
    assert not engine.output("long"), "the long prompt isn't in the way any more"
    engine.steps(2)
    assert engine.output("short")
    assert not engine.output("long")


@pytest.mark.parametrize("num_decodes", [1, 32, 128])
def test_running_decodes_keep_their_target_beside_a_long_prompt(num_decodes: int) -> None:
    engine = serve(num_decodes)
    came_at = engine.log.requests["long"].arrived_at
    while not engine.output("long"):
        engine.step()
    for number in range(num_decodes):
        trace = engine.log.requests[f"chat{number}"]
        assert not trace.is_finished, "it did not decode all the time"
        times = [time for time in trace.token_times if time >= came_at]
        gaps = [after - before for before, after in pairwise(times)]
        assert quantile(gaps, 0.99) <= ITL_SECONDS
    engine.drain()
    everything = [gap for trace in engine.log.requests.values() for gap in trace.itl_seconds]
    assert quantile(everything, 0.99) <= ITL_SECONDS


def test_a_huge_prompt_stands_still_until_others_have_had_as_much() -> None:
    engine = a_simulation(
        a_snapshot(a_tenant("huge"), a_tenant("modest")), blocks=1000, max_batched_tokens=100
    )
    engine.arrive("all", tenant="huge", blocks=400, output=4)
    engine.steps(10)
    for number in range(5):
        engine.arrive(f"m{number}", tenant="modest", blocks=13, output=4)

    plans = []
    while not all(engine.output(f"m{number}") for number in range(5)):
        plans.append(engine.step())

    read = sum(row.end - row.start for p in plans for row in p.rows if row.request_id == "all")
    assert read < 500  # what the others leave of their steps; an equal part would be 1400
    assert any(row.request_id == "all" for row in engine.step().rows)
