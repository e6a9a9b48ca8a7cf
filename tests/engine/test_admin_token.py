"""Where an engine's admin token comes from."""

import base64
from pathlib import Path

import pytest

from tidegate_engine.settings import Settings, SettingsError

TOKEN = "an-admin-token-of-the-test"


@pytest.fixture(autouse=True)
def minimal_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_POOL", "serving/main")
    monkeypatch.setenv("TIDEGATE_REDIS_URL", "redis://127.0.0.1:6379")
    monkeypatch.setenv("TIDEGATE_VERIFY_KEY", base64.b64encode(bytes(32)).decode())


def refuses(variable: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environment().read_admin_token()
    assert caught.value.variable == variable
    assert TOKEN not in str(caught.value)
    assert "short" not in str(caught.value)


def test_without_one_there_is_no_admin_api() -> None:
    assert Settings.from_environment().read_admin_token() is None


def test_it_may_be_a_variable_which_no_log_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_ADMIN_TOKEN", TOKEN)
    settings = Settings.from_environment()
    assert settings.read_admin_token() == TOKEN
    assert TOKEN not in repr(settings)


def test_it_may_be_a_file_that_ends_with_a_newline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    monkeypatch.setenv("TIDEGATE_ADMIN_TOKEN_FILE", str(path))
    assert Settings.from_environment().read_admin_token() == TOKEN
    monkeypatch.setenv("TIDEGATE_ADMIN_TOKEN", TOKEN)
    refuses("TIDEGATE_ADMIN_TOKEN_FILE")


@pytest.mark.parametrize("token", ["", "short", "with a\ttabulator in it", "é" * 20])
def test_what_could_be_guessed_or_not_be_sent_is_refused(
    monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("TIDEGATE_ADMIN_TOKEN", token)
    refuses("TIDEGATE_ADMIN_TOKEN")


def test_a_file_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIDEGATE_ADMIN_TOKEN_FILE", str(tmp_path / "none"))
    refuses("TIDEGATE_ADMIN_TOKEN_FILE")
