"""Deadlines that make no sense, over HTTP; bodies and messages that end a request early."""

import contextlib
import socket

import httpx
import pytest

from tidegate_engine.model.bytes_tokenizer import BytesTokenizer
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import MODEL, RunningEngine, a_running_engine, a_served_model, key_of
from tidegate_testing.raw_requests import a_head, connect

SHORT = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}
WRONG = [
    "86400001",
    "9" * 400,
    "9" * 20_000,
    "-1",
    "-0",
    "NaN",
    "inf",
    "1e309",
    "1e3",
    "",
    "0",
    "0.5",
    "١٢٣",
    "\uff11\uff12",
    "1 2",
    "0x10",
]


def ask(engine: RunningEngine, deadline: str, path: str = "/v1/completions") -> httpx.Response:
    headers = [
        (b"authorization", f"Bearer {key_of('acme')}".encode()),
        (b"x-slo-ttft-ms", deadline.encode()),
    ]
    return httpx.post(f"{engine.base_url}{path}", json=SHORT, headers=headers)


@pytest.mark.parametrize("deadline", WRONG)
def test_a_wrong_deadline_is_refused_by_name_and_limit(
    engine: RunningEngine, deadline: str
) -> None:
    refused = ask(engine, deadline)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "invalid_header")
    assert error["param"] == "x-slo-ttft-ms"
    assert "from 1 to 86400000" in error["message"]
    assert refused.headers["x-tidegate-reason"] == "invalid_header"


@pytest.mark.parametrize("deadline", ["1", "86400000", "0500"])
def test_a_deadline_that_makes_sense_is_taken(engine: RunningEngine, deadline: str) -> None:
    assert ask(engine, deadline).status_code == 200


@pytest.mark.parametrize(
    "repeated",
    [
        ("authorization", f"Bearer {key_of('nobody')}"),
        ("x-slo-ttft-ms", "900"),
        ("x-tidegate-tier", "bogus"),
    ],
)
def test_a_header_that_says_who_calls_or_how_urgently_may_come_once(
    engine: RunningEngine, repeated: tuple[str, str]
) -> None:
    name, _ = repeated
    given = {
        "authorization": f"Bearer {key_of('acme')}",
        "x-slo-ttft-ms": "500",
        "x-tidegate-tier": "standard",
    }
    url = f"{engine.base_url}/v1/completions"
    assert httpx.post(url, json=SHORT, headers=given).status_code == 200
    refused = httpx.post(url, json=SHORT, headers=[*given.items(), repeated])
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "invalid_header")
    assert (error["param"], error["message"]) == (name, f"{name} is to be given once.")


def test_a_body_that_breaks_off_is_counted_by_its_reason(engine: RunningEngine) -> None:
    reason = {"tenant": "acme", "reason": "client_disconnected"}
    before = engine.sample("tidegate_shed_total", **reason) or 0
    with connect(engine.port) as client:
        client.sendall(a_head(100) + b"{")
        client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            client.recv(1)
    eventually(
        lambda: engine.sample("tidegate_shed_total", **reason) == before + 1, "a counted refusal"
    )


class StrictTokenizer(BytesTokenizer):
    """Its chats have no messages of the system."""

    def apply_chat_template(self, messages: object) -> list[int]:  # noqa: ARG002
        raise ValueError("messages: no template for a system message")


def test_messages_that_the_template_refuses_are_named() -> None:
    with a_running_engine(model=a_served_model(tokenizer=StrictTokenizer())) as engine:
        chat = {"model": MODEL, "messages": [{"role": "system", "content": "Be kind."}]}
        refused = engine.http().post("/v1/chat/completions", json=chat)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "invalid_messages")
        assert error["param"] == "messages"
