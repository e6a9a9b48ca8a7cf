"""The API against its own OpenAPI document: what it takes, answers and refuses."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tidegate_testing.engines import MODEL, RunningEngine, a_running_engine, a_served_model, key_of

# What the document can't say: that fields contradict each other, and the model's own limits.
UNTOLD = {"invalid_value", "prompt_too_long", "empty_prompt", "too_many_choices"}
OPERATIONS = (
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "DELETE /v1/requests/{request_id}",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "GET /v1/tidegate/usage",
    "GET /v1/tidegate/queue",
    "GET /healthz",
    "GET /readyz",
    "GET /metrics",
)
A_MESSAGE = {"role": "user", "content": "hi"}
FUZZED = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def small_engine() -> Iterator[RunningEngine]:
    """An engine whose answers are short, however long they are asked to be."""
    with a_running_engine(model=a_served_model(max_context_tokens=300)) as engine:
        yield engine
        assert engine.is_idle()


@pytest.fixture(scope="module")
def document(small_engine: RunningEngine) -> dict[str, Any]:
    answer: dict[str, Any] = small_engine.http().get("/openapi.json").json()
    for body in ("CompletionBody", "ChatBody"):
        properties = answer["components"]["schemas"][body]["properties"]
        # Else nearly every body would be for a model that is not served, or take long.
        properties["model"]["enum"] = [MODEL, "other"]
        properties["n"]["maximum"] = 3
    return answer


def test_every_route_is_in_the_document(document: dict[str, Any]) -> None:
    described = {
        f"{method.upper()} {path}"
        for path, methods in document["paths"].items()
        for method in methods
    }
    assert described == set(OPERATIONS)


@pytest.mark.parametrize(
    ("label", "mode"),
    [
        *((label, GenerationMode.POSITIVE) for label in OPERATIONS),
        *((label, GenerationMode.NEGATIVE) for label in OPERATIONS if label.startswith("POST")),
    ],
)
def test_answers_are_as_the_document_says(
    small_engine: RunningEngine, document: dict[str, Any], label: str, mode: GenerationMode
) -> None:
    method, path = label.split(" ")
    operation = schemathesis.openapi.from_dict(document)[path][method]
    statuses: set[int] = set()

    @FUZZED
    @given(operation.as_strategy(generation_mode=mode))
    def fuzz(case: Case[Any]) -> None:
        answer = case.call(
            base_url=small_engine.base_url,
            headers={"authorization": f"Bearer {key_of('acme')}"},
        )
        # Which of the refusals are the document's fault is judged below.
        case.validate_response(answer, excluded_checks=[positive_data_acceptance])
        statuses.add(answer.status_code)
        if answer.status_code == 400:
            code = answer.json()["error"]["code"]
            assert mode is GenerationMode.NEGATIVE or code in UNTOLD, (case.body, answer.text)

    fuzz()
    if mode is GenerationMode.NEGATIVE:
        assert statuses <= {400, 404}
    else:
        assert statuses & {200, 404}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_streams_events_are_as_the_document_says(
    small_engine: RunningEngine, document: dict[str, Any], path: str
) -> None:
    prompt: dict[str, Any] = (
        {"prompt": "hi"} if path == "/v1/completions" else {"messages": [A_MESSAGE]}
    )
    case = schemathesis.openapi.from_dict(document)[path]["post"].Case(
        body={"model": MODEL, "max_tokens": 2, "stream": True, **prompt},
        media_type="application/json",
    )

    answer = case.call(
        base_url=small_engine.base_url, headers={"authorization": f"Bearer {key_of('acme')}"}
    )

    assert answer.headers["content-type"][0].startswith("text/event-stream")
    case.validate_response(answer)
