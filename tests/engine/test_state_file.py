from pathlib import Path

import pytest

from tidegate_engine.state_file import StateFile


def test_what_is_written_is_read(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "deep" / "policy.json")
    assert state.read() is None
    for text in ("one", "two"):
        state.write(text)
        assert state.read() == text
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["policy.json"]


def test_a_failed_write_leaves_the_old_text(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "policy.json")
    (tmp_path / "policy.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        state.write("new")
    assert [path.name for path in tmp_path.iterdir()] == ["policy.json"]


def test_what_is_no_text_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_bytes(b"\xff\xfe")
    assert StateFile(tmp_path / "policy.json").read() is None
