"""Who gets in."""

from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from tidegate_cli.console.gate import COOKIE, Gate, is_loopback

TOKEN = "a token of enough characters"


async def page(_: Request) -> PlainTextResponse:
    return PlainTextResponse("inside")


async def live(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("live")
    await socket.close()


def a_client(token: str | None, host: str) -> TestClient:
    inside = Starlette(
        routes=[Route("/", page), Route("/tenants", page), WebSocketRoute("/ws", live)]
    )
    return TestClient(Gate(inside, token=token), base_url=f"http://{host}", follow_redirects=False)


@pytest.fixture
def visitor() -> Iterator[TestClient]:
    with a_client(TOKEN, "console.example:8090") as client:
        yield client


@pytest.fixture
def neighbour() -> Iterator[TestClient]:
    with a_client(None, "127.0.0.1:8090") as client:
        yield client


def test_without_the_token_nothing_is_shown_but_where_to_enter_it(visitor: TestClient) -> None:
    answer = visitor.get("/tenants")
    assert answer.status_code == 401
    assert "inside" not in answer.text
    assert '<input id="token" name="token" type="password"' in answer.text
    with pytest.raises(WebSocketDisconnect), visitor.websocket_connect("/ws"):
        pass


def test_the_token_in_the_address_opens_and_is_left_behind(visitor: TestClient) -> None:
    answer = visitor.get("/tenants", params={"token": TOKEN, "id": "x y"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/tenants?id=x+y")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert visitor.get("/tenants").text == "inside"
    with visitor.websocket_connect("ws://console.example:8090/ws") as socket:
        assert socket.receive_text() == "live"


def test_the_token_can_be_typed_in(visitor: TestClient) -> None:
    wrong = visitor.post("/", data={"token": "a guess"})
    assert wrong.status_code == 401
    assert "That is not the token." in wrong.text
    assert visitor.post("/", data={"token": "x" * 5000}).status_code == 401
    assert visitor.post("/", data={"token": TOKEN}).status_code == 303
    assert visitor.get("/").text == "inside"


def test_the_token_of_another_console_does_not_open(visitor: TestClient) -> None:
    with a_client("another token of enough length", "console.example:8090") as other:
        other.get("/", params={"token": "another token of enough length"})
        visitor.cookies.set(COOKIE, other.cookies[COOKIE])
    assert visitor.get("/").status_code == 401


def test_on_loopback_no_token_is_needed_under_a_name_of_this_machine(neighbour: TestClient) -> None:
    assert neighbour.get("/").text == "inside"
    assert neighbour.get("/", headers={"host": "localhost:8090"}).text == "inside"
    # A name that somebody else makes point here.
    rebound = neighbour.get("/", headers={"host": "evil.example:8090"})
    assert (rebound.status_code, "inside" in rebound.text) == (403, False)


def test_another_sites_page_gets_no_connection(neighbour: TestClient) -> None:
    headers = {"origin": "https://evil.example"}
    with pytest.raises(WebSocketDisconnect), neighbour.websocket_connect("/ws", headers=headers):
        pass
    assert neighbour.get("/", headers=headers).status_code == 403
    own = {"origin": "http://127.0.0.1:8090"}
    assert neighbour.get("/", headers=own).text == "inside"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_is_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "localhost.evil.example", ""])
def test_nothing_else_is_loopback(host: str) -> None:
    assert not is_loopback(host)
