import urllib.request

import pytest

from tidegate_cli.proxies import without_proxy


def is_exempt(host: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.com:3128")
    return bool(urllib.request.proxy_bypass(host))


@pytest.mark.parametrize("spelling", ["no_proxy", "NO_PROXY"])
def test_this_machine_is_exempt_besides_what_was(
    spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {spelling: "internal.example.com,10.0.0.1"}

    for name, value in without_proxy(given, ["10.213.7.1"]).items():
        monkeypatch.setenv(name, value)

    exempt = ("127.0.0.1", "localhost", "10.213.7.1", "internal.example.com", "10.0.0.1")
    assert [host for host in exempt if not is_exempt(host, monkeypatch)] == []
    assert not is_exempt("huggingface.co", monkeypatch)


def test_where_everything_is_exempt_it_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in without_proxy({"NO_PROXY": "*"}).items():
        monkeypatch.setenv(name, value)

    assert is_exempt("huggingface.co", monkeypatch)
    assert is_exempt("127.0.0.1", monkeypatch)
