import hashlib

import pytest

from tidegate_operator.credentials import CredentialsError, completed
from tidegate_operator.keys import parse_signing_key, public_key_text


def test_what_is_missing_is_made_and_belongs_together() -> None:
    made = completed({})
    key = parse_signing_key(made["operator"]["signing-key"].encode())
    assert made["engine"]["verify-key"] == public_key_text(key)
    for part in ("operator", "engine"):
        password = made[part]["redis-password"]
        assert made["redis"][f"{part}-sha256"] == hashlib.sha256(password.encode()).hexdigest()
    assert made["operator"]["redis-password"] != made["engine"]["redis-password"]
    assert len(made["engine"]["admin-token"]) >= 32
    assert len(made["operator"]["console-token"]) >= 32
    assert "signing-key" not in made["engine"]
    assert completed({}) != made


def test_what_is_there_stays_whatever_is_missing_beside_it() -> None:
    made = completed({})
    assert completed(made) == made
    without_hash = {**made, "redis": {}}
    assert completed(without_hash) == made
    assert completed({"engine": {"admin-token": "mine"}})["engine"]["admin-token"] == "mine"


def test_contradictions_are_named_and_nothing_is_replaced() -> None:
    made, other = completed({}), completed({})
    for part, key in (("engine", "verify-key"), ("redis", "engine-sha256")):
        mixed = {**made, part: other[part]}
        with pytest.raises(CredentialsError, match=f"Secret of the {part}, key '{key}'") as refused:
            completed(
                {**mixed, "redis": {}} if part == "engine" else {**mixed, "redis": {key: "x"}}
            )
        assert (refused.value.part, refused.value.key) == (part, key)
    with pytest.raises(CredentialsError, match=r"verify-key.*lacks.*delete"):
        completed({"engine": made["engine"]})
    with pytest.raises(CredentialsError, match=r"signing-key.*neither PEM nor base64"):
        completed({"operator": {"signing-key": "nonsense!"}})
