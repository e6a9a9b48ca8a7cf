"""What is refused, or fails, can be found again, and leaves nothing behind."""

from contextlib import ExitStack

import httpx
import pytest

from tidegate_engine.model.bytes_tokenizer import BytesDetokenizer, BytesTokenizer
from tidegate_policies.rules import UNKNOWN_TENANT, UnknownAction, UnknownTenantsRule
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import (
    MODEL,
    RunningEngine,
    a_keyed_tenant,
    a_running_engine,
    a_served_model,
)
from tidegate_testing.policies import a_snapshot
from tidegate_testing.raw_requests import a_raw_request

SHORT = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}


class BrokenTokenizer(BytesTokenizer):
    """Fails once the prompt is encoded."""

    def detokenizer(self) -> BytesDetokenizer:
        raise RuntimeError("broken")


def complete(engine: RunningEngine, name: str = "mine") -> httpx.Response:
    return engine.http().post("/v1/completions", json=SHORT, headers={"x-request-id": name})


@pytest.mark.parametrize("stream", [False, True])
def test_a_defect_before_a_request_is_begun_is_named_and_leaves_nothing(*, stream: bool) -> None:
    with a_running_engine(model=a_served_model(tokenizer=BrokenTokenizer())) as engine:
        headers = {"x-request-id": "mine"}
        body = {**SHORT, "stream": stream}
        answer = engine.http().post("/v1/completions", json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert answer.headers["x-request-id"] == "mine"
        assert engine.service.generations.running_ids == ()
        assert engine.is_idle()


def test_who_finds_too_many_requests_open_is_named_counted_and_explained() -> None:
    with (
        a_running_engine(step_seconds=0.001, http_options={"max_connections": 4}) as engine,
        ExitStack() as clients,
    ):
        for _ in range(3):
            clients.enter_context(a_raw_request(engine.port))
        eventually(lambda: len(engine.service.generations.running_ids) == 3, "three answers")
        check_overload_is_told(engine, complete(engine))


def test_so_is_who_sends_more_than_there_is_room_for() -> None:
    with a_running_engine(http_options={"max_body_bytes": 10}) as engine:
        check_overload_is_told(engine, complete(engine))


def check_overload_is_told(engine: RunningEngine, refused: httpx.Response) -> None:
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_overloaded")
    assert refused.headers["x-request-id"] == "mine"
    assert refused.headers["connection"] == "close"
    assert engine.sample("tidegate_shed_total", tenant="acme", reason="engine_overloaded") == 1
    [decision] = engine.service.decisions.newest(1, request_id="mine")
    assert (decision.verdict, decision.reason) == ("refused", "engine_overloaded")


def test_an_engine_that_has_become_idle_serves_though_nobody_counts() -> None:
    with a_running_engine(step_seconds=0.001, max_num_seqs=1, max_waiting=1) as engine:
        with ExitStack() as clients:
            for _ in range(2):
                clients.enter_context(a_raw_request(engine.port))
                eventually(lambda: engine.stats().scheduler.running == 1, "a running request")
            eventually(lambda: engine.stats().scheduler.waiting == 1, "a full queue")
            assert complete(engine).json()["error"]["code"] == "queue_full"
        generations = engine.service.generations
        eventually(lambda: not generations.running_ids, "no request")
        eventually(lambda: complete(engine).status_code == 200, "an answer")


def test_strangers_cancel_by_id_alone_as_they_share_a_tenant() -> None:
    policy = a_snapshot(
        a_keyed_tenant("acme"),
        unknown_tenants=UnknownTenantsRule(action=UnknownAction.ADMIT, tier="standard"),
    )
    with a_running_engine(policy, step_seconds=0.001) as engine:
        stream = engine.openai("alice").completions.create(
            model=MODEL,
            prompt="Hello",
            max_tokens=50_000,
            stream=True,
            extra_headers={"x-request-id": "job-1"},
        )
        request_id = next(iter(stream)).id
        assert engine.sample("tidegate_requests", tenant=UNKNOWN_TENANT, state="running") == 1
        mallory = engine.http("mallory")
        assert mallory.delete("/v1/requests/job-1").status_code == 404
        assert engine.service.generations.running_ids == (request_id,)
        assert engine.http("alice").delete(f"/v1/requests/{request_id}").status_code == 200
        assert engine.is_idle()
