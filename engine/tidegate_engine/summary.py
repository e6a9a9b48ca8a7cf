"""What an engine says about itself in the log when it starts."""

from collections.abc import Sequence

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.executor.base import Capacity
from tidegate_engine.settings import Settings

Summary = tuple[tuple[str, str], ...]
"""Topics, and what there is to say of each in one line."""


def start_summary(
    settings: Settings,
    loaded: Summary,
    costs: ExecutorCosts,
    capacity: Capacity,
    *,
    url: str,
    seconds: float,
) -> Summary:
    """Return everything that an operator may want to know of an engine that begins to serve.

    Args:
        settings: As they were read.
        loaded: What was loaded, from `Parts`.
        costs: Of the executor.
        capacity: Of the executor.
        url: Where the API answers.
        seconds: Since the process began to start.
    """
    return (
        ("serving", f"{settings.model_name} at {url}, started in {seconds:.1f} s"),
        ("identity", f"pool {settings.pool}, pod {settings.pod_name}"),
        *loaded,
        ("limits", _limits(settings, capacity)),
        ("costs", describe_costs(costs)),
    )


def aligned(summary: Summary) -> list[str]:
    """Return the lines of a summary, topics in one column and texts in another."""
    width = max(len(topic) for topic, _ in summary)
    return [f"{topic:<{width}}  {text}" for topic, text in summary]


def describe_costs(costs: ExecutorCosts) -> str:
    """Tell what steps and copies take, in milliseconds."""
    parts: Sequence[tuple[str, float]] = (
        ("a step", costs.step_seconds),
        ("and for each prompt token", costs.prefill_token_seconds),
        ("decode", costs.decode_seconds),
        ("1000 tokens of context", 1000 * costs.context_token_seconds),
        ("1000 pairs of prompt tokens", 1000 * costs.prefill_pair_seconds),
    )
    step = ", ".join(f"{name} {_milliseconds(seconds)}" for name, seconds in parts)
    return f"{step}; a KV block to or from the host {_milliseconds(costs.swap_block_seconds)}"


def counted(count: int, noun: str) -> str:
    """Write a number of things."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _limits(settings: Settings, capacity: Capacity) -> str:
    return (
        f"{capacity.num_blocks * capacity.block_size} tokens in KV blocks,"
        f" {settings.max_num_seqs} requests and {settings.max_batched_tokens} tokens a step,"
        f" {settings.max_waiting} waiting; {settings.batching} batching"
    )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
