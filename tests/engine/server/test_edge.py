"""What HTTP can throw at the engine before anybody looks at a prompt."""

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tidegate_engine.server.body import MAX_CONTAINERS
from tidegate_engine.server.edge import MAX_BODY_BYTES
from tidegate_engine.server.encoding import Encoders
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import (
    MODEL,
    HeldTokenizer,
    RunningEngine,
    a_running_engine,
    a_served_model,
    key_of,
)
from tidegate_testing.raw_requests import ENDLESS

PATH = "/v1/completions"
BODY = {"model": MODEL, "prompt": "Hello", "max_tokens": 3}
JSON = {"content-type": "application/json"}


def post(
    engine: RunningEngine,
    content: bytes | str | None = None,
    *,
    tenant: str = "acme",
    headers: Mapping[str, str] = JSON,
) -> httpx.Response:
    sent = json.dumps(BODY) if content is None else content
    return engine.http(tenant).post(PATH, content=sent, headers=dict(headers))


def check_error(answer: httpx.Response, status: int, code: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-tidegate-reason"] == code
    assert answer.headers["x-request-id"]
    assert answer.headers["content-type"] == "application/json"


def talk(engine: RunningEngine, *requests: bytes) -> bytes:
    """Send raw bytes over one connection, and read until the server closes it."""
    with socket.create_connection(("127.0.0.1", engine.port), timeout=20) as connection:
        for request in requests:
            connection.sendall(request)
        received = b""
        while more := connection.recv(1 << 16):
            received += more
        return received


def raw(path: str, *headers: str, body: bytes = b"", version: str = "1.1") -> bytes:
    method = "POST" if body else "GET"
    lines = [
        f"{method} {path} HTTP/{version}",
        "host: engine",
        f"authorization: Bearer {key_of('acme')}",
        *headers,
    ]
    if body:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def test_a_client_names_its_request_and_cancels_it_by_that_name() -> None:
    with a_running_engine(step_seconds=0.001) as engine:
        stream = engine.openai().completions.create(
            model=MODEL,
            prompt="Hello",
            max_tokens=50_000,
            stream=True,
            extra_headers={"x-request-id": "job:7_a.b"},
        )
        first = next(iter(stream))
        assert stream.response.headers["x-request-id"] == "job:7_a.b"
        assert first.id.startswith("cmpl-job:7_a.b-")
        assert engine.http().delete("/v1/requests/job:7_a").status_code == 404
        assert engine.http("zeta").delete("/v1/requests/job:7_a.b").status_code == 401
        cancelled = engine.http().delete("/v1/requests/job:7_a.b")
        assert cancelled.json() == {"id": "job:7_a.b", "object": "request", "cancelled": True}
        assert engine.is_idle()


def test_requests_of_one_name_are_cancelled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_running_engine(step_seconds=0.001) as engine:
        generations = engine.service.generations
        cancel, running, most = generations.cancel, 0, 0

        async def note_cancel(generation_id: str, *, tenant: str) -> bool:
            nonlocal running, most
            running += 1
            most = max(most, running)
            was_running = await cancel(generation_id, tenant=tenant)
            running -= 1
            return was_running

        monkeypatch.setattr(generations, "cancel", note_cancel)
        streams = [
            engine.openai().completions.create(
                model=MODEL,
                prompt="Hello",
                max_tokens=ENDLESS,
                stream=True,
                extra_headers={"x-request-id": "job"},
            )
            for _ in range(3)
        ]
        assert engine.http().delete("/v1/requests/job").status_code == 200
        assert engine.is_idle()
        assert most == len(streams)


def test_two_requests_may_have_one_name(engine: RunningEngine) -> None:
    answers = [post(engine, headers={**JSON, "x-request-id": "twice"}) for _ in range(2)]
    assert [answer.headers["x-request-id"] for answer in answers] == ["twice", "twice"]
    assert answers[0].json()["id"] != answers[1].json()["id"]


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "a/b"])
def test_a_name_that_could_not_be_told_again_is_refused(engine: RunningEngine, name: str) -> None:
    refused = post(engine, headers={**JSON, "x-request-id": name})
    check_error(refused, 400, "invalid_header")
    assert refused.json()["error"]["param"] == "x-request-id"
    assert refused.headers["x-request-id"].startswith("cmpl-")


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/json; charset=latin-1",
        "application/jsonp",
        "\xff",
    ],
)
def test_a_body_of_another_media_type_is_refused(engine: RunningEngine, content_type: str) -> None:
    refused = post(engine, headers={"content-type": content_type.encode("latin-1")})  # type: ignore[dict-item]
    check_error(refused, 415, "unsupported_media_type")


@pytest.mark.parametrize("content_type", ["application/json; charset=UTF-8", "Application/JSON"])
def test_json_may_be_announced_in_several_ways(engine: RunningEngine, content_type: str) -> None:
    assert post(engine, headers={"content-type": content_type}).status_code == 200


def test_a_compressed_body_is_refused(engine: RunningEngine) -> None:
    check_error(
        post(engine, b"\x1f\x8b", headers={**JSON, "content-encoding": "gzip"}),
        415,
        "unsupported_media_type",
    )


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "latin-1"])
def test_json_in_another_encoding_is_refused(engine: RunningEngine, encoding: str) -> None:
    content = json.dumps({**BODY, "prompt": "Grüße"}, ensure_ascii=False).encode(encoding)
    check_error(post(engine, content), 400, "invalid_json")


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 1_000_000,
        b'{"metadata":' * 300_000,
        b'{"model": "' + MODEL.encode() + b'", "prompt": ' + b"[" * 2_000_000,
    ],
)
def test_deeply_nested_json_is_refused(engine: RunningEngine, content: bytes) -> None:
    check_error(post(engine, content), 400, "invalid_json")


