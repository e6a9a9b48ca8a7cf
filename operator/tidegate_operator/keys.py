"""Ed25519 keys: the operator signs policies, engines verify them.

    python -m tidegate_operator.keys FILE

makes a private key in FILE, unless there is one, and prints the public key for the engines.
"""

import base64
import binascii
import os
import sys
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from tidegate_policies.envelope import Sign, Verify


class SigningKeyError(ValueError):
    """A file holds no usable Ed25519 private key.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"signing key file {path}: {problem}")
        self.path = path


def generate_signing_key(path: Path) -> Ed25519PrivateKey:
    """Make a private key and store it as PEM, readable by the owner alone.

    Raises:
        FileExistsError: There is a file already; it is not touched.
    """
    key = Ed25519PrivateKey.generate()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(private_key_text(key))
    return key


def load_signing_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key: PEM, or base64 of the raw 32 bytes.

    Raises:
        SigningKeyError: The file can't be read or holds something else.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SigningKeyError(path, error.strerror or "can't be read") from error
    try:
        return parse_signing_key(content)
    except ValueError as error:
        raise SigningKeyError(path, str(error)) from error


def parse_signing_key(content: bytes) -> Ed25519PrivateKey:
    """Read a private key: PEM, or base64 of the raw 32 bytes.

    Raises:
        ValueError: It is something else.
    """
    try:
        if content.lstrip().startswith(b"-----BEGIN"):
            key = load_pem_private_key(content, password=None)
        else:
            key = Ed25519PrivateKey.from_private_bytes(base64.b64decode(content, validate=False))
    except (ValueError, TypeError, UnsupportedAlgorithm, binascii.Error) as error:
        raise ValueError(f"is neither PEM nor base64 of 32 bytes: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        # One kind of error for one kind of caller: the content is wrong, whatever its type.
        raise ValueError("is not an Ed25519 key")  # noqa: TRY004
    return key


def private_key_text(key: Ed25519PrivateKey) -> str:
    """Return the private key as PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def public_key_text(key: Ed25519PrivateKey) -> str:
    """Return what engines verify with: base64 of the raw 32-byte public key."""
    return base64.b64encode(key.public_key().public_bytes_raw()).decode()


def signer(key: Ed25519PrivateKey) -> Sign:
    """Return the function that signs with `key`; a signature's text is base64 of its 64 bytes."""
    return lambda message: base64.b64encode(key.sign(message)).decode()


def verifier(public_key: str) -> Verify:
    """Return the function that checks signatures against `public_key_text()`."""
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public_key))

    def verify(message: bytes, signature: str) -> bool:
        try:
            key.verify(base64.b64decode(signature), message)
        except (InvalidSignature, ValueError):
            return False
        return True

    return verify


def main(arguments: list[str]) -> int:
    """Make a key where there is none, and print its public half."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m tidegate_operator.keys FILE\n")
        return 2
    path = Path(arguments[0])
    key = load_signing_key(path) if path.exists() else generate_signing_key(path)
    sys.stdout.write(public_key_text(key) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
