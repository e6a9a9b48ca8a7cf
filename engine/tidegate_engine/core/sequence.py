"""The life of one request inside the scheduler."""

import enum
from dataclasses import dataclass, field

from tidegate_engine.core.request import Request


class Phase(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """A request, its output so far, and its KV blocks.

    Attributes:
        arrival: Grows with every request; kept over a preemption.
        max_output_tokens: The request's, clipped to what the policy and the pool allow.
        token_ids: Prompt and output, in order; output is kept over a preemption.
        computed_tokens: Tokens whose keys and values are in the KV cache; 0 after a preemption.
        charged_tokens: Tokens that the tenant has paid for: what a recompute computes again below
            this is the engine's doing and free.
        admission: Number of its last admission, over all requests; 0 = never admitted.
        block_table: Physical KV block of every logical block, in order.
    """

    request: Request
    arrival: int
    max_output_tokens: int
    token_ids: list[int]
    phase: Phase = Phase.WAITING
    computed_tokens: int = 0
    charged_tokens: int = 0
    admission: int = 0
    preemptions: int = 0
    block_table: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def tenant(self) -> str:
        """The request's tenant."""
        return self.request.tenant

    @property
    def num_output_tokens(self) -> int:
        """Output tokens generated so far."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def pending_tokens(self) -> int:
        """Tokens still to be computed: a whole context at prefill, one at decode."""
        return len(self.token_ids) - self.computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether its next step computes its newest output token alone."""
        return self.pending_tokens == 1 and self.num_output_tokens > 0
