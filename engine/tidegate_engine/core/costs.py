"""What the executor's work costs in time, as the scheduler is told when it starts."""

from dataclasses import dataclass


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
