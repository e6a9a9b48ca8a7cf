import ssl
from pathlib import Path
from typing import Any, cast

import pytest

from tidegate_operator.front_proxy import FrontProxy, FrontProxyError

CERTIFICATE = {"subject": ((("organizationName", "org"),), (("commonName", "front-proxy"),))}


class Published:
    """Stands for an API server that publishes this much of its aggregation layer."""

    def __init__(self, **data: str) -> None:
        self._answer = {"data": {name.replace("_", "-"): text for name, text in data.items()}}

    async def request(self, method: str, path: str) -> object:
        assert (method, path.rpartition("/")[2]) == ("GET", "extension-apiserver-authentication")
        return self._answer


async def read(**data: str) -> FrontProxy:
    return await FrontProxy.read(cast(Any, Published(**data)))


async def test_a_name_is_trusted_that_is_published_or_any_where_none_is() -> None:
    ca = {"requestheader_client_ca_file": "PEM"}
    assert (await read(**ca, requestheader_allowed_names='["front-proxy"]')).trusts(CERTIFICATE)
    other = await read(**ca, requestheader_allowed_names='["other", "org"]')
    assert not other.trusts(CERTIFICATE)
    assert not other.trusts({})
    for nobody in ({}, {"requestheader_allowed_names": "[]"}):
        assert (await read(**ca, **nobody)).trusts(CERTIFICATE)


async def test_an_api_server_that_passes_nothing_on_is_told_apart() -> None:
    with pytest.raises(FrontProxyError, match="requestheader-client-ca-file"):
        await read(client_ca_file="PEM")


def test_certificates_that_are_none_are_an_error_of_the_system(tmp_path: Path) -> None:
    """Whoever serves goes on with the old ones at any such error."""
    assert issubclass(ssl.SSLError, OSError)
    with pytest.raises(ssl.SSLError):
        FrontProxy("nonsense", frozenset()).tls(tmp_path / "tls.crt", tmp_path / "tls.key")
