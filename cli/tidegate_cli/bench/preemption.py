"""`tidegate bench preemption`: what it costs to take requests out, and no token.

On the torch executor with real weights. The same requests are served with preemption by swap and
by recompute, in a pool that is too small for all of them, and each is held against its output
alone. Then a swap is timed against a memcpy of the same bytes, and against computing a context
again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from tidegate_cli import report
from tidegate_cli.bench.result import BenchResult


@dataclass(frozen=True, kw_only=True)
class PreemptionSettings:
    """What is served and measured.

    Attributes:
        victims: Requests of the lower tier, all there from the start; they fill the pool.
        waves: How often requests of the higher tier come and take their place.
        wave_requests: How many come at a time.
        max_batched_tokens: Tokens of a step.
        context_tokens: Length of the context that is swapped and computed again.
        swaps: Swaps timed each way, by turns with memcpys.
        resumes: Resumes timed each way, by turns.
        threads: CPU threads of a step.
        seed: Chooses prompts, and where blocks lie.
    """

    victims: int = 6
    victim_prompt_tokens: int = 256
    victim_output_tokens: int = 96
    waves: int = 3
    wave_requests: int = 2
    wave_prompt_tokens: int = 200
    wave_output_tokens: int = 16
    max_batched_tokens: int = 256
    block_size: int = 16
    context_tokens: int = 400
    swaps: int = 40
    resumes: int = 7
    threads: int = 1
    seed: int = 1

    def quick(self) -> "PreemptionSettings":
        """Return the same with fewer and shorter requests, and fewer measurements."""
        return replace(
            self,
            victims=3,
            victim_prompt_tokens=80,
            victim_output_tokens=36,
            waves=2,
            wave_requests=1,
            wave_prompt_tokens=120,
            wave_output_tokens=8,
            swaps=10,
            resumes=2,
        )


def run_preemption(
    console: Console,
    *,
    settings: PreemptionSettings,
    progress: Callable[[str], None],
    json_file: Path | None,
) -> None:
    """Measure, print a table, write the JSON file.

    Raises:
        BenchError: The model can't be loaded, or nobody was preempted.
    """
    # Here, as it takes PyTorch, which other commands do without.
    from tidegate_cli.bench.preemption_run import measure

    result = measure(settings, progress)
    console.print(report.figures_table("bench preemption", result.results))
    console.print(_told(result))
    if json_file is not None:
        result.write(json_file)


def _told(result: BenchResult) -> str:
    series = result.series
    (out,), (back,) = series["swap_out_gb_per_s"], series["swap_in_gb_per_s"]
    (memcpy,), (busy,) = series["memcpy_gb_per_s"], series["busy_memcpy_gb_per_s"]
    (swap,), (recompute,) = series["resume_swap_ms"], series["resume_recompute_ms"]
    (compared,), (tokens,) = series["compared_tokens"], series["output_tokens"]
    return (
        f"{result.settings['model']}, float32, {result.settings['threads']} thread(s):"
        f" {out:.1f} GB/s out and {back:.1f} in, memcpy {memcpy:.1f}"
        f" (on a core that was busy {busy:.1f});"
        f" {result.settings['context_tokens']} tokens and the next one in {swap:.0f} ms by swap,"
        f" {recompute:.0f} ms by recompute; {compared:.0f} of {tokens:.0f} output tokens compared,"
        " the others follow a choice that rounding decides"
    )
