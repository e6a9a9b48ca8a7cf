"""Certificates, keys and kubeconfigs of one control plane: a CA of its own, valid for a month."""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID = timedelta(days=30)
# Clocks of virtual machines jump; a certificate of the future would be refused.
BACKDATED = timedelta(hours=1)


class Pki:
    """A certificate authority in a folder, and what it has signed.

    Elliptic-curve keys throughout: an RSA key costs a noticeable part of the start.
    """

    def __init__(self, folder: Path) -> None:
        """Makes the authority and the keys that sign service-account tokens."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _subject("tidegate-devcluster", ())
        certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(is_ca=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = folder / "ca.crt"
        self.ca.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        service_accounts = ec.generate_private_key(ec.SECP256R1())
        self.service_account_key = self._write_key("sa.key", service_accounts)
        self.service_account_public_key = folder / "sa.pub"
        self.service_account_public_key.write_bytes(
            service_accounts.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )

    def server(self, name: str, hosts: Sequence[str]) -> tuple[Path, Path]:
        """Returns certificate and key of a server under these addresses and host names."""
        return self._sign(name, _subject(name, ()), ExtendedKeyUsageOID.SERVER_AUTH, hosts)

    def user(self, name: str, groups: Sequence[str] = ()) -> tuple[Path, Path]:
        """Returns certificate and key by which the API server knows the user and its groups."""
        file = name.replace(":", "-").replace("/", "-")
        return self._sign(file, _subject(name, groups), ExtendedKeyUsageOID.CLIENT_AUTH, ())

    def kubeconfig(self, server: str, name: str, groups: Sequence[str] = ()) -> Path:
        """Writes a kubeconfig with everything inline, so that the one file can be passed on."""
        certificate, key = self.user(name, groups)
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "devcluster",
                    "cluster": {"server": server, "certificate-authority-data": _base64(self.ca)},
                }
            ],
            "users": [
                {
                    "name": name,
                    "user": {
                        "client-certificate-data": _base64(certificate),
                        "client-key-data": _base64(key),
                    },
                }
            ],
            "contexts": [
                {"name": "devcluster", "context": {"cluster": "devcluster", "user": name}}
            ],
            "current-context": "devcluster",
        }
        path = certificate.with_suffix(".kubeconfig")
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(content))
        return path

    def _sign(
        self, file: str, subject: x509.Name, usage: x509.ObjectIdentifier, hosts: Sequence[str]
    ) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(subject, self._name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(is_ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        )
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        certificate = self._folder / f"{file}.crt"
        certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        return certificate, self._write_key(f"{file}.key", key)

    def _write_key(self, file: str, key: ec.EllipticCurvePrivateKey) -> Path:
        path = self._folder / file
        path.touch(mode=0o600)
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                # The API server reads service-account keys in this form.
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        return path


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + VALID)
    )


def _subject(name: str, groups: Sequence[str]) -> x509.Name:
    organizations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*organizations, x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
