import hashlib
from dataclasses import asdict, replace

import pytest

from tidegate_policies.envelope import Envelope, EnvelopeRefusedError, seal, unseal
from tidegate_policies.snapshot import PolicySnapshot, text_digest
from tidegate_testing.policies import POOL, a_snapshot, a_tenant


def sign(message: bytes) -> str:
    return hashlib.sha256(b"secret" + message).hexdigest()


def verify(message: bytes, signature: str) -> bool:
    return signature == sign(message)


def sealed(snapshot: PolicySnapshot | None = None, revision: int = 5) -> Envelope:
    return seal(
        snapshot or a_snapshot(),
        pool_uid="uid-1",
        revision=revision,
        issued_at="2026-01-01T00:00:00Z",
        sign=sign,
    )


def opened(envelope: Envelope, *, newer_than: int = 4, pool: str = POOL) -> PolicySnapshot:
    return unseal(envelope, pool=pool, newer_than=newer_than, verify=verify)


def test_an_engine_gets_the_snapshot_that_was_sealed() -> None:
    travelled = Envelope.from_json(sealed().to_json())
    assert opened(travelled) == a_snapshot()


@pytest.mark.parametrize("field", ["pool", "pool_uid", "digest", "issued_at"])
def test_no_field_can_be_changed_under_the_signature(field: str) -> None:
    with pytest.raises(EnvelopeRefusedError) as refused:
        opened(Envelope(**{**asdict(sealed()), field: "forged"}))
    assert refused.value.reason == "BadSignature"


def test_a_revision_cannot_be_raised_nor_a_body_swapped() -> None:
    with pytest.raises(EnvelopeRefusedError) as refused:
        opened(replace(sealed(), revision=99))
    assert refused.value.reason == "BadSignature"
    with pytest.raises(EnvelopeRefusedError) as refused:
        opened(replace(sealed(), body=a_snapshot(a_tenant(weight=9)).to_text()))
    assert refused.value.reason == "DigestMismatch"


@pytest.mark.parametrize("newer_than", [5, 6])
def test_a_revision_at_or_below_the_one_in_force_is_refused(newer_than: int) -> None:
    with pytest.raises(EnvelopeRefusedError) as refused:
        opened(sealed(), newer_than=newer_than)
    assert refused.value.reason == "StaleRevision"


def test_another_pools_policy_is_refused() -> None:
    with pytest.raises(EnvelopeRefusedError) as refused:
        opened(sealed(), pool="serving/other")
    assert refused.value.reason == "WrongPool"


def test_a_signed_body_that_no_engine_could_obey_is_refused() -> None:
    body = a_snapshot(a_tenant(weight=7)).to_text().replace("7", "-7")
    bad = replace(sealed(), body=body, digest=text_digest(body))
    with pytest.raises(EnvelopeRefusedError, match=r"tenants\.0\.weight") as refused:
        opened(replace(bad, signature=sign(bad.message())))
    assert refused.value.reason == "InvalidSnapshot"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pool": 1}', sealed().to_json()[:-9]])
def test_a_malformed_envelope_is_refused(text: str) -> None:
    with pytest.raises(EnvelopeRefusedError) as refused:
        Envelope.from_json(text)
    assert refused.value.reason == "Malformed"
