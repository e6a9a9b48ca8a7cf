"""At the last token: whoever asks, hears and counts tells the same end, and there is one."""

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tidegate_testing.cluster import eventually
from tidegate_testing.engines import (
    MODEL,
    RunningEngine,
    a_keyed_tenant,
    a_running_engine,
    key_of,
)
from tidegate_testing.policies import a_snapshot
from tidegate_testing.raw_requests import (
    a_completion,
    a_raw_request,
    read_events,
)

TRIES = 1000
AT_ONCE = 8


@dataclass
class LastToken:
    """A caller that ends its requests at about the last token.

    Attributes:
        text: Of an endless answer with seed 1, to choose stop strings from.
        length: Of the next answer that is to be cancelled: longer after a cancel that came too
            late, shorter after one in time, so that both happen on any machine.
    """

    port: int
    text: str
    rng: random.Random
    length: int = 4

    async def tries(self, count: int) -> Counter[str]:
        ends: Counter[str] = Counter()
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                end = await self.rng.choice((self._delete, self._delete, self._leave))(
                    reader, writer
                )
            finally:
                writer.close()
            ends[end] += 1
        return ends

    async def _leave(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        stream = self.rng.random() < 0.5
        length = self.rng.randint(1, self.length)
        writer.write(a_completion(max_tokens=length, stream=stream, n=self.rng.choice((1, 2))))
        if stream:
            await reader.readuntil(b"data: ")
        await asyncio.sleep(self.rng.uniform(0, 0.001 * length))
        if self.rng.random() < 0.5:
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return "left"

    async def _delete(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        # A stop string is found by the server, while the engine takes the request for running.
        end = self.rng.choice(
            (
                {"max_tokens": self.length},
                {"max_tokens": self.length, "n": 2},
                {"stop": self.text[self.length : self.length + 6]},
            )
        )
        writer.write(a_completion(stream=True, seed=1, **end))
        head = await reader.readuntil(b"data: ")
        first = await reader.readuntil(b"\n\n")
        status = await self._status_of_delete(json.loads(first)["id"])
        events = head + first + await reader.readuntil(b"\r\n0\r\n\r\n")
        was_cancelled = b'"code":"request_cancelled"' in events
        assert was_cancelled == (status == 200), (status, events)
        assert was_cancelled != (b"data: [DONE]" in events)
        if was_cancelled and "n" not in end:
            assert b'"finish_reason":"' not in events
        self.length = max(1, self.length - 1) if was_cancelled else self.length + 1
        return f"delete {status}"

    async def _status_of_delete(self, request_id: str) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(
            f"DELETE /v1/requests/{request_id} HTTP/1.1\r\nhost: engine\r\n"
            f"authorization: Bearer {key_of('acme')}\r\n\r\n".encode()
        )
        line = await reader.readline()
        writer.close()
        return int(line.split()[1])


def test_a_request_that_is_ended_at_its_last_token_has_one_end() -> None:
    async def callers(port: int, text: str) -> Counter[str]:
        each = (LastToken(port, text, random.Random(seed)) for seed in range(AT_ONCE))
        ends = await asyncio.gather(*(one.tries(TRIES // AT_ONCE) for one in each))
        return sum(ends, Counter())

    with a_running_engine(step_seconds=0.001) as engine:
        answer = engine.openai().completions.create(
            model=MODEL, prompt="Hello", max_tokens=1000, seed=1
        )
        ends = asyncio.run(callers(engine.port, answer.choices[0].text))
        check_nothing_is_left(engine)
        stats = engine.stats()
        by_delete = sum(
            count for key, count in stats.cancelled.items() if key.cause.value == "delete"
        )
    assert ends.total() == TRIES
    # Both ends did happen, so that there was something to tell apart.
    assert min(ends["delete 200"], ends["delete 404"]) > TRIES // 10
    # A cancel takes out one choice or both.
    assert ends["delete 200"] <= by_delete <= 2 * ends["delete 200"]


def check_nothing_is_left(engine: RunningEngine) -> None:
    generations = engine.service.generations
    eventually(lambda: not generations.running_ids and engine.is_idle(), "an empty engine")
    assert not generations._by_request
    assert not engine.service.engine._live
    stats = engine.stats()
    acme = stats.scheduler.tenants["acme"]
    assert stats.scheduler.arrivals == acme.finished + acme.cancelled
    assert sum(stats.cancelled.values()) == acme.cancelled
    assert (stats.scheduler.kv_used_blocks, stats.tokens_after_cancel) == (0, 0)


def test_what_has_ended_but_is_not_read_yet_can_not_be_cancelled() -> None:
    with (
        a_running_engine() as engine,
        a_raw_request(engine.port, stream=True, max_tokens=4000, receive_buffer=32_768) as reader,
    ):
        eventually(lambda: acme_finished(engine) == 1, "its last token")
        [request_id] = engine.service.generations.running_ids
        answer = engine.http().delete(f"/v1/requests/{request_id}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")
        events = read_events(reader)
        assert events.count(b'"finish_reason":"length"') == 1
        assert b"[DONE]" in events
        assert b"error" not in events


def test_of_two_cancels_at_once_one_is_told_that_it_did_it() -> None:
    policy = a_snapshot(a_keyed_tenant("acme"), a_keyed_tenant("zeta"))
    with (
        a_running_engine(policy, step_seconds=0.001) as engine,
        a_raw_request(engine.port, stream=True, n=2) as reader,
        ThreadPoolExecutor(max_workers=4) as callers,
    ):
        eventually(lambda: engine.stats().scheduler.running == 2, "running choices")
        engine.gate.shut()
        [request_id] = engine.service.generations.running_ids
        path = f"/v1/requests/{request_id}"
        clients = [engine.http() for _ in range(4)]
        answers = [callers.submit(client.delete, path) for client in clients]
        assert engine.http("zeta").delete(path).status_code == 404
        assert not any(answer.done() for answer in answers)
        engine.gate.open()
        statuses = sorted(answer.result().status_code for answer in answers)
        assert statuses == [200, 404, 404, 404]
        assert engine.http().delete(path).status_code == 404
        events = read_events(reader)
        assert events.count(b'"code":"request_cancelled"') == 1
        assert b'"finish_reason":"' not in events
        check_nothing_is_left(engine)


def test_a_cancelled_request_holds_no_kv_when_its_cancel_is_answered() -> None:
    with (
        a_running_engine(step_seconds=0.01) as engine,
        a_raw_request(engine.port, stream=True),
    ):
        eventually(lambda: engine.stats().scheduler.running == 1, "a running request")
        [request_id] = engine.service.generations.running_ids
        assert engine.http().delete(f"/v1/requests/{request_id}").status_code == 200
        assert engine.stats().scheduler.kv_used_blocks == 0


def acme_finished(engine: RunningEngine) -> int:
    acme = engine.stats().scheduler.tenants.get("acme")
    return 0 if acme is None else acme.finished
