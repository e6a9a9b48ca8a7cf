import asyncio

import pytest

from tidegate_engine.core.sampling import SamplingParams
from tidegate_engine.model.bytes_tokenizer import END_TOKEN_ID
from tidegate_engine.server.caller import Caller
from tidegate_engine.server.errors import ApiError
from tidegate_engine.server.intake import (
    ENCODE_INLINE_CHARS,
    MAX_WHOLE_LOGPROBS,
    Intake,
    take_completion,
)
from tidegate_engine.server.schema import CompletionBody
from tidegate_engine.server.served_model import ServedModel
from tidegate_testing.engines import MODEL, HeldTokenizer, a_served_model

MOST_ASYNCIO_THREADS = 32
CALLER = Caller(tenant="acme", request_id="g", arrived_at=2.5, ttft_seconds=0.25)


async def take(model: ServedModel, **fields: object) -> Intake:
    body = CompletionBody.model_validate({"model": MODEL, **fields})
    return await take_completion(body, caller=CALLER, model=model)


async def test_choices_share_their_prompt() -> None:
    intake = await take(a_served_model(), prompt=["Hello", "Bye"], n=2)
    hello, again, bye, _ = (request.prompt_ids for request in intake.requests)
    assert hello is again
    assert (len(hello), len(bye)) == (5, 3)


async def test_every_choice_is_its_callers_came_with_it_and_is_as_urgent() -> None:
    intake = await take(a_served_model(), prompt="Hello", n=2)
    assert [request.request_id for request in intake.requests] == ["g.0", "g.1"]
    assert {request.tenant for request in intake.requests} == {"acme"}
    assert {request.ttft_seconds for request in intake.requests} == {0.25}
    assert {request.arrived_at for request in intake.requests} == {2.5}
    assert {request.generation_id for request in intake.requests} == {"g"}


async def test_what_is_said_reaches_the_sampler_and_the_rest_is_as_openai_has_it() -> None:
    said = {
        "temperature": 0.5,
        "min_p": 0.1,
        "top_k": 7,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "min_tokens": 3,
        "seed": 5,
        "logprobs": 20,
    }
    intake = await take(a_served_model(), prompt="Hello", logit_bias={"9": 1, "3": -2.5}, **said)
    expected = SamplingParams(logit_bias=((3, -2.5), (9, 1.0)), **said)  # type: ignore[arg-type]
    assert intake.requests[0].sampling == expected
    unsaid = (await take(a_served_model(), prompt="Hello")).requests[0].sampling
    assert unsaid == SamplingParams(seed=unsaid.seed)


async def test_the_answer_ends_with_the_models_own_end_and_with_the_clients_tokens() -> None:
    model = a_served_model()
    both = await take(model, prompt="Hello", stop_token_ids=[7, 3, 7])
    own = await take(model, prompt="Hello", stop_token_ids=[7], ignore_eos=True)
    assert both.requests[0].stop_token_ids == (3, 7, END_TOKEN_ID)
    assert own.requests[0].stop_token_ids == (7,)


async def test_a_seed_gives_every_choice_another_one_each_time_the_same() -> None:
    first, again = [
        [r.sampling.seed for r in (await take(a_served_model(), prompt="a", n=3, seed=4)).requests]
        for _ in range(2)
    ]
    assert first == again
    assert first[0] == 4
    assert len(set(first)) == 3


async def test_equal_prompts_of_a_request_draw_numbers_of_their_own() -> None:
    taken = await take(a_served_model(), prompt=["a"] * 3, n=2, seed=4)
    seeds = [request.sampling.seed for request in taken.requests]
    assert seeds[0] == 4
    assert len(set(seeds)) == 6


async def test_what_a_whole_answer_may_hold_of_log_probabilities_is_bounded() -> None:
    model = a_served_model()
    most = MAX_WHOLE_LOGPROBS // (4 * 16)
    for fields in ({"logprobs": 15}, {"logprobs": 15, "stream": True}, {}):
        await take(model, prompt="a", n=4, max_tokens=most, **fields)
        if fields.get("stream") or not fields:
            await take(model, prompt="a", n=4, max_tokens=2 * most, **fields)
    with pytest.raises(ApiError, match=str(MAX_WHOLE_LOGPROBS)) as caught:
        await take(model, prompt="a", n=4, max_tokens=most + 1, logprobs=15)
    assert (caught.value.status, caught.value.code) == (400, "too_many_logprobs")
    assert caught.value.param == "logprobs"


async def test_prompts_take_no_thread_from_the_rest_of_the_engine() -> None:
    tokenizer = HeldTokenizer()
    model = a_served_model(tokenizer=tokenizer)
    prompt = "x" * (ENCODE_INLINE_CHARS + 1)
    encoding = [
        asyncio.create_task(take(model, prompt=prompt)) for _ in range(MOST_ASYNCIO_THREADS)
    ]
    try:
        await asyncio.sleep(0)  # all of them are on their way now
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), timeout=5) == "free"
        assert not any(task.done() for task in encoding)
    finally:
        tokenizer.released.set()
        await asyncio.gather(*encoding)
