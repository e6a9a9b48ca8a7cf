import asyncio

from tidegate_engine.server.caller import Caller
from tidegate_engine.server.intake import ENCODE_INLINE_CHARS, Intake, take_completion
from tidegate_engine.server.schema import CompletionBody
from tidegate_engine.server.served_model import ServedModel
from tidegate_testing.engines import MODEL, HeldTokenizer, a_served_model

MOST_ASYNCIO_THREADS = 32
CALLER = Caller(tenant="acme", request_id="g", arrived_at=0.0, ttft_seconds=0.25)


async def take(model: ServedModel, **fields: object) -> Intake:
    body = CompletionBody.model_validate({"model": MODEL, **fields})
    return await take_completion(body, caller=CALLER, model=model)


async def test_choices_share_their_prompt() -> None:
    intake = await take(a_served_model(), prompt=["Hello", "Bye"], n=2)
    hello, again, bye, _ = (request.prompt_ids for request in intake.requests)
    assert hello is again
    assert (len(hello), len(bye)) == (5, 3)


async def test_every_choice_is_its_callers_and_as_urgent() -> None:
    intake = await take(a_served_model(), prompt="Hello", n=2)
    assert [request.request_id for request in intake.requests] == ["g.0", "g.1"]
    assert {request.tenant for request in intake.requests} == {"acme"}
    assert {request.ttft_seconds for request in intake.requests} == {0.25}


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
