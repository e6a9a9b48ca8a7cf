"""How a request wants its tokens chosen, as a value."""

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 10.0
MAX_BIAS = 100.0
MAX_LOGPROBS = 20
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

    In this order: `logit_bias`, `min_tokens`, the penalties, `temperature`, `min_p`, `top_k`,
    `top_p`. vLLM has the same order.

    Attributes:
        temperature: Divides the logits, in [0, 2]; 0 = always the most likely token (greedy), and
            `min_p`, `top_k`, `top_p` and `seed` have no effect.
        min_p: Leave out tokens less likely than this share of the likeliest one's probability, in
            [0, 1].
        top_k: Draw from this many of the likeliest tokens; None = from all.
        top_p: Draw from the smallest set of likeliest tokens that holds this share of the
            probability, in (0, 1]; of what `min_p` and `top_k` left.
        repetition_penalty: Divides the positive and multiplies the negative logits of tokens in
            prompt and output, in [0.01, 10]; 1 = off. Source: Keskar et al., "CTRL", 2019,
            section 4.1.
        presence_penalty: Taken once from the logits of tokens in the output, in [-2, 2].
        frequency_penalty: Taken from them as often as they occur in the output, in [-2, 2].
        logit_bias: Token ids, each once, with what is added to their logits, in [-100, 100].
        min_tokens: Tokens that end the request aren't drawn before it has this many of output.
        seed: With the token's position the only source of randomness, in [0, 2**64): a request
            that is computed again after a preemption, or beside other neighbours, draws the same
            numbers. Whoever builds the request draws one where its client names none.
        logprobs: Number of likeliest tokens to report beside the chosen one's own log-probability,
            in [0, 20]; None = report nothing. Reported is the model's own distribution, before
            anything above.
        edits_logits: Whether anything before `temperature` is set.

    Raises:
        SamplingParamsError: A value is outside its range.
    """

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    seed: int = 0
    logprobs: int | None = None
    edits_logits: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.top_k is not None and self.top_k < 1:
            raise SamplingParamsError("top_k", self.top_k, "at least 1")
        if not 0.0 < self.top_p <= 1.0:  # written so that NaN fails, too
            raise SamplingParamsError("top_p", self.top_p, "above 0 and at most 1")
        _check_range(
            "repetition_penalty",
            self.repetition_penalty,
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
        )
        _check_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        for token_id, bias in self.logit_bias:
            _check_range("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
            if token_id < 0:
                raise SamplingParamsError("logit_bias", token_id, "of token ids, from 0")
        if self.min_tokens < 0:
            raise SamplingParamsError("min_tokens", self.min_tokens, "at least 0")
        if not 0 <= self.seed < 1 << _SEED_BITS:
            raise SamplingParamsError("seed", self.seed, f"in [0, 2**{_SEED_BITS})")
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        object.__setattr__(self, "edits_logits", self._edits_logits())

    @property
    def has_cuts(self) -> bool:
        """Whether it is drawn from some of the tokens only."""
        return self.top_p < 1.0 or self.top_k is not None or self.min_p > 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on which tokens came before."""
        return self.repetition_penalty != 1.0 or self.has_output_penalties

    @property
    def has_output_penalties(self) -> bool:
        """Whether it depends on which tokens the output has."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def _edits_logits(self) -> bool:
        return bool(self.logit_bias) or self.min_tokens > 0 or self.has_penalties


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

    def barred_tokens(self, end: int) -> tuple[int, ...]:
        """Return the tokens that mustn't follow the first `end` ones: it would end too early."""
        is_early = end - self.num_prompt_tokens < self.params.min_tokens
        return self.stop_token_ids if is_early else ()


def _check_range(parameter: str, value: float, least: float, most: float) -> None:
    # Written so that NaN fails, too.
    if not least <= value <= most:
        raise SamplingParamsError(parameter, value, f"between {least:g} and {most:g}")
