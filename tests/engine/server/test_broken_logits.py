"""A request whose logits are no numbers fails alone, and leaves nothing behind."""

from collections.abc import Iterator
from dataclasses import replace

import openai
import pytest
import torch

from tidegate_testing.engines import MODEL, RunningEngine, a_running_engine, a_served_model
from tidegate_testing.executors import a_torch_executor
from tidegate_testing.models import TINY, one_torch_thread, tiny_model

__all__ = ["one_torch_thread"]
PROMPT = [7, 100, 33, 250, 61]
BROKEN_TOKEN = 99


@pytest.fixture
def tiny() -> Iterator[RunningEngine]:
    """An engine whose model has no numbers for one of its tokens."""
    model = tiny_model(replace(TINY, has_tied_embeddings=False))
    model.weights.embedding[BROKEN_TOKEN] = torch.nan
    served = a_served_model(max_context_tokens=TINY.max_context_tokens)
    with a_running_engine(executor=a_torch_executor(model), model=served) as running:
        yield running


def test_it_gets_an_error_and_its_neighbour_the_answer_that_it_would_have(
    tiny: RunningEngine,
) -> None:
    client = tiny.openai()

    def answer() -> str:
        completion = client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=30,
            seed=4,
            logit_bias={str(BROKEN_TOKEN): -100},
            extra_body={"ignore_eos": True},
        )
        return completion.choices[0].text

    alone = answer()
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=30,
        seed=4,
        logit_bias={str(BROKEN_TOKEN): -100},
        extra_body={"ignore_eos": True},
        stream=True,
    )
    beside = [next(stream).choices[0].text]
    for _ in range(3):
        with pytest.raises(openai.InternalServerError, match="not finite") as caught:
            client.completions.create(model=MODEL, prompt=[*PROMPT * 4, BROKEN_TOKEN])
        assert caught.value.code == "engine_failed"
    beside += [chunk.choices[0].text for chunk in stream]
    assert "".join(beside) == alone
    assert answer() == alone
    assert tiny.is_idle()
    stats = tiny.stats()
    assert stats.scheduler.kv_used_blocks == 0
    assert stats.scheduler.tenants["acme"].cancelled == 3
