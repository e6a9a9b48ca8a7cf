"""The token counts of a response, with what the prefix cache had of its prompts."""

import asyncio

from openai import AsyncOpenAI
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam

from tidegate_testing.engines import (
    BLOCK_SIZE,
    MODEL,
    RunningEngine,
    a_keyed_tenant,
    a_running_engine,
    key_of,
)
from tidegate_testing.policies import a_snapshot

PROMPT = "".join(chr(ord("a") + i % 26) for i in range(5 * BLOCK_SIZE + 3))


def cached(usage: CompletionUsage | None) -> int | None:
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens


def test_what_was_found_in_the_prefix_cache_is_told() -> None:
    with a_running_engine() as engine:
        completions = engine.openai().completions
        first = completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
        second = completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
        other = completions.create(model=MODEL, prompt=PROMPT[1:], max_tokens=1)
        assert [cached(answer.usage) for answer in (first, second, other)] == [0, 80, 0]
        assert second.usage is not None
        assert second.usage.prompt_tokens == len(PROMPT)
        assert engine.sample("tidegate_tokens_total", tenant="acme", kind="cached") == 80


def test_a_stream_tells_it_in_its_last_chunk() -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]
    with a_running_engine() as engine:
        for expected in (0, 96):
            *_, last = engine.openai().chat.completions.create(
                model=MODEL,
                messages=messages,
                max_completion_tokens=2,
                stream=True,
                stream_options={"include_usage": True},
            )
            assert cached(last.usage) == expected


def test_every_prompt_counts_once_however_many_choices_it_has() -> None:
    with a_running_engine() as engine:
        completions = engine.openai().completions
        completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
        fresh = "0" * (2 * BLOCK_SIZE)
        answer = completions.create(model=MODEL, prompt=[PROMPT, fresh], n=3, max_tokens=1)
        assert cached(answer.usage) == 80
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(PROMPT) + len(fresh)
        assert answer.usage.completion_tokens == 6


def test_another_tenant_finds_nothing() -> None:
    policy = a_snapshot(a_keyed_tenant("acme"), a_keyed_tenant("zeta"))
    with a_running_engine(policy) as engine:
        for tenant, expected in (("acme", 0), ("zeta", 0), ("acme", 80)):
            completions = engine.openai(tenant).completions
            answer = completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
            assert cached(answer.usage) == expected


async def test_the_asynchronous_client_gets_the_same_answers(engine: RunningEngine) -> None:
    async with AsyncOpenAI(
        base_url=f"{engine.base_url}/v1", api_key=key_of("acme"), max_retries=0
    ) as client:

        async def read_stream(seed: int) -> str:
            stream = await client.completions.create(
                model=MODEL, prompt="Hello", max_tokens=9, seed=seed, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        streamed = await asyncio.gather(*(read_stream(seed) for seed in range(8)))
        whole = [
            await client.completions.create(model=MODEL, prompt="Hello", max_tokens=9, seed=seed)
            for seed in range(8)
        ]
        assert [answer.choices[0].text for answer in whole] == streamed
        assert len(set(streamed)) == 8
        assert [model.id async for model in client.models.list()] == [MODEL]
