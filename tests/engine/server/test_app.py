"""The API as the official client sees it."""

import hashlib
import threading

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tidegate_engine.server.schema import DEFAULT_COMPLETION_TOKENS
from tidegate_engine.server.served_model import ServedModel
from tidegate_policies.rules import UnknownAction, UnknownTenantsRule
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import (
    MODEL,
    HeldTokenizer,
    RunningEngine,
    a_keyed_tenant,
    a_running_engine,
    a_served_model,
    digest_of,
)
from tidegate_testing.policies import a_snapshot
from tidegate_testing.scheduling import a_request

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


def test_the_model_is_listed(engine: RunningEngine) -> None:
    client = engine.openai()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "tidegate"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/model")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_completion_counts_its_tokens(engine: RunningEngine) -> None:
    answer = engine.openai().completions.create(model=MODEL, prompt="Hello", max_tokens=7, seed=1)
    [choice] = answer.choices
    assert (len(choice.text), choice.finish_reason) == (7, "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("Hello")
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == len("Hello") + 7


def test_a_completion_is_short_unless_it_is_asked_to_be_long(engine: RunningEngine) -> None:
    answer = engine.openai().completions.create(model=MODEL, prompt="Hello")
    assert len(answer.choices[0].text) == DEFAULT_COMPLETION_TOKENS


def test_the_same_seed_gives_the_same_text(engine: RunningEngine) -> None:
    completions = engine.openai().completions
    texts = [
        completions.create(model=MODEL, prompt="Hello", seed=seed).choices[0].text
        for seed in (1, 1, 2, -5)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_without_a_seed_every_answer_differs(engine: RunningEngine) -> None:
    completions = engine.openai().completions
    texts = {completions.create(model=MODEL, prompt="Hello").choices[0].text for _ in range(3)}
    assert len(texts) == 3


def test_a_stream_adds_up_to_the_whole_answer(engine: RunningEngine) -> None:
    completions = engine.openai().completions
    whole = completions.create(model=MODEL, prompt="Hello", max_tokens=9, seed=1)
    chunks = list(
        completions.create(model=MODEL, prompt="Hello", max_tokens=9, seed=1, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 8 + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_ends_with_the_usage_when_asked(engine: RunningEngine) -> None:
    chunks = list(
        engine.openai().chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_completion_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    usage = chunks[-1].usage
    assert usage is not None
    assert chunks[-1].choices == []
    assert usage.completion_tokens == 3
    assert usage.prompt_tokens == len("user: Hello\nassistant: ")


def test_a_chat_answers_as_the_assistant(engine: RunningEngine) -> None:
    answer = engine.openai().chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=4, seed=1
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    [choice] = answer.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert len(choice.message.content or "") == 4


def test_a_chat_stream_says_who_speaks_first(engine: RunningEngine) -> None:
    chunks = list(
        engine.openai().chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=4, seed=1, stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert len("".join(chunk.choices[0].delta.content or "" for chunk in chunks)) == 4


def test_an_answer_can_be_sent_back_as_part_of_the_chat(engine: RunningEngine) -> None:
    chat = engine.openai().chat.completions
    first = chat.create(model=MODEL, messages=HELLO, max_tokens=4)
    sent_back = first.choices[0].message.model_dump()
    parts = [{"type": "text", "text": "And "}, {"type": "text", "text": "now?"}]
    messages = [*HELLO, sent_back, {"role": "user", "content": parts}]
    second = chat.create(model=MODEL, messages=messages, max_tokens=4)  # type: ignore[arg-type]
    assert second.usage is not None
    assert first.usage is not None
    added = len("user: And now?\nassistant: ") + 4 + 1
    assert second.usage.prompt_tokens == first.usage.prompt_tokens + added


def test_a_stop_string_across_token_borders_ends_the_answer(engine: RunningEngine) -> None:
    completions = engine.openai().completions
    full = completions.create(model=MODEL, prompt="Hello", max_tokens=40, seed=1).choices[0].text
    stop = full[20:24]
    stops = ["\n\n", stop]
    whole = completions.create(model=MODEL, prompt="Hello", max_tokens=40, seed=1, stop=stops)
    chunks = completions.create(
        model=MODEL, prompt="Hello", max_tokens=40, seed=1, stop=stops, stream=True
    )
    for parts in ([whole], list(chunks)):
        text = "".join(part.choices[0].text for part in parts)
        assert text == full[: full.index(stop)]
        assert parts[-1].choices[0].finish_reason == "stop"


def test_text_held_back_for_a_stop_string_is_not_lost(engine: RunningEngine) -> None:
    completions = engine.openai().completions
    full = completions.create(model=MODEL, prompt="Hello", max_tokens=10, seed=1).choices[0].text
    stop = full[-2:] + "never"
    chunks = completions.create(
        model=MODEL, prompt="Hello", max_tokens=10, seed=1, stop=stop, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == full


def test_choices_are_independent_and_reproducible(engine: RunningEngine) -> None:
    completions = engine.openai().completions
    single = completions.create(model=MODEL, prompt="Hello", seed=1).choices[0].text
    several = [
        completions.create(model=MODEL, prompt="Hello", seed=1, n=3).choices for _ in range(2)
    ]
    texts = [[choice.text for choice in choices] for choices in several]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3
    assert texts[0][0] == single
    assert [choice.index for choice in several[0]] == [0, 1, 2]


def test_several_prompts_give_their_choices_in_order(engine: RunningEngine) -> None:
    def texts(*prompts: str) -> list[str]:
        answer = engine.openai().completions.create(model=MODEL, prompt=list(prompts), seed=1, n=2)
        assert [choice.index for choice in answer.choices] == list(range(2 * len(prompts)))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, prompts))
        return [choice.text for choice in answer.choices]

    both = texts("one", "two")
    assert both[:2] == texts("one")
    assert both[2:] == texts("other", "two")[2:]
    assert len(set(both)) == 4


def test_prompts_may_be_token_ids(engine: RunningEngine) -> None:
    completions = engine.openai().completions
    ids = a_served_model().tokenizer.encode("Hello")
    spelled = completions.create(model=MODEL, prompt="Hello", seed=1).choices[0].text
    assert completions.create(model=MODEL, prompt=ids, seed=1).choices[0].text == spelled
    assert completions.create(model=MODEL, prompt=[ids], seed=1).choices[0].text == spelled


def test_long_prompts_are_served(engine: RunningEngine) -> None:
    answer = engine.openai().completions.create(model=MODEL, prompt="x" * 20_000, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 20_000


def test_log_probabilities_of_a_chat(engine: RunningEngine) -> None:
    answer = engine.openai().chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=3, seed=1, logprobs=True, top_logprobs=1
    )
    [choice] = answer.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert "".join(token.token for token in content) == choice.message.content
    assert [token.bytes for token in content] == [list(token.token.encode()) for token in content]
    assert [len(token.top_logprobs) for token in content] == [1, 1, 1]


def test_log_probabilities_of_a_completion(engine: RunningEngine) -> None:
    answer = engine.openai().completions.create(
        model=MODEL, prompt="Hello", max_tokens=3, seed=1, logprobs=0
    )
    [choice] = answer.choices
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert choice.logprobs.text_offset == [0, 1, 2]
    assert choice.logprobs.token_logprobs == [0.0, 0.0, 0.0]


def test_the_output_is_clipped_to_the_models_context() -> None:
    with a_running_engine(model=a_served_model(max_context_tokens=12)) as engine:
        completions = engine.openai().completions
        answer = completions.create(model=MODEL, prompt="Hello", max_tokens=100)
        assert (len(answer.choices[0].text), answer.choices[0].finish_reason) == (7, "length")
        with pytest.raises(openai.BadRequestError) as caught:
            completions.create(model=MODEL, prompt="twelve chars")
    assert (caught.value.code, caught.value.param) == ("prompt_too_long", "prompt")


def test_the_answer_ends_where_the_model_ends_it_unless_told_to_go_on() -> None:
    model = a_served_model()
    text = _first_answer(model)
    ending = ServedModel(
        name=MODEL,
        tokenizer=_EndingTokenizer(frozenset(model.tokenizer.encode(text[4]))),
        max_context_tokens=1000,
        created=0,
    )
    with a_running_engine(model=ending) as engine:
        completions = engine.openai().completions
        ended = completions.create(model=MODEL, prompt="Hello", max_tokens=10, seed=1)
        went_on = completions.create(
            model=MODEL, prompt="Hello", max_tokens=10, seed=1, extra_body={"ignore_eos": True}
        )
    first = text.index(text[4])
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == (text[:first], "stop")
    assert ended.usage is not None
    assert ended.usage.completion_tokens == first + 1
    assert (went_on.choices[0].text, went_on.choices[0].finish_reason) == (text, "length")


class _EndingTokenizer(type(a_served_model().tokenizer)):  # type: ignore[misc]
    """Bytes, some of which end the answer."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_ids = eos_token_ids


def _first_answer(model: ServedModel) -> str:
    with a_running_engine(model=model) as engine:
        answer = engine.openai().completions.create(
            model=MODEL, prompt="Hello", max_tokens=10, seed=1
        )
    return answer.choices[0].text


def test_an_unknown_key_is_refused(engine: RunningEngine) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        engine.openai("nobody").completions.create(model=MODEL, prompt="Hello")
    assert caught.value.code == "invalid_api_key"
    assert caught.value.response.headers["x-tidegate-reason"] == "invalid_api_key"


def test_unknown_tenants_are_served_when_the_pool_admits_them() -> None:
    policy = a_snapshot(
        a_keyed_tenant(),
        unknown_tenants=UnknownTenantsRule(action=UnknownAction.ADMIT, tier="standard"),
    )
    with a_running_engine(policy) as engine:
        engine.openai("nobody").completions.create(model=MODEL, prompt="Hello", max_tokens=3)
        assert engine.sample("tidegate_tokens_total", tenant="unknown", kind="output") == 3


def test_a_changed_policy_changes_who_is_served_at_once() -> None:
    with a_running_engine(a_snapshot(a_keyed_tenant("acme"))) as engine:
        engine.openai("acme").completions.create(model=MODEL, prompt="Hello")
        engine.apply(a_snapshot(a_keyed_tenant("zeta", key_digests=(digest_of("sk-zeta"),))))
        engine.openai("zeta").completions.create(model=MODEL, prompt="Hello")
        with pytest.raises(openai.AuthenticationError):
            engine.openai("acme").completions.create(model=MODEL, prompt="Hello")


def test_before_the_first_policy_nobody_is_served() -> None:
    with a_running_engine(has_policy=False) as engine:
        ready = engine.http().get("/readyz")
        assert (ready.status_code, ready.json()["lacking"]) == (503, ["policy"])
        assert engine.http().get("/healthz").status_code == 200
        refused = engine.http().get("/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_policy")
        assert int(refused.headers["retry-after"]) >= 1
        engine.apply(a_snapshot(a_keyed_tenant()))
        assert engine.http().get("/readyz").status_code == 200


def test_a_prompt_that_never_fits_is_refused() -> None:
    with a_running_engine(blocks=4) as engine, pytest.raises(openai.BadRequestError) as caught:
        engine.openai().completions.create(model=MODEL, prompt="x" * 1000)
    assert (caught.value.code, caught.value.param) == ("prompt_too_long", "prompt")


def test_a_full_queue_refuses_all_choices_and_says_when_to_retry() -> None:
    with a_running_engine(max_waiting=2) as engine:
        refused = engine.http().post(
            "/v1/completions", json={"model": MODEL, "prompt": "Hello", "n": 8}
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert engine.is_idle()


def test_nothing_is_encoded_for_a_queue_that_is_full() -> None:
    tokenizer = HeldTokenizer()
    tokenizer.released.set()
    model = a_served_model(tokenizer=tokenizer)
    with a_running_engine(model=model, max_num_seqs=1, max_waiting=1) as engine:
        for _ in range(2):
            engine.service.engine.submit(a_request(output=100_000)).result()
            eventually(lambda: engine.stats().scheduler.running == 1, "a running request")
        assert engine.stats().scheduler.waiting == 1
        answer = engine.http().post("/v1/completions", json={"model": MODEL, "prompt": "Hello"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")
        assert not tokenizer.begun.is_set()


def test_callers_are_identified_where_keys_are_replaced(
    engine: RunningEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def note_thread(*_: object) -> str:
        threads.append(threading.current_thread().name)
        return "acme"

    monkeypatch.setattr(engine.service.identities, "tenant_of", note_thread)
    engine.openai().models.list()
    assert threads == ["server"]


def test_every_answer_names_its_request(engine: RunningEngine) -> None:
    answer = engine.openai().completions.create(model=MODEL, prompt="Hello")
    assert answer._request_id == answer.id
    refused = engine.http().post("/v1/completions", json={})
    assert refused.headers["x-request-id"].startswith("cmpl-")
    assert engine.http().get("/healthz").headers["x-request-id"].startswith("req-")


def test_unknown_paths_and_methods_get_an_error_object(engine: RunningEngine) -> None:
    missing = engine.http().get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_path")
    wrong = engine.http().get("/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


def test_a_body_without_end_is_refused(engine: RunningEngine) -> None:
    body = b'{"model": "' + b"x" * (5 << 20) + b'"}'
    refused = engine.http().post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")


def test_keys_are_never_in_the_policy_in_force(engine: RunningEngine) -> None:
    in_force = engine.service.board.in_force
    assert in_force is not None
    assert "sk-acme" not in in_force.snapshot.to_text()
    assert hashlib.sha256(b"sk-acme").hexdigest() in in_force.snapshot.to_text()
