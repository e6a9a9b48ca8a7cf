from pathlib import Path

import pytest

from tidegate_cli.bench import plots
from tidegate_cli.bench.errors import BenchError


def test_a_sweep_is_drawn_as_png_and_svg(tmp_path: Path) -> None:
    files = plots.plot_sweep(
        tmp_path / "new", (0.0, 1.0), {"over static": (1.0, 2.0), "over bucketed": (1.0, 1.5)}
    )

    png, svg = (file.read_bytes() for file in files)
    assert png.startswith(b"\x89PNG")
    assert b"<svg" in svg


def test_a_plot_that_can_not_be_written_names_its_directory(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.touch()

    with pytest.raises(BenchError, match=str(taken)):
        plots.plot_sweep(taken, (0.0,), {"over static": (1.0,)})


def test_without_matplotlib_one_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda _name: None)

    with pytest.raises(BenchError, match="pip install matplotlib"):
        plots.require_plotting()
