"""What a tenant's policy refuses or ends, as its client sees it."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import openai
import pytest

from tidegate_engine.server.intake import ENCODE_INLINE_CHARS
from tidegate_policies.rules import ServiceRule, StopPolicy
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import (
    MODEL,
    HeldTokenizer,
    RunningEngine,
    a_keyed_tenant,
    a_running_engine,
    a_served_model,
    waiting_requests,
)
from tidegate_testing.policies import a_snapshot

ENDLESS = 50_000
SHORT = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}
LONG = {"model": MODEL, "prompt": "Hello", "max_tokens": ENDLESS}


def a_policy(**fields: object) -> PolicySnapshot:
    return a_snapshot(a_keyed_tenant("acme", **fields), a_keyed_tenant("zeta"))


AN_HOUR_FOR_EACH = a_policy(service=ServiceRule(request_timeout_seconds=3600))


@dataclass
class AheadClock:
    """The machine's monotonic time and a bit.

    Attributes:
        ahead_seconds: The bit.
    """

    ahead_seconds: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_seconds


def complete(engine: RunningEngine, body: dict[str, object], **headers: str) -> httpx.Response:
    return engine.http().post("/v1/completions", json=body, headers=headers)


def complete_later(
    engine: RunningEngine, body: dict[str, object], **headers: str
) -> "Future[httpx.Response]":
    """Send from another thread; return once the request waits in the engine."""
    waiting = engine.stats().scheduler.waiting
    client = engine.http()
    thread = ThreadPoolExecutor(max_workers=1)
    answer = thread.submit(client.post, "/v1/completions", json=body, headers=headers)
    thread.shutdown(wait=False)
    eventually(lambda: engine.stats().scheduler.waiting > waiting, "a waiting request")
    return answer


def check_error(answer: httpx.Response, status: int, code: str) -> None:
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["x-tidegate-reason"] == code


def cancelled(engine: RunningEngine, cause: str, state: str) -> float | None:
    return engine.sample("tidegate_cancelled_total", tenant="acme", cause=cause, state=state)


@pytest.mark.parametrize("stream", [False, True])
def test_who_waits_too_long_for_the_first_token_gets_504(*, stream: bool) -> None:
    policy = a_policy(stop=StopPolicy.HOLD, service=ServiceRule(queue_timeout_seconds=0.05))
    with a_running_engine(policy) as engine:
        began = time.monotonic()
        check_error(complete(engine, {**LONG, "stream": stream}), 504, "queue_timeout")
        assert time.monotonic() - began >= 0.05
        assert cancelled(engine, "queue_timeout", "waiting") == 1
        assert engine.is_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_that_is_set_later_holds_for_who_waits_already(*, stream: bool) -> None:
    with a_running_engine(a_policy(stop=StopPolicy.HOLD)) as engine:
        answer = complete_later(engine, {**LONG, "stream": stream})
        limited = ServiceRule(queue_timeout_seconds=0.05)
        engine.apply(a_policy(stop=StopPolicy.HOLD, service=limited))
        check_error(answer.result(), 504, "queue_timeout")
        assert engine.is_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_of_several_choices_that_wait_too_long_all_are_dropped(*, stream: bool) -> None:
    policy = a_policy(stop=StopPolicy.HOLD, service=ServiceRule(queue_timeout_seconds=0.05))
    with a_running_engine(policy) as engine:
        check_error(complete(engine, {**LONG, "stream": stream, "n": 3}), 504, "queue_timeout")
        assert cancelled(engine, "queue_timeout", "waiting") == 3


@pytest.mark.parametrize("stream", [False, True])
def test_who_has_a_choice_that_runs_gets_the_others_too_however_long_they_wait(
    *, stream: bool
) -> None:
    clock = AheadClock()
    policy = a_policy(max_running=1, service=ServiceRule(queue_timeout_seconds=3600))
    with a_running_engine(policy, step_seconds=0.001, clock=clock) as engine:
        body = {**LONG, "max_tokens": 400, "ignore_eos": True, "n": 2, "stream": stream}
        client = engine.http()
        with ThreadPoolExecutor() as clients:
            answer = clients.submit(client.post, "/v1/completions", json=body)
            eventually(lambda: engine.stats().scheduler.running == 1, "a choice that runs")
            assert engine.stats().scheduler.waiting == 1
            clock.ahead_seconds = 3600
            assert answer.result().status_code == 200
        assert answer.result().text.count('"finish_reason":"length"') == 2
        assert engine.stats().scheduler.tenants["acme"].expired == 0


@pytest.mark.parametrize(
    ("limit", "service"),
    [
        ("queue_timeout", ServiceRule(queue_timeout_seconds=3600)),
        ("request_timeout", ServiceRule(request_timeout_seconds=3600)),
    ],
)
def test_the_time_in_which_a_prompt_is_encoded_counts(limit: str, service: ServiceRule) -> None:
    clock, tokenizer = AheadClock(), HeldTokenizer()
    model = a_served_model(tokenizer=tokenizer)
    with a_running_engine(a_policy(service=service), model=model, clock=clock) as engine:
        client = engine.http()
        with ThreadPoolExecutor() as clients:
            body = {**SHORT, "prompt": "a" * (ENCODE_INLINE_CHARS + 1)}
            answer = clients.submit(client.post, "/v1/completions", json=body)
            tokenizer.begun.wait()
            clock.ahead_seconds = 3600
            tokenizer.released.set()
            check_error(answer.result(), 504, limit)
        assert cancelled(engine, limit, "waiting") == 1


def test_an_answer_that_takes_too_long_is_504() -> None:
    clock = AheadClock()
    with a_running_engine(AN_HOUR_FOR_EACH, step_seconds=0.001, clock=clock) as engine:
        client = engine.http()
        with ThreadPoolExecutor() as clients:
            answer = clients.submit(client.post, "/v1/completions", json=LONG)
            eventually(lambda: engine.stats().scheduler.running == 1, "a running request")
            clock.ahead_seconds = 3600
            check_error(answer.result(), 504, "request_timeout")
        assert cancelled(engine, "request_timeout", "running") == 1


def test_the_official_client_asks_once_for_what_takes_too_long() -> None:
    policy = a_policy(service=ServiceRule(request_timeout_seconds=0.05))
    with a_running_engine(policy, step_seconds=0.001) as engine:
        client = engine.openai().with_options(max_retries=openai.DEFAULT_MAX_RETRIES)
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model=MODEL, prompt="Hello", max_tokens=ENDLESS)
        assert (caught.value.status_code, caught.value.code) == (504, "request_timeout")
        assert engine.stats().scheduler.tenants["acme"].expired == 1


def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    clock = AheadClock()
    with (
        a_running_engine(AN_HOUR_FOR_EACH, step_seconds=0.001, clock=clock) as engine,
        engine.http().stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer,
    ):
        parts = answer.iter_text()
        text = next(parts)
        clock.ahead_seconds = 3600
        text += "".join(parts)
    events = text.rstrip("\n").split("\n\n")
    assert answer.status_code == 200
    assert len(events) > 1
    assert '"code":"request_timeout"' in events[-1]
    assert "[DONE]" not in text
    assert '"finish_reason":"' not in text


def test_a_stopped_tenants_stream_ends_with_an_error() -> None:
    with a_running_engine(a_policy(), step_seconds=0.001) as engine:
        stream = engine.openai().completions.create(
            model=MODEL, prompt="Hello", max_tokens=ENDLESS, stream=True
        )
        next(iter(stream))
        engine.apply(a_policy(stop=StopPolicy.CANCEL))
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.code == "tenant_stopped"
        assert cancelled(engine, "tenant_stopped", "running") == 1
        assert engine.is_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_stopped_tenants_unanswered_request_is_403(*, stream: bool) -> None:
    with a_running_engine(a_policy(stop=StopPolicy.HOLD)) as engine:
        answer = complete_later(engine, {**LONG, "stream": stream})
        engine.apply(a_policy(stop=StopPolicy.CANCEL))
        check_error(answer.result(), 403, "tenant_stopped")
        assert cancelled(engine, "tenant_stopped", "waiting") == 1


@pytest.mark.parametrize("stop", [StopPolicy.DRAIN, StopPolicy.CANCEL])
def test_a_stopped_tenant_is_known_and_refused_alone(stop: StopPolicy) -> None:
    with a_running_engine(a_policy(stop=stop)) as engine:
        check_error(complete(engine, SHORT), 403, "tenant_stopped")
        # It is still a tenant of the pool, so it may look and clean up.
        assert engine.http().get("/v1/models").status_code == 200
        assert engine.http("zeta").post("/v1/completions", json=SHORT).status_code == 200


def test_nothing_is_encoded_for_a_stopped_tenant() -> None:
    tokenizer = HeldTokenizer()
    tokenizer.released.set()
    model = a_served_model(tokenizer=tokenizer)
    with a_running_engine(a_policy(stop=StopPolicy.DRAIN), model=model) as engine:
        check_error(complete(engine, SHORT), 403, "tenant_stopped")
        assert not tokenizer.begun.is_set()


def test_a_draining_tenants_running_request_finishes() -> None:
    with a_running_engine(a_policy()) as engine:
        stream = engine.openai().completions.create(
            model=MODEL, prompt="Hello", max_tokens=300, stream=True
        )
        next(iter(stream))
        engine.apply(a_policy(stop=StopPolicy.DRAIN))
        assert list(stream)[-1].choices[0].finish_reason == "length"


def test_a_tenants_full_queue_is_429_for_it_alone() -> None:
    with a_running_engine(a_policy(stop=StopPolicy.HOLD, max_queued=1)) as engine:
        first = complete_later(engine, SHORT)
        refused = complete(engine, SHORT)
        check_error(refused, 429, "tenant_queue_full")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert engine.http("zeta").post("/v1/completions", json=SHORT).status_code == 200
        engine.apply(a_policy())
        assert first.result().status_code == 200


def test_who_finds_its_queue_full_is_told_to_come_back_when_it_should_have_room() -> None:
    policy = a_policy(max_running=1, max_queued=1)
    with (
        a_running_engine(policy, step_seconds=0.01) as engine,
        waiting_requests(engine, ("acme", "first"), max_tokens=2000),
    ):
        eventually(lambda: engine.stats().scheduler.running == 1, "a running request")
        with waiting_requests(engine, ("acme", "second")):

            def is_told_of_some_twenty_seconds() -> bool:
                refused = complete(engine, SHORT)
                check_error(refused, 429, "tenant_queue_full")
                return 15 <= int(refused.headers["retry-after"]) <= 40

            eventually(is_told_of_some_twenty_seconds, "what steps take to be known")


@pytest.mark.parametrize(
    ("limits", "body", "code", "param", "told"),
    [
        (
            {"max_queued": 2},
            {"n": 3},
            "too_many_choices",
            "n",
            "3 choices queue at once, and of tenant 'acme' at most 2 requests"
            " (concurrency.maxQueued).",
        ),
        (
            {"max_queued_tokens": 4},
            {},
            "prompt_too_long",
            "prompt",
            "The prompts of all choices have 5 tokens, which queue at once, and of tenant 'acme'"
            " at most 4 (concurrency.maxQueuedTokens).",
        ),
        (
            {"max_queued_tokens": 14},
            {"n": 3},
            "prompt_too_long",
            "prompt",
            "The prompts of all choices have 15 tokens, which queue at once, and of tenant 'acme'"
            " at most 14 (concurrency.maxQueuedTokens).",
        ),
    ],
)
def test_what_can_never_queue_is_refused_for_good_and_told_the_limit(
    limits: dict[str, int], body: dict[str, object], code: str, param: str, told: str
) -> None:
    with a_running_engine(a_policy(**limits)) as engine:
        refused = complete(engine, {**SHORT, **body})
        check_error(refused, 400, code)
        error = refused.json()["error"]
        assert (error["param"], error["message"]) == (param, told)
        assert "retry-after" not in refused.headers
        assert engine.stats().scheduler.arrivals == 0


def test_what_just_fits_an_empty_queue_is_served() -> None:
    with a_running_engine(a_policy(max_queued=3, max_queued_tokens=15)) as engine:
        assert complete(engine, {**SHORT, "n": 3}).status_code == 200


def test_a_chat_that_can_never_queue_is_refused_by_its_messages() -> None:
    with a_running_engine(a_policy(max_queued_tokens=1)) as engine:
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
        refused = engine.http().post("/v1/chat/completions", json=chat)
        check_error(refused, 400, "prompt_too_long")
        assert refused.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("stream", [False, True])
def test_who_would_be_served_too_late_is_429_at_once(*, stream: bool) -> None:
    policy = a_policy(service=ServiceRule(ttft_seconds=5.0, sheds=True))
    with (
        a_running_engine(policy, max_num_seqs=1, step_seconds=0.01) as engine,
        waiting_requests(engine, ("zeta", "long"), max_tokens=2000),
    ):
        eventually(lambda: engine.stats().scheduler.running == 1, "a running request")
        told: list[httpx.Response] = []

        def is_told_of_some_twenty_seconds() -> bool:
            told.append(complete(engine, {**SHORT, "stream": stream}, **{"x-request-id": "late"}))
            check_error(told[-1], 429, "shed")
            return 15 <= int(told[-1].headers["retry-after"]) <= 40

        eventually(is_told_of_some_twenty_seconds, "what steps take to be known")
        assert "the target is 5 s" in told[-1].json()["error"]["message"]
        assert told[-1].headers["x-request-id"] == "late"
        assert "x-should-retry" not in told[-1].headers
        shed = engine.sample("tidegate_shed_total", tenant="acme", reason="shed")
        assert shed == len(told)
        assert engine.stats().scheduler.tenants["acme"].waiting == 0


def test_a_wrong_deadline_is_refused_by_its_header() -> None:
    with a_running_engine(a_policy()) as engine:
        refused = complete(engine, SHORT, **{"x-slo-ttft-ms": "soon"})
        check_error(refused, 400, "invalid_header")
        assert refused.json()["error"]["param"] == "x-slo-ttft-ms"
        assert complete(engine, SHORT, **{"x-slo-ttft-ms": "500"}).status_code == 200


def test_of_a_tenants_own_requests_the_more_urgent_goes_first() -> None:
    with a_running_engine(
        a_policy(stop=StopPolicy.HOLD), max_num_seqs=1, step_seconds=0.001
    ) as engine:
        ended: list[str] = []
        body = {**SHORT, "max_tokens": 100}
        patient = complete_later(engine, body, **{"x-slo-ttft-ms": "3600000"})
        urgent = complete_later(engine, body, **{"x-slo-ttft-ms": "60000"})
        patient.add_done_callback(lambda _: ended.append("patient"))
        urgent.add_done_callback(lambda _: ended.append("urgent"))
        engine.apply(a_policy())
        assert patient.result().status_code == urgent.result().status_code == 200
        eventually(lambda: len(ended) == 2, "both answers")
        assert ended == ["urgent", "patient"]


def test_a_stream_that_is_cancelled_before_its_first_token_gets_a_status() -> None:
    with a_running_engine(a_policy(stop=StopPolicy.HOLD)) as engine:
        answer = complete_later(engine, {**LONG, "stream": True})
        [request_id] = engine.service.generations.running_ids
        assert engine.http().delete(f"/v1/requests/{request_id}").status_code == 200
        check_error(answer.result(), 410, "request_cancelled")
        assert answer.result().headers["x-request-id"] == request_id
