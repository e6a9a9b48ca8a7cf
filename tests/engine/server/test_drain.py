"""An engine that is told to end: what runs may finish, what comes is sent elsewhere."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tidegate_engine.server import generations
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import MODEL, RunningEngine, a_running_engine
from tidegate_testing.raw_requests import ENDLESS, a_raw_request, read_events

LONG = {"model": MODEL, "prompt": "Hello", "max_tokens": ENDLESS}


def num_outputs(engine: RunningEngine) -> int:
    return engine.stats().scheduler.tenants["acme"].output_tokens


def drained(engine: RunningEngine) -> dict[str, int]:
    return {
        key.state: count
        for key, count in engine.stats().cancelled.items()
        if key.cause.value == "drain"
    }


def test_what_is_queued_when_a_drain_begins_is_served_too() -> None:
    with (
        a_running_engine(step_seconds=0.001, max_num_seqs=1) as engine,
        ThreadPoolExecutor(max_workers=3) as callers,
    ):
        clients = [engine.http() for _ in range(3)]
        body = {**LONG, "max_tokens": 200}
        answers = [callers.submit(c.post, "/v1/completions", json=body) for c in clients]
        eventually(lambda: engine.stats().scheduler.arrivals == 3, "three arrivals")
        engine.drain(grace_seconds=60)
        for answer in answers:
            assert answer.result().status_code == 200
        assert drained(engine) == {}


def test_after_the_grace_whole_answers_are_503_and_streams_end_with_an_error() -> None:
    with (
        a_running_engine(step_seconds=0.001, max_num_seqs=2) as engine,
        ThreadPoolExecutor(max_workers=2) as callers,
        ExitStack() as streams,
    ):
        stream = streams.enter_context(a_raw_request(engine.port, stream=True))
        assert stream.recv(1)
        clients = [engine.http() for _ in range(2)]
        answers = [callers.submit(c.post, "/v1/completions", json=LONG) for c in clients]
        eventually(lambda: engine.stats().scheduler.arrivals == 3, "three arrivals")
        eventually(lambda: engine.stats().scheduler.running == 2, "two that run")
        engine.drain(grace_seconds=0.1)
        for answer in answers:
            refused = answer.result()
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "engine_draining"
            assert int(refused.headers["retry-after"]) >= 1
        events = read_events(stream)
        assert events.count(b'"code":"engine_draining"') == 1
        assert b"[DONE]" not in events
        assert b'"finish_reason":"' not in events
        eventually(engine.is_idle, "an idle engine")
        assert sum(drained(engine).values()) == 3
        stats = engine.stats()
        assert stats.scheduler.kv_used_blocks == stats.tokens_after_cancel == 0


def test_an_answer_that_is_complete_is_read_to_its_end_after_the_grace() -> None:
    with (
        a_running_engine() as engine,
        a_raw_request(engine.port, stream=True, max_tokens=4000, receive_buffer=32_768) as reader,
    ):
        eventually(lambda: engine.stats().scheduler.arrivals == 1, "its arrival")
        eventually(engine.is_idle, "its last token")
        assert engine.service.generations.running_ids
        engine.drain(grace_seconds=0)
        events = read_events(reader)
        assert events.count(b"data: {") == 4000
        assert b"[DONE]" in events
        assert b"error" not in events


def test_a_reader_who_takes_nothing_keeps_nobody_once_all_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generations, "STALLED_SECONDS", 0.3)
    with (
        a_running_engine() as engine,
        a_raw_request(engine.port, stream=True, max_tokens=3000, receive_buffer=4096) as reader,
    ):
        eventually(lambda: num_outputs(engine) == 3000, "all tokens")
        assert len(engine.service.generations.running_ids) == 1
        began = time.monotonic()
        drain = engine.service.generations.drain(60)
        asyncio.run_coroutine_threadsafe(drain, engine.event_loop).result(timeout=30)
        assert time.monotonic() - began < 20
        # Nothing was taken from it: it may still read all.
        assert b"[DONE]" in read_events(reader)


def test_a_reader_who_takes_something_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "STALLED_SECONDS", 1.0)
    with (
        a_running_engine() as engine,
        a_raw_request(engine.port, stream=True, max_tokens=3000, receive_buffer=4096) as reader,
    ):
        eventually(lambda: num_outputs(engine) == 3000, "all tokens")
        drain = engine.service.generations.drain(60)
        draining = asyncio.run_coroutine_threadsafe(drain, engine.event_loop)
        events = b""
        while b"[DONE]" not in events:
            assert not draining.done() or engine.service.generations.running_ids == ()
            events += reader.recv(1 << 14)
        draining.result(timeout=30)
