import pytest

from tidegate_engine.server.request_id import MAX_NAME_CHARS, is_name, is_named, new_request_id


@pytest.mark.parametrize("name", ["a", "4bf92f35-77b3", "job:7_a.b", "x" * MAX_NAME_CHARS])
def test_a_request_is_found_by_its_name_and_its_ids(name: str) -> None:
    assert is_name(name)
    request_id = new_request_id("/v1/completions", name)
    assert request_id.startswith("cmpl-")
    for found_by in (name, request_id, f"{request_id}.3"):
        assert is_named(f"{request_id}.3", found_by)
    assert is_named(request_id, name)
    assert not is_named(f"{request_id}.3", f"{request_id}.4")
    assert not is_named(request_id, name + "x")
    assert not is_named(request_id, "")


def test_two_requests_of_one_name_have_two_ids() -> None:
    first, second = (new_request_id("/v1/chat/completions", "job") for _ in range(2))
    assert first != second
    assert not is_named(first, second)


def test_a_request_without_a_name_has_none() -> None:
    request_id = new_request_id("/v1/models", None)
    assert is_named(request_id, request_id)
    assert not is_named(request_id, "")
    assert not is_named(request_id, request_id.removeprefix("req-"))


@pytest.mark.parametrize("name", ["", "a b", "é", "a/b", 'a"', "x" * (MAX_NAME_CHARS + 1)])
def test_a_name_can_stand_in_a_path_and_in_a_header(name: str) -> None:
    assert not is_name(name)
