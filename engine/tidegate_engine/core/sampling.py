"""How a request wants its tokens chosen, as a value."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_TEMPERATURE = 2.0
MAX_LOGPROBS = 5
_SEED_BITS = 64


class SamplingParamsError(ValueError):
    """A sampling parameter is outside its range.

    Attributes:
        parameter: Name of the field of `SamplingParams`.
    """

    def __init__(self, parameter: str, value: float, allowed: str) -> None:
        super().__init__(f"{parameter} must be {allowed}, got {value}")
        self.parameter = parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn from the model's distribution.

    Attributes:
        temperature: Divides the logits, in [0, 2]; 0 = always the most likely token (greedy), and
            `top_p`, `top_k` and `seed` have no effect.
        top_p: Draw from the smallest set of likeliest tokens that holds this share of the
            probability, in (0, 1]; applied to what `top_k` left.
        top_k: Draw from this many of the likeliest tokens; None = from all.
        seed: With the token's position the only source of randomness, in [0, 2**64): a request
            that is computed again after a preemption, or beside other neighbours, draws the same
            numbers. Whoever builds the request draws one where its client names none.
        logprobs: Number of likeliest tokens to report beside the chosen one's own log-probability,
            in [0, 5]; None = report nothing.

    Raises:
        SamplingParamsError: A value is outside its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        # Written so that NaN fails too.
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            allowed = f"between 0 and {MAX_TEMPERATURE:g}"
            raise SamplingParamsError("temperature", self.temperature, allowed)
        if not 0.0 < self.top_p <= 1.0:
            raise SamplingParamsError("top_p", self.top_p, "above 0 and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise SamplingParamsError("top_k", self.top_k, "at least 1")
        if not 0 <= self.seed < 1 << _SEED_BITS:
            raise SamplingParamsError("seed", self.seed, f"in [0, 2**{_SEED_BITS})")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise SamplingParamsError("logprobs", self.logprobs, f"between 0 and {MAX_LOGPROBS}")

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is the most likely token, without randomness."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingContext:
    """What a request's next token depends on besides the model: one object for its whole life.

    Attributes:
        token_ids: Prompt and output, in order. Shared with the scheduler, which appends to it; what
            a row may look at is its first `row.end` tokens.
        num_prompt_tokens: What comes behind these is output.
        stop_token_ids: The tokens that end the request.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    stop_token_ids: tuple[int, ...] = ()
