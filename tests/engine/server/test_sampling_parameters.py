"""Sampling parameters through the official client, on a real model."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from openai import OpenAI

from tidegate_engine.model.bytes_tokenizer import END_TOKEN_ID
from tidegate_testing.engines import MODEL, RunningEngine, a_running_engine, a_served_model
from tidegate_testing.executors import a_torch_executor
from tidegate_testing.models import TINY, one_torch_thread, tiny_model

__all__ = ["one_torch_thread"]
PROMPT = [7, 100, 33, 250, 61]


@pytest.fixture(scope="module")
def tiny() -> Iterator[RunningEngine]:
    # Tied, a random model mostly repeats its input.
    executor = a_torch_executor(tiny_model(replace(TINY, has_tied_embeddings=False)))
    model = a_served_model(max_context_tokens=TINY.max_context_tokens)
    with a_running_engine(executor=executor, model=model) as running:
        yield running


@pytest.fixture(scope="module")
def client(tiny: RunningEngine) -> OpenAI:
    return tiny.openai()


def tokens_of(client: OpenAI, extra: Mapping[str, object], **fields: object) -> list[str]:
    completion = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        logprobs=0,
        extra_body={"ignore_eos": True, **extra},
        **{"max_tokens": 12, **fields},  # type: ignore[call-overload]
    )
    (choice,) = completion.choices
    return list(choice.logprobs.tokens)


def test_a_bias_and_a_stop_token_decide_what_comes_and_when_it_ends(client: OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=9,
        logit_bias={"1": 100},
        logprobs=0,
        extra_body={"stop_token_ids": [1], "min_tokens": 4},
        stream=True,
    )
    choices = [chunk.choices[0] for chunk in stream]
    assert choices[-1].finish_reason == "stop"
    tokens = [token for c in choices if c.logprobs for token in c.logprobs.tokens or ()]
    assert len(tokens) == 4
    assert "!" not in tokens


def test_penalties_keep_a_token_from_coming_again(client: OpenAI) -> None:
    bias = {"33": 4, "34": 3.9, "35": 3.8}
    plain = tokens_of(client, {}, temperature=0, logit_bias=bias)
    for penalty in ({"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 5}):
        extra = penalty if "repetition_penalty" in penalty else {}
        fields = {} if extra else penalty
        penalised = tokens_of(client, extra, temperature=0, logit_bias=bias, **fields)
        assert len(set(penalised)) > len(set(plain)), penalty


def test_a_seed_repeats_an_answer_and_cuts_bound_it(client: OpenAI) -> None:
    first, again, other = (tokens_of(client, {}, seed=seed) for seed in (3, 3, 4))
    assert first == again != other
    greedy = tokens_of(client, {}, temperature=0)
    assert greedy == tokens_of(client, {"top_k": 1})
    assert greedy == tokens_of(client, {"min_p": 1.0})
    assert greedy == tokens_of(client, {}, top_p=1e-6)


def test_choices_of_a_seed_differ_and_greedy_ones_do_not(client: OpenAI) -> None:
    def texts(**fields: float) -> list[str]:
        answer = client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            n=3,
            max_tokens=12,
            extra_body={"ignore_eos": True, **fields},
        )
        return [choice.text for choice in answer.choices]

    assert len(set(texts(seed=1))) == 3
    assert texts(seed=1) == texts(seed=1)
    assert len(set(texts(temperature=0))) == 1


def test_twenty_log_probabilities_come_with_the_bytes_of_each_token(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=8,
        logprobs=True,
        top_logprobs=20,
        seed=2,
        extra_body={"ignore_eos": True},
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert {len(token.top_logprobs) for token in content} == {20}
    spelled = b"".join(bytes(token.bytes or []) for token in content)
    assert spelled.decode(errors="replace") == choice.message.content
    for token in content:
        best = [top.logprob for top in token.top_logprobs]
        assert best == sorted(best, reverse=True)


def test_the_end_token_can_be_forbidden_and_forced(client: OpenAI) -> None:
    forced = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=20, logit_bias={str(END_TOKEN_ID): 100}
    )
    assert forced.choices[0].finish_reason == "stop"
    assert forced.usage is not None
    assert forced.usage.completion_tokens == 1
