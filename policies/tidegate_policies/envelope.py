"""The signed wrapper in which a policy snapshot travels from the operator to the engines.

Signing and verifying are passed in as functions, so that this module needs no key and no library:
the operator alone holds the private key, engines hold the public one and can't forge.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from tidegate_policies.problems import SnapshotError, first_problem
from tidegate_policies.snapshot import PolicySnapshot, text_digest

Sign = Callable[[bytes], str]
"""Signs a message; returns the signature as text."""

Verify = Callable[[bytes, str], bool]
"""Tells whether a signature, as text, belongs to a message."""


class EnvelopeRefusedError(ValueError):
    """An engine doesn't take an envelope.

    Attributes:
        reason: Machine-readable, in PascalCase: `Malformed`, `BadSignature`, `WrongPool`,
            `DigestMismatch`, `InvalidSnapshot` or `StaleRevision`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """One revision of one pool's policy, signed.

    Attributes:
        pool: `namespace/name`.
        pool_uid: `metadata.uid` of the EnginePool: a recreated pool is another pool.
        revision: Grows with every published change of the pool.
        digest: Of `body`, as `text_digest` has it.
        issued_at: RFC 3339; for people only, no decision looks at it.
        body: The snapshot's canonical text, exactly the bytes that were digested.
        signature: Over `message()`.
    """

    pool: str
    pool_uid: str
    revision: Annotated[int, Field(ge=1)]
    digest: str
    issued_at: str
    body: str
    signature: str = ""

    def message(self) -> bytes:
        """Return what is signed: every field but the signature, the body through its digest."""
        parts = [self.pool, self.pool_uid, str(self.revision), self.digest, self.issued_at]
        return json.dumps(["tidegate-policy-v1", *parts]).encode()

    def to_json(self) -> str:
        """Write the text that is stored in Redis and on the engine's disk."""
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> "Envelope":
        """Read an envelope; nothing is verified yet.

        Raises:
            EnvelopeRefusedError: Malformed; the message names the field.
        """
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError as error:
            raise EnvelopeRefusedError(
                "Malformed", first_problem(error, whole="envelope")
            ) from error


def seal(
    snapshot: PolicySnapshot, *, pool_uid: str, revision: int, issued_at: str, sign: Sign
) -> Envelope:
    """Wrap and sign `snapshot` as `revision`."""
    unsigned = Envelope(
        pool=snapshot.pool,
        pool_uid=pool_uid,
        revision=revision,
        digest=snapshot.digest,
        issued_at=issued_at,
        body=snapshot.to_text(),
    )
    return Envelope(**{**asdict(unsigned), "signature": sign(unsigned.message())})


def unseal(envelope: Envelope, *, pool: str, newer_than: int, verify: Verify) -> PolicySnapshot:
    """Check an envelope from an untrusted place and return its snapshot.

    Args:
        envelope: As read from Redis or disk.
        pool: The pool of the engine that asks.
        newer_than: The revision in force; 0 for none.
        verify: Checks a signature against the operator's public key.

    Raises:
        EnvelopeRefusedError: With the first reason that applies; nothing in it may be used then.
    """
    check_envelope(envelope, pool=pool, newer_than=newer_than, verify=verify)
    if text_digest(envelope.body) != envelope.digest:
        raise EnvelopeRefusedError("DigestMismatch", "the body is not the one that was signed")
    try:
        snapshot = PolicySnapshot.from_text(envelope.body)
    except SnapshotError as error:
        raise EnvelopeRefusedError("InvalidSnapshot", str(error)) from error
    if snapshot.pool != pool:
        raise EnvelopeRefusedError("WrongPool", f"the snapshot is for pool {snapshot.pool!r}")
    return snapshot


def check_envelope(envelope: Envelope, *, pool: str, newer_than: int, verify: Verify) -> None:
    """Check all of an envelope but its body; the arguments are those of `unseal`.

    Raises:
        EnvelopeRefusedError: With the first reason that applies.
    """
    if not verify(envelope.message(), envelope.signature):
        raise EnvelopeRefusedError("BadSignature", "the signature is not the operator's")
    if envelope.pool != pool:
        raise EnvelopeRefusedError("WrongPool", f"the policy is for pool {envelope.pool!r}")
    if envelope.revision <= newer_than:
        raise EnvelopeRefusedError(
            "StaleRevision", f"revision {envelope.revision} is not newer than {newer_than}"
        )


_ADAPTER = TypeAdapter(Envelope)
