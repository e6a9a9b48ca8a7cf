"""Nothing is computed for nobody: every way in which a request ends before its end."""

import threading
from collections.abc import Iterator

import httpx
import openai
import pytest

from tidegate_engine.server.intake import ENCODE_INLINE_CHARS
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import (
    MODEL,
    HeldTokenizer,
    RunningEngine,
    a_keyed_tenant,
    a_running_engine,
    a_served_model,
)
from tidegate_testing.policies import a_snapshot
from tidegate_testing.raw_requests import ENDLESS, a_raw_request

STEP_SECONDS = 0.001


@pytest.fixture
def engine() -> Iterator[RunningEngine]:
    """An engine slow enough that nothing ends by itself."""
    policy = a_snapshot(
        a_keyed_tenant("acme"),
        a_keyed_tenant("zeta"),
        a_keyed_tenant("patient", cancel_on_disconnect=False),
    )
    with a_running_engine(policy, step_seconds=STEP_SECONDS) as running:
        yield running


def wait_until_running(engine: RunningEngine, *, requests: int = 1) -> None:
    eventually(lambda: engine.stats().scheduler.running == requests, "running requests")


def wait_until_idle(engine: RunningEngine) -> None:
    eventually(engine.is_idle, "an idle engine")
    stats = engine.stats()
    assert stats.scheduler.kv_used_blocks == 0
    assert stats.tokens_after_cancel == 0


def cancelled(engine: RunningEngine, *, tenant: str = "acme", cause: str, state: str) -> float:
    return engine.sample("tidegate_cancelled_total", tenant=tenant, cause=cause, state=state) or 0.0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_ends_its_request(engine: RunningEngine, *, stream: bool) -> None:
    with a_raw_request(engine.port, stream=stream):
        wait_until_running(engine)
    wait_until_idle(engine)
    assert cancelled(engine, cause="disconnect", state="running") == 1


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_ends_all_choices(engine: RunningEngine, *, stream: bool) -> None:
    with a_raw_request(engine.port, stream=stream, n=3):
        wait_until_running(engine, requests=3)
    wait_until_idle(engine)
    assert cancelled(engine, cause="disconnect", state="running") == 3


def test_hanging_up_ends_a_request_that_still_waits() -> None:
    with a_running_engine(step_seconds=STEP_SECONDS, max_num_seqs=1) as engine:
        with a_raw_request(engine.port):
            wait_until_running(engine)
            with a_raw_request(engine.port):
                eventually(lambda: engine.stats().scheduler.waiting == 1, "a waiting request")
            eventually(lambda: engine.stats().scheduler.waiting == 0, "its end")
            assert cancelled(engine, cause="disconnect", state="waiting") == 1
        wait_until_idle(engine)


@pytest.mark.parametrize("stream", [True, False])
def test_a_tenant_may_let_its_requests_go_on_when_it_hangs_up(
    engine: RunningEngine, *, stream: bool
) -> None:
    with a_raw_request(engine.port, tenant="patient", stream=stream, max_tokens=300):
        wait_until_running(engine)
    wait_until_idle(engine)
    assert engine.sample("tidegate_tokens_total", tenant="patient", kind="output") == 300
    assert cancelled(engine, tenant="patient", cause="disconnect", state="running") == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("tenant", "steps"), [("acme", 0), ("patient", 1)])
def test_who_hangs_up_while_the_prompt_is_encoded_gets_no_step(
    *, tenant: str, steps: int, stream: bool
) -> None:
    tokenizer = HeldTokenizer()
    policy = a_snapshot(
        a_keyed_tenant("acme"), a_keyed_tenant("patient", cancel_on_disconnect=False)
    )
    long = "x" * (ENCODE_INLINE_CHARS + 1)
    with a_running_engine(policy, model=a_served_model(tokenizer=tokenizer)) as engine:
        with a_raw_request(engine.port, tenant=tenant, stream=stream, prompt=long, max_tokens=1):
            assert tokenizer.begun.wait(timeout=10)
        # The event loop has seen the end of that connection once it has served a later one.
        assert engine.http().get("/healthz").status_code == 200
        tokenizer.released.set()
        answered = engine.http().post(
            "/v1/completions", json={"model": MODEL, "prompt": long, "max_tokens": 1}
        )
        assert answered.status_code == 200
        wait_until_idle(engine)
        assert engine.stats().scheduler.tenants[tenant].cancelled == 0
        finished = sum(t.finished for t in engine.stats().scheduler.tenants.values())
        assert finished == 1 + steps


