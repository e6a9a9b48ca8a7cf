"""What the executor's work costs in time, as the scheduler is told when it starts."""

from dataclasses import dataclass

from tidegate_policies.fairness import PROMPT_TOKEN_COST, PromptPrice

MOST_PAIR_COST = PROMPT_TOKEN_COST / 500
"""A pair costs no more, whatever was measured: the two parts of a step's time are easily mixed up.

Source: SmolLM2-135M on two CPU cores measures 0.0013 at a start; of Llama-3.1-8B on an H100 a
roofline says 0.00004, and of larger models less.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorCosts:
    """Time of steps and of copies; a step's is the sum of its parts.

    Attributes:
        step_seconds: Fixed cost of a step.
        prefill_token_seconds: Of each token of a prompt chunk.
        decode_seconds: Of each decode.
        context_token_seconds: Of each token of context that a decode reads.
        prefill_pair_seconds: Of each pair of a token of a prompt chunk and a token before it.
        swap_block_seconds: Of a KV block on its way between device and host, one way.
    """

    step_seconds: float = 0.010
    prefill_token_seconds: float = 0.0001
    decode_seconds: float = 0.0005
    context_token_seconds: float = 0.0
    prefill_pair_seconds: float = 0.0
    swap_block_seconds: float = 0.0001

    @property
    def prompt_price(self) -> PromptPrice:
        """What tenants are charged for prompt tokens: by the time that these take here."""
        if not self.prefill_token_seconds:
            return PromptPrice()
        pair_cost = PROMPT_TOKEN_COST * self.prefill_pair_seconds / self.prefill_token_seconds
        return PromptPrice(min(pair_cost, MOST_PAIR_COST))
