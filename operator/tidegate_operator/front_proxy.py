"""Knows the API server as a client: by the certificate with which it passes requests on.

As every extension of the API server: what signs that certificate, and which names it may have, the
API server publishes itself. It has authenticated and authorised what it passes on, so whoever may
connect here needs no further check.
"""

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tidegate_operator.kube import KubeApi

CONFIG_MAP = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"
"""Readable by the Role `extension-apiserver-authentication-reader`, which every cluster has."""

_CA, _NAMES = "requestheader-client-ca-file", "requestheader-allowed-names"


class FrontProxyError(Exception):
    """The API server passes no requests on: its aggregation layer isn't set up."""


@dataclass(frozen=True, slots=True)
class FrontProxy:
    """What tells the API server from everybody else.

    Attributes:
        ca: Certificates that sign its own, PEM.
        names: The common names that it may have; empty = any.
    """

    ca: str
    names: frozenset[str]

    @classmethod
    async def read(cls, api: KubeApi) -> Self:
        """Ask the API server.

        Raises:
            FrontProxyError: It has no such certificate.
            ApiError: It refused.
        """
        data = (await api.request("GET", CONFIG_MAP)).get("data") or {}
        if not data.get(_CA):
            raise FrontProxyError(f"the API server publishes no {_CA}")
        return cls(data[_CA], frozenset(json.loads(data.get(_NAMES) or "[]")))

    def trusts(self, certificate: Mapping[str, Any]) -> bool:
        """Tell whether a client is the API server.

        Args:
            certificate: As `ssl` gives it after the handshake, in which its signature was checked.
        """
        fields = [field for part in certificate.get("subject", ()) for field in part]
        names = {value for name, value in fields if name == "commonName"}
        return not self.names or not names.isdisjoint(self.names)

    def tls(self, certificate: Path, key: Path) -> ssl.SSLContext:
        """Return the server's side of TLS, which no other client gets through than the CA's.

        Raises:
            OSError: The files are missing, or no pair of certificate and key.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.ca)
        context.load_cert_chain(certificate, key)
        return context
