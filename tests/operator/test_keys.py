import base64
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tidegate_operator.keys import (
    SigningKeyError,
    generate_signing_key,
    load_signing_key,
    main,
    public_key_text,
    signer,
    verifier,
)


def test_engines_verify_what_the_operator_signed(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    public = public_key_text(generate_signing_key(path))
    sign, verify = signer(load_signing_key(path)), verifier(public)
    signature = sign(b"policy")
    assert len(base64.b64decode(signature)) == 64
    assert verify(b"policy", signature)
    assert not verify(b"other policy", signature)
    assert not verify(b"policy", "not base64!")
    other = generate_signing_key(tmp_path / "other.pem")
    assert not verify(b"policy", signer(other)(b"policy"))


def test_key_file_is_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    generate_signing_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        generate_signing_key(path)


def test_raw_key_in_base64_is_read_as_well(tmp_path: Path) -> None:
    key = generate_signing_key(tmp_path / "key.pem")
    raw = tmp_path / "raw"
    raw.write_bytes(base64.b64encode(key.private_bytes_raw()) + b"\n")
    assert public_key_text(load_signing_key(raw)) == public_key_text(key)


def test_what_is_no_key_is_refused_with_the_file_named(tmp_path: Path) -> None:
    elliptic = generate_private_key(SECP256R1()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    path = tmp_path / "key"
    for content in (b"", b"short", elliptic, b"-----BEGIN PRIVATE KEY-----\n"):
        path.write_bytes(content)
        with pytest.raises(SigningKeyError, match=str(path)):
            load_signing_key(path)
    with pytest.raises(SigningKeyError, match="missing"):
        load_signing_key(tmp_path / "missing")


def test_command_makes_a_key_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key.pem"
    assert main([str(path)]) == main([str(path)]) == 0
    first, second = capsys.readouterr().out.split()
    assert first == second == public_key_text(load_signing_key(path))
