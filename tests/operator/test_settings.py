from pathlib import Path

import pytest

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
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TIDEGATE_OPERATOR_SIGNING_KEY_FILE", str(tmp_path / "absent.pem"))
    assert main() == 1
    assert "absent.pem: No such file or directory" in capsys.readouterr().err
