"""Rotary position embedding stretched beyond the context that a model was first trained for."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


class RopeScalingError(ValueError):
    """The numbers of a scaling don't make sense.

    Attributes:
        field: Name of the argument at fault.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """What each rotary frequency is divided by. Every static scheme comes down to that.

    Schemes that depend on the length of the sequence ("dynamic") don't: keys already stored would
    have to be turned anew as it grows.

    Attributes:
        divisors: One of each pair of a head's elements [D / 2], fastest pair first.
        attention_factor: Cosines and sines are multiplied by it, so scores by its square.

    Raises:
        RopeScalingError: A number isn't above 0.
    """

    divisors: tuple[float, ...]
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        for divisor in self.divisors:
            _check_positive("divisors", divisor)
        _check_positive("attention_factor", self.attention_factor)


def linear(factor: float, *, head_size: int) -> RopeScaling:
    """Divide all positions by `factor`.

    Source: Extending Context Window of Large Language Models via Positional Interpolation
    (Chen et al., 2023), section 2.3.
    """
    return RopeScaling((factor,) * (head_size // 2))


def llama3(
    factor: float,
    *,
    low_freq_factor: float,
    high_freq_factor: float,
    original_context_tokens: int,
    rope_theta: float,
    head_size: int,
) -> RopeScaling:
    """Slow frequencies are divided by `factor`, fast ones kept, those between blended.

    Source: The Llama 3 Herd of Models (Grattafiori et al., 2024), section 3.4.2 for the aim; the
    numbers are those of Llama 3.1's published configuration. Slow are pairs that turn less than
    `low_freq_factor` times within the original context, fast those that do so more than
    `high_freq_factor` times.

    Raises:
        RopeScalingError: A number doesn't make sense.
    """
    _check_positive("factor", factor)
    if not low_freq_factor < high_freq_factor:
        problem = f"must be above low_freq_factor {low_freq_factor}, got {high_freq_factor}"
        raise RopeScalingError("high_freq_factor", problem)
    width = high_freq_factor - low_freq_factor
    shares = (
        (turns - low_freq_factor) / width
        for turns in _turns(original_context_tokens, rope_theta, head_size)
    )
    return RopeScaling(_blended(factor, shares))


def yarn(
    factor: float,
    *,
    original_context_tokens: int,
    rope_theta: float,
    head_size: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
) -> RopeScaling:
    """Like `llama3`, blended over the pairs' indices; and scores are sharpened.

    Source: YaRN (Peng et al., 2023), sections 3.2 and 3.4; the ramp runs over whole indices, as in
    the authors' code.

    Raises:
        RopeScalingError: A number doesn't make sense.
    """
    _check_positive("factor", factor)
    _check_positive("original_context_tokens", original_context_tokens)
    num_pairs = head_size // 2

    def pair_that_turns(times: float) -> float:
        _check_positive("beta_fast and beta_slow", times)
        wavelength = original_context_tokens / times
        return num_pairs * math.log(wavelength / math.tau) / math.log(rope_theta)

    first = max(math.floor(pair_that_turns(beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(beta_slow)), head_size - 1)
    width = max(last - first, 0.001)
    shares = (1 - (pair - first) / width for pair in range(num_pairs))
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return RopeScaling(_blended(factor, shares), attention_factor)


def _turns(context_tokens: int, rope_theta: float, head_size: int) -> list[float]:
    _check_positive("original_context_tokens", context_tokens)
    exponents = (2 * pair / head_size for pair in range(head_size // 2))
    return [context_tokens * rope_theta**-exponent / math.tau for exponent in exponents]


def _blended(factor: float, shares: Iterable[float]) -> tuple[float, ...]:
    """Divisors that blend kept (share 1 and above) and divided (0 and below) frequencies."""
    return tuple(1 / ((1 - kept) / factor + kept) for kept in (min(max(s, 0), 1) for s in shares))


def _check_positive(field: str, value: float) -> None:
    if not value > 0:
        raise RopeScalingError(field, f"must be above 0, got {value}")
