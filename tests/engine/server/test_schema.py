"""What is refused is named; what asks for nothing is accepted."""

import json
import math

import pytest
from pydantic import ValidationError

from tidegate_engine.server.errors import from_validation
from tidegate_engine.server.schema import ChatBody, CompletionBody
from tidegate_testing.engines import MODEL, RunningEngine

COMPLETION: dict[str, object] = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}
MESSAGE: dict[str, object] = {"role": "user", "content": "Hello"}
CHAT: dict[str, object] = {"model": MODEL, "messages": [MESSAGE], "max_tokens": 1}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2),
        ("echo", True),
        ("suffix", "end"),
    ],
)
def test_a_completion_field_that_is_not_supported_is_named(
    engine: RunningEngine, field: str, value: object
) -> None:
    refuses(
        engine, COMPLETIONS, {**COMPLETION, field: value}, param=field, code="unsupported_field"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "alloy", "format": "mp3"}),
        ("function_call", {"name": "f"}),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("reasoning_effort", "high"),
        ("response_format", {"type": "json_object"}),
        ("service_tier", "priority"),
        ("store", True),
        ("tool_choice", "required"),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("verbosity", "low"),
        ("web_search_options", {}),
    ],
)
def test_a_chat_field_that_is_not_supported_is_named(
    engine: RunningEngine, field: str, value: object
) -> None:
    refuses(engine, CHATS, {**CHAT, field: value}, param=field, code="unsupported_field")


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_an_unknown_field_is_named(engine: RunningEngine, path: str) -> None:
    body = COMPLETION if path == COMPLETIONS else CHAT
    refuses(engine, path, {**body, "temprature": 0.5}, param="temprature", code="unknown_field")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("prompt", []),
        ("prompt", None),
        ("seed", 1.5),
        ("seed", 1 << 64),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", ""),
        ("stop", "x" * 257),
        ("stream", "yes"),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("top_k", -2),
        ("top_p", 0),
        ("logprobs", 21),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("presence_penalty", math.nan),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-60),
        ("repetition_penalty", 11),
        ("min_tokens", -1),
        ("min_tokens", True),
        ("min_tokens", 2),
        ("stop_token_ids", [300]),
        ("stop_token_ids", 5),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"07": 1}),
        ("logit_bias", {"257": 1}),
        ("logit_bias", [1]),
    ],
)
def test_a_wrong_value_is_named(engine: RunningEngine, field: str, value: object) -> None:
    refuses(engine, COMPLETIONS, {**COMPLETION, field: value}, param=field, code="invalid_value")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**CHAT, "messages": []}, "messages"),
        ({**CHAT, "messages": [{**MESSAGE, "role": "tool"}]}, "messages.0.role"),
        ({**CHAT, "messages": [{**MESSAGE, "content": 5}]}, "messages.0.content"),
        (
            {**CHAT, "messages": [{**MESSAGE, "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type",
        ),
        ({**CHAT, "top_logprobs": 2}, "top_logprobs"),
        ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({**CHAT, "logprobs": False, "top_logprobs": 0}, "top_logprobs"),
        ({**CHAT, "logit_bias": {"5": 101}}, "logit_bias.5"),
        ({**CHAT, "stop_token_ids": [1, -1]}, "stop_token_ids.1"),
        ({**CHAT, "min_tokens": 2}, "min_tokens"),
        ({**CHAT, "max_tokens": None, "max_completion_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({**CHAT, "max_completion_tokens": 5}, "max_tokens"),
        ({**CHAT, "stream_options": {"include_usage": True}}, "stream_options"),
        ({**CHAT, "stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ],
)
def test_the_place_of_a_mistake_is_named(
    engine: RunningEngine, body: dict[str, object], param: str
) -> None:
    code = "unknown_field" if param.endswith(".usage") else "invalid_value"
    refuses(engine, CHATS, body, param=param, code=code)


def test_a_prompt_without_tokens_is_named(engine: RunningEngine) -> None:
    for empty in ("", ["a", ""]):
        body = {**COMPLETION, "prompt": empty}
        refuses(engine, COMPLETIONS, body, param="prompt", code="empty_prompt")


def test_more_log_probabilities_than_a_whole_answer_may_hold_are_refused(
    engine: RunningEngine,
) -> None:
    body = {**COMPLETION, "logprobs": 20, "n": 100, "max_tokens": 2000}
    refused = engine.http().post(COMPLETIONS, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "too_many_logprobs")
    assert error["param"] == "logprobs"


def test_a_missing_field_is_named(engine: RunningEngine) -> None:
    refuses(engine, COMPLETIONS, {"prompt": "Hello"}, param="model", code="missing_field")
    refuses(engine, CHATS, {"model": MODEL}, param="messages", code="missing_field")


def test_token_ids_are_checked_against_the_vocabulary(engine: RunningEngine) -> None:
    refuses(
        engine,
        COMPLETIONS,
        {**COMPLETION, "prompt": [1, 257]},
        param="prompt",
        code="invalid_value",
    )
    refuses(
        engine, COMPLETIONS, {**COMPLETION, "prompt": [-1]}, param="prompt.0", code="invalid_value"
    )


def test_the_number_of_all_choices_is_bounded(engine: RunningEngine) -> None:
    body = {**COMPLETION, "prompt": ["a"] * 5, "n": 100}
    refuses(engine, COMPLETIONS, body, param="n", code="too_many_choices")


def test_the_limit_that_leaves_too_few_tokens_is_named(engine: RunningEngine) -> None:
    for body, limit in (
        ({**COMPLETION, "min_tokens": 9, "max_tokens": 8}, "max_tokens, 8"),
        ({"model": MODEL, "prompt": "a", "min_tokens": 17}, "max_tokens, 16"),
        ({**COMPLETION, "max_tokens": 1 << 30, "min_tokens": 1 << 21}, "context leaves, 10"),
    ):
        answer = engine.http().post(COMPLETIONS, json=body)
        assert answer.status_code == 400
        assert limit in answer.json()["error"]["message"]


def test_best_of_is_accepted_only_where_it_asks_for_nothing(engine: RunningEngine) -> None:
    answer = engine.http().post(COMPLETIONS, json={**COMPLETION, "n": 2, "best_of": 2})
    assert answer.status_code == 200
    refuses(
        engine,
        COMPLETIONS,
        {**COMPLETION, "n": 2, "best_of": 1},
        param="best_of",
        code="unsupported_field",
    )


def test_another_model_is_not_found(engine: RunningEngine) -> None:
    answer = engine.http().post(COMPLETIONS, json={**COMPLETION, "model": "gpt"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "content", [b"{", b"", b"[" * 100_000, b"\xff\xfe\xfd", rb'{"prompt": "\ud800"}']
)
def test_a_body_that_is_not_json_is_refused(engine: RunningEngine, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = engine.http().post(COMPLETIONS, content=content, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "field",
    [
        {"frequency_penalty": 0},
        {"presence_penalty": 0.0},
        {"logit_bias": {}},
        {"user": "u", "metadata": {"a": "b"}},
        {"response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"modalities": ["text"], "service_tier": "auto", "store": False},
        {"logprobs": None, "top_p": None, "stop": None, "stream": None, "seed": None},
        {"prompt_cache_key": "k", "safety_identifier": "s"},
        {"top_k": -1, "ignore_eos": True, "min_p": 0, "repetition_penalty": 1, "min_tokens": 0},
        {"stop_token_ids": [], "logit_bias": None, "min_p": None, "frequency_penalty": None},
        {"max_completion_tokens": 1},
    ],
)
def test_what_asks_for_nothing_is_accepted(engine: RunningEngine, field: dict[str, object]) -> None:
    answer = engine.http().post(CHATS, json={**CHAT, **field})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("name", ["str", "list[x", "function-after[x", "prompt.text"])
def test_an_unknown_field_is_named_whatever_it_is_called(engine: RunningEngine, name: str) -> None:
    refuses(engine, COMPLETIONS, {**COMPLETION, name: 1}, param=name, code="unknown_field")
    message = {**MESSAGE, name: 1}
    param = f"messages.0.{name}"
    refuses(engine, CHATS, {**CHAT, "messages": [message]}, param=param, code="unknown_field")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"metadata": {"str": 1}}, "metadata.str"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"stop": ["a", 5]}, "stop.1"),
        ({"stop": 5}, "stop"),
        ({"prompt": [[1], [2, "x"]]}, "prompt.1.1"),
        ({"prompt": ["a", 5]}, "prompt.1"),
        ({"prompt": [5, "a"]}, "prompt.1"),
        ({"prompt": [[]]}, "prompt.0"),
    ],
)
def test_the_place_of_a_mistake_is_named_without_the_kind_of_its_field(
    engine: RunningEngine, fields: dict[str, object], param: str
) -> None:
    refuses(engine, COMPLETIONS, {**COMPLETION, **fields}, param=param, code="invalid_value")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stop": ["a"] * 5}, "at most 4"),
        ({"prompt": []}, "at least 1"),
        ({"echo": True}, "give false"),
        ({"suffix": "x"}, 'give ""'),
    ],
)
def test_what_would_be_right_is_said_in_the_clients_words(
    engine: RunningEngine, fields: dict[str, object], said: str
) -> None:
    answer = engine.http().post(COMPLETIONS, json={**COMPLETION, **fields})
    assert said in answer.json()["error"]["message"]


def test_a_very_long_name_is_not_sent_back(engine: RunningEngine) -> None:
    answer = engine.http().post(COMPLETIONS, json={**COMPLETION, "x" * 100_000: 1})
    assert answer.status_code == 400
    assert len(answer.content) < 1000


MANY_ITEMS = 20_000


def filled(before: bytes, item: bytes, after: bytes) -> bytes:
    """Build a body of many items, numbered where they say `%d`."""
    items = (item.replace(b"%d", b"%d" % i) for i in range(MANY_ITEMS))
    return before + b",".join(items) + after


CONTENT = b'{"model":"m","messages":[{"role":"user","content":['
PROMPT = b'{"model":"m","prompt":'


@pytest.mark.parametrize(
    ("shape", "body"),
    [
        (ChatBody, filled(CONTENT, b"{}", b"]}]}")),
        (ChatBody, filled(CONTENT, b'"x"', b"]}]}")),
        (ChatBody, filled(CONTENT + b"{", b'"k%d":1', b"}]}]}")),
        (ChatBody, filled(b'{"model":"m","messages":[', b"1", b"]}")),
        (CompletionBody, filled(PROMPT + b"[", b"[]", b"]}")),
        (CompletionBody, filled(PROMPT + b"[1,", b'"x"', b"]}")),
        (CompletionBody, filled(PROMPT + b'["x",', b"1", b"]}")),
        (CompletionBody, filled(PROMPT + b'"x",', b'"k%d":1', b"}")),
        (CompletionBody, filled(PROMPT + b'"x","metadata":{', b'"k%d":1', b"}}")),
        (CompletionBody, filled(PROMPT + b'"x","logit_bias":{', b'"k%d":"x"', b"}}")),
        (CompletionBody, filled(PROMPT + b'"x","stop":[', b"1", b"]}")),
        (CompletionBody, filled(PROMPT + b'"x","stop_token_ids":[', b'"x"', b"]}")),
    ],
    ids=lambda value: value[:60].decode() if isinstance(value, bytes) else "",
)
def test_a_large_body_of_mistakes_makes_few_errors(
    shape: type[ChatBody | CompletionBody], body: bytes
) -> None:
    with pytest.raises(ValidationError) as caught:
        shape.model_validate_json(body)
    assert caught.value.error_count() <= 4
    assert from_validation(caught.value).status == 400


def refuses(
    engine: RunningEngine, path: str, body: dict[str, object], *, param: str, code: str
) -> None:
    content = json.dumps(body)
    headers = {"content-type": "application/json"}
    answer = engine.http().post(path, content=content, headers=headers)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert param in error["message"]
    assert answer.headers["x-tidegate-reason"] == code


def test_null_is_the_default_of_every_optional_field() -> None:
    nulls = {name: None for name in CompletionBody.model_fields if name not in {"model", "prompt"}}
    body = CompletionBody.model_validate({"model": "m", "prompt": "p", **nulls})
    assert (body.n, body.ignore_eos) == (1, False)
