"""Plots of what was measured. matplotlib is wanted only by whoever asks for one."""

import itertools
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate_cli.bench.errors import BenchError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_plotting() -> None:
    """Refuse early, before anything is measured.

    Raises:
        BenchError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib, which is not installed: pip install matplotlib")


def plot_sweep(
    directory: Path, deviations: Sequence[float], ratios: Mapping[str, Sequence[float]]
) -> list[Path]:
    """Draw throughput ratios over the coefficient of variation of the output length.

    Args:
        directory: Made when there is none.
        deviations: The coefficients of variation.
        ratios: By label, one ratio for each of them.

    Returns:
        The written files: `batching-sweep.png` and `batching-sweep.svg`.

    Raises:
        BenchError: The files can't be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    # In styles of their own: with prompts of one length two of the lines lie on each other.
    for (label, values), style in zip(ratios.items(), itertools.cycle(("-", "--", ":"))):
        axes.plot(deviations, values, marker="o", linestyle=style, label=label)
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel("coefficient of variation of the output length")
    axes.set_ylabel("ratio of output tokens/s")
    axes.set_xticks(deviations)
    axes.set_ylim(bottom=0.0)
    axes.legend()
    return _write(figure, directory, "batching-sweep")


def plot_isolation(directory: Path, ttft_seconds: Mapping[str, Sequence[float]]) -> list[Path]:
    """Draw how many of gold's requests had their first token after how long.

    Args:
        directory: Made when there is none.
        ttft_seconds: By side, ascending; infinite where no token came.

    Returns:
        The written files: `isolation-ttft.png` and `isolation-ttft.svg`.

    Raises:
        BenchError: The files can't be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for (side, values), style in zip(ttft_seconds.items(), itertools.cycle(("-", "--", "-.", ":"))):
        came = [value for value in values if value < math.inf]
        percents = [100.0 * (number + 1) / len(values) for number in range(len(came))]
        axes.step(came, percents, where="post", linestyle=style, label=side)
    axes.set_xscale("log")
    axes.set_xlabel("gold's time to the first token, s")
    axes.set_ylabel("% of its requests")
    axes.set_ylim(0.0, 100.0)
    axes.legend()
    return _write(figure, directory, "isolation-ttft")


def _write(figure: "Figure", directory: Path, name: str) -> list[Path]:
    files = [directory / f"{name}.{kind}" for kind in ("png", "svg")]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file in files:
            figure.savefig(file, dpi=150)
    except OSError as error:
        raise BenchError(f"{directory}: {error.strerror}") from error
    return files