@pytest.mark.parametrize("item", [b"{},", b"[],", b'[{"":"["}],'])
def test_a_body_of_very_many_objects_is_refused_before_it_is_parsed(
    engine: RunningEngine, item: bytes
) -> None:
    content = b'{"prompt": [' + item * (MAX_CONTAINERS + 1) + b"1]}"
    refused = post(engine, content)
    check_error(refused, 400, "invalid_json")
    assert str(MAX_CONTAINERS) in refused.json()["error"]["message"]


def test_texts_may_hold_as_many_brackets_as_they_like(engine: RunningEngine) -> None:
    prompt = '[{"' * MAX_CONTAINERS + "\\"
    # 65536 tokens fit into the engine.
    check_error(post(engine, json.dumps({**BODY, "prompt": prompt})), 400, "prompt_too_long")


def test_a_body_above_the_limit_is_refused_with_the_limit(engine: RunningEngine) -> None:
    refused = post(engine, b" " * (10 << 20))
    check_error(refused, 413, "body_too_large")
    assert str(MAX_BODY_BYTES) in refused.json()["error"]["message"]


def test_so_is_one_that_comes_in_chunks(engine: RunningEngine) -> None:
    chunks = (b" " * 65_536 for _ in range(100))
    refused = engine.http().post(PATH, content=chunks, headers=JSON)
    check_error(refused, 413, "body_too_large")


def test_a_body_up_to_the_limit_is_read(engine: RunningEngine) -> None:
    content = json.dumps(BODY).encode()
    assert post(engine, content + b" " * (MAX_BODY_BYTES - len(content))).status_code == 200


def test_nobodys_body_is_read(engine: RunningEngine) -> None:
    check_error(post(engine, b"{", tenant="nobody"), 401, "invalid_api_key")
    check_error(post(engine, b" " * (5 << 20), tenant="nobody"), 401, "invalid_api_key")


def test_a_prompt_of_many_token_ids_is_refused_with_the_models_limit() -> None:
    with a_running_engine(blocks=64) as engine:
        refused = post(engine, json.dumps({**BODY, "prompt": [1] * 1_000_000}))
        check_error(refused, 400, "prompt_too_long")
        assert "1000000" in refused.json()["error"]["message"]


def test_a_path_with_a_slash_too_many_is_unknown(engine: RunningEngine) -> None:
    check_error(engine.http().post(PATH + "/", json=BODY), 404, "unknown_path")


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "OPTIONS", "DELETE"])
def test_a_wrong_method_is_an_error_object(engine: RunningEngine, method: str) -> None:
    answer = engine.http().request(method, PATH)
    check_error(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


def test_who_asks_before_sending_a_body_is_told_to_go_on(engine: RunningEngine) -> None:
    body = json.dumps(BODY).encode()
    answer = talk(engine, raw(PATH, "expect: 100-continue", "connection: close", body=body))
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


def test_who_asks_before_sending_too_much_is_told_not_to(engine: RunningEngine) -> None:
    head = raw(
        PATH,
        "expect: 100-continue",
        "connection: close",
        "content-type: application/json",
        f"content-length: {MAX_BODY_BYTES + 1}",
    ).replace(b"GET", b"POST", 1)
    answer = talk(engine, head)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in answer


def test_old_clients_are_served_and_their_connection_closed(engine: RunningEngine) -> None:
    body = json.dumps(BODY).encode()
    answer = talk(engine, raw(PATH, "connection: keep-alive", body=body, version="1.0"))
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close" in head
    assert len(json.loads(content)["choices"][0]["text"]) == 3


def test_what_is_no_http_gets_400(engine: RunningEngine) -> None:
    assert talk(engine, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert engine.http().get("/healthz").status_code == 200


class NotingTokenizer(HeldTokenizer):
    """Notes what it was asked to encode; waits, then encodes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.seen.append(text[0])
        return super().encode(text)


def test_a_prompt_of_a_client_that_left_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = NotingTokenizer()
    came: list[str] = []
    left: list[str] = []
    run = Encoders.run

    async def note(encoders: Encoders, tenant: str, encode: Callable[[], object]) -> object:
        came.append(tenant)
        try:
            return await run(encoders, tenant, encode)
        except asyncio.CancelledError:
            left.append(tenant)
            raise

    monkeypatch.setattr(Encoders, "run", note)
    with (
        a_running_engine(model=a_served_model(tokenizer=tokenizer)) as engine,
        ThreadPoolExecutor() as clients,
    ):
        patient = clients.submit(post, engine, json.dumps({**BODY, "prompt": "a" * 5000}))
        eventually(lambda: tokenizer.seen == ["a"], "a busy encoder")
        body = json.dumps({**BODY, "prompt": "c" * 5000}).encode()
        with socket.create_connection(("127.0.0.1", engine.port)) as connection:
            connection.sendall(raw(PATH, body=body))
            eventually(lambda: came == ["acme"] * 2, "a queued prompt")
        eventually(lambda: left == ["acme"], "the prompt to be dropped")
        tokenizer.released.set()
        assert patient.result().status_code == 200
        assert tokenizer.seen == ["a"]
