import time

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from tidegate_engine.server.front_door import FrontDoor


@pytest.fixture
def door() -> FrontDoor:
    return FrontDoor(time.monotonic)


def test_probes_tell_life_from_readiness_while_a_model_loads(door: FrontDoor) -> None:
    client = TestClient(door)
    alive, ready = client.get("/healthz"), client.get("/readyz")
    assert (alive.status_code, alive.json()) == (200, {"alive": True})
    assert (ready.status_code, ready.json()) == (503, {"ready": False, "lacking": ["model"]})


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/any")],
)
def test_all_else_is_told_to_come_back(door: FrontDoor, method: str, path: str) -> None:
    answer = TestClient(door).request(method, path, headers={"x-request-id": "my-own"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] in {"5", "6"}
    assert answer.headers["x-tidegate-reason"] == "model_loading"
    assert answer.headers["x-request-id"] == "my-own"
    assert answer.json()["error"]["code"] == "model_loading"
    assert answer.json()["error"]["type"] == "server_error"


def test_an_open_door_passes_everything_on(door: FrontDoor) -> None:
    client = TestClient(door)
    assert client.get("/readyz").status_code == 503
    door.open(PlainTextResponse("within"))
    assert client.get("/readyz").text == "within"