def test_a_stream_is_cancelled_by_its_id(engine: RunningEngine) -> None:
    stream = engine.openai().completions.create(
        model=MODEL, prompt="Hello", max_tokens=ENDLESS, stream=True, n=2
    )
    first = next(iter(stream))
    answer = engine.http().delete(f"/v1/requests/{first.id}")
    assert (answer.status_code, answer.json()["cancelled"]) == (200, True)
    with pytest.raises(openai.APIError) as caught:
        for _ in stream:
            pass
    assert caught.value.code == "request_cancelled"
    wait_until_idle(engine)
    assert cancelled(engine, cause="delete", state="running") == 2
    assert engine.http().delete(f"/v1/requests/{first.id}").status_code == 404


def test_a_whole_answer_is_cancelled_by_its_id(engine: RunningEngine) -> None:
    answers: list[httpx.Response] = []
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": ENDLESS}
    client = engine.http()
    waiting = threading.Thread(
        target=lambda: answers.append(client.post("/v1/completions", json=body))
    )
    waiting.start()
    wait_until_running(engine)
    [request_id] = engine.service.generations.running_ids
    assert engine.http().delete(f"/v1/requests/{request_id}").status_code == 200
    waiting.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (
        410,
        "request_cancelled",
    )
    wait_until_idle(engine)


def test_only_ones_own_requests_can_be_cancelled(engine: RunningEngine) -> None:
    with a_raw_request(engine.port):
        wait_until_running(engine)
        [request_id] = engine.service.generations.running_ids
        others = engine.http("zeta").delete(f"/v1/requests/{request_id}")
        missing = engine.http("zeta").delete("/v1/requests/cmpl-none")
        assert others.status_code == missing.status_code == 404
        assert others.json()["error"]["code"] == "request_not_found"
        assert engine.http("nobody").delete(f"/v1/requests/{request_id}").status_code == 401
        assert engine.http().delete(f"/v1/requests/{request_id[:-1]}").status_code == 404
        assert engine.stats().scheduler.running == 1


def test_a_reader_that_is_too_slow_is_cancelled() -> None:
    with (
        a_running_engine(max_unread_events=64) as engine,
        a_raw_request(engine.port, stream=True, receive_buffer=1024),
    ):
        eventually(
            lambda: cancelled(engine, cause="slow_reader", state="running") == 1,
            "the end of the slow reader's request",
        )
        wait_until_idle(engine)


def test_a_stop_string_ends_the_request_in_the_engine(engine: RunningEngine) -> None:
    completions = engine.openai().completions
    text = completions.create(model=MODEL, prompt="Hello", max_tokens=20, seed=1).choices[0].text
    answer = completions.create(
        model=MODEL, prompt="Hello", max_tokens=ENDLESS, seed=1, stop=text[8:12]
    )
    assert answer.choices[0].finish_reason == "stop"
    wait_until_idle(engine)
    stats = engine.stats()
    assert stats.cancelled == {}
    assert stats.scheduler.tenants["acme"].finished == 2


def test_a_drain_lets_running_requests_finish_and_refuses_new_ones(engine: RunningEngine) -> None:
    stream = engine.openai().completions.create(
        model=MODEL, prompt="Hello", max_tokens=500, stream=True
    )
    next(iter(stream))
    engine.drain(grace_seconds=60)
    refused = engine.http().post("/v1/completions", json={"model": MODEL, "prompt": "Hello"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_draining")
    assert int(refused.headers["retry-after"]) >= 1
    ready = engine.http().get("/readyz")
    assert (ready.status_code, ready.json()["lacking"]) == (503, ["not draining"])
    assert list(stream)[-1].choices[0].finish_reason == "length"


def test_the_end_of_a_drains_grace_is_an_error_in_the_stream(engine: RunningEngine) -> None:
    stream = engine.openai().completions.create(
        model=MODEL, prompt="Hello", max_tokens=ENDLESS, stream=True
    )
    next(iter(stream))
    engine.drain(grace_seconds=0)
    with pytest.raises(openai.APIError) as caught:
        for _ in stream:
            pass
    assert caught.value.code == "engine_draining"
    wait_until_idle(engine)
    assert cancelled(engine, cause="drain", state="running") == 1
