from pathlib import Path

import pytest
from pydantic import ValidationError

from tidegate_operator.leader import LeaseName
from tidegate_operator.main import main
from tidegate_operator.settings import Settings


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_OPERATOR_SIGNING_KEY_FILE", "/keys/key.pem")
    monkeypatch.setenv("TIDEGATE_OPERATOR_NAMESPACES", "one, two,")
    monkeypatch.setenv("TIDEGATE_OPERATOR_METRICS_PORT", "9400")
    settings = Settings()
    assert settings.signing_key_file == Path("/keys/key.pem")
    assert settings.namespaces == ("one", "two")
    assert (settings.metrics_port, settings.kubeconfig) == (9400, None)


def test_no_namespaces_are_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_OPERATOR_SIGNING_KEY_FILE", "key.pem")
    monkeypatch.setenv("TIDEGATE_OPERATOR_NAMESPACES", "")
    assert Settings().namespaces == ()


def test_bad_setting_is_named_as_it_is_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TIDEGATE_OPERATOR_SIGNING_KEY_FILE", raising=False)
    monkeypatch.setenv("TIDEGATE_OPERATOR_METRICS_PORT", "70000")
    assert main() == 2
    message = capsys.readouterr().err
    assert "TIDEGATE_OPERATOR_SIGNING_KEY_FILE: Field required" in message
    assert "TIDEGATE_OPERATOR_METRICS_PORT: " in message


def test_missing_key_file_ends_the_process_with_a_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("TIDEGATE_OPERATOR_SIGNING_KEY_FILE", str(tmp_path / "absent.pem"))
    assert main() == 1
    assert "absent.pem: No such file or directory" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("secret_namespaces", "scopes"), [(None, ("one",)), ("", ()), ("a,b", ("a", "b"))]
)
def test_secrets_are_read_where_is_served_unless_it_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, secret_namespaces: str | None, scopes: tuple[str, ...]
) -> None:
    monkeypatch.setenv("TIDEGATE_OPERATOR_SIGNING_KEY_FILE", "key.pem")
    monkeypatch.setenv("TIDEGATE_OPERATOR_NAMESPACES", "one")
    if secret_namespaces is not None:
        monkeypatch.setenv("TIDEGATE_OPERATOR_SECRET_NAMESPACES", secret_namespaces)
    assert Settings().secret_scopes == scopes


def test_lease_is_given_with_its_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_OPERATOR_SIGNING_KEY_FILE", "key.pem")
    monkeypatch.setenv("TIDEGATE_OPERATOR_LEASE", "tidegate/operator")
    assert Settings().lease == LeaseName("tidegate", "operator")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("LEASE", "operator", "must be namespace/name"),
        ("REDIS_URL", "http://redis", "match pattern"),
        ("REDIS_CA_FILE", "/ca.crt", "must begin with rediss://"),
    ],
)
def test_setting_without_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
    problem: str,
) -> None:
    monkeypatch.setenv("TIDEGATE_OPERATOR_SIGNING_KEY_FILE", "key.pem")
    monkeypatch.setenv(f"TIDEGATE_OPERATOR_{name}", value)
    assert main() == 2
    message = capsys.readouterr().err
    assert f"TIDEGATE_OPERATOR_{name}: " in message
    assert problem in message


def test_why_requests_wait_is_told_only_with_the_engines_token(tmp_path: Path) -> None:
    given = {"signing_key_file": tmp_path, "explain_port": 8082}
    with pytest.raises(ValidationError, match="needs ENGINE_TOKEN_FILE"):
        Settings.model_validate(given)
    settings = Settings.model_validate({**given, "engine_token_file": tmp_path / "token"})
    assert settings.explain_port == 8082


def test_external_metrics_are_served_only_with_a_certificate(tmp_path: Path) -> None:
    given = {"signing_key_file": tmp_path, "external_metrics_port": 8443}
    with pytest.raises(ValidationError, match="needs EXTERNAL_METRICS_CERTIFICATES"):
        Settings.model_validate(given)
    settings = Settings.model_validate({**given, "external_metrics_certificates": tmp_path})
    assert settings.external_metrics_port == 8443
