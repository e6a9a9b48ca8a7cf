"""The life of one request inside the scheduler."""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tidegate_engine.core.decisions import Reason
from tidegate_engine.core.prefix_cache import BlockKeys
from tidegate_engine.core.request import Request
from tidegate_engine.core.sampling import SamplingContext
from tidegate_policies.preemption import Shield, shield

if TYPE_CHECKING:
    from tidegate_engine.core.tenants import Tenant


class Phase(enum.Enum):
    """Where a request is.

    SWAPPED is also a request whose KV is on its way to the host or back.
    """

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    ENDED = "ended"


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """A request, its output so far, and its KV blocks.

    Attributes:
        request_id: The request's id, at hand for the loops over all running requests.
        arrival: Grows with every request; kept over a preemption.
        arrived_at: When its client's time began, on the scheduler's clock.
        max_output_tokens: The request's, clipped to what the policy and the pool allow.
        max_tokens: Prompt and most output together.
        token_ids: Prompt and output, in order; output is kept over a preemption.
        num_tokens: Length of `token_ids`.
        stop_token_ids: The request's.
        sampling: How its tokens are chosen; shares `token_ids`.
        keys: What the prefix cache knows its full blocks by.
        deadline: When the first token is due; None = nothing was promised.
        latest_start: Begun later than this, its prompt is not read by the deadline.
        computed_tokens: Tokens whose keys and values are in the KV cache; 0 after a preemption for
            recompute.
        charged_tokens: Tokens that the tenant has paid for: what a recompute computes again below
            this is the engine's doing and free.
        admission: Number of its last admission, over all requests; 0 = never admitted.
        admitted_tokens: `num_tokens` at its last admission.
        expected_cost: Service that it was expected to take at its last admission, in cost units.
        charged_cost: Service that its prompt has taken since.
        is_under_floor: Whether it was admitted for its tier's reserved share.
        skips: Requests that were admitted past it while it was the blocked head.
        held_for: Why it was not admitted when that was last decided.
        predicted_total: Tokens that it is expected to have at its end, prompt included.
        predicted_until: A longer context wants a new prediction.
        predicted_version: Of the estimates that it was predicted from.
        most_blocks: Blocks of its longest context.
        block_table: Physical KV block of every logical block, in order. It only grows: a request
            that gives its blocks back gets a new list, as plans refer to the old one.
        capacity: Tokens for which `block_table` has room.
        num_registered: Blocks at the start of the table that the prefix cache knows.
        host_table: Blocks in host memory, while it is swapped out.
        fence: The copy that is in flight for it; 0 = none.
        reserved_blocks: Free blocks that are kept for it.
        incoming_blocks: Blocks that will be kept for it once a copy has passed.
    """

    request: Request
    request_id: str
    tenant: "Tenant"
    arrival: int
    arrived_at: float
    max_output_tokens: int
    max_tokens: int
    most_blocks: int
    token_ids: list[int]
    num_tokens: int
    stop_token_ids: tuple[int, ...]
    sampling: SamplingContext
    keys: BlockKeys
    deadline: float | None = None
    latest_start: float = 0.0
    phase: Phase = Phase.WAITING
    computed_tokens: int = 0
    charged_tokens: int = 0
    admission: int = 0
    admitted_tokens: int = 0
    preemptions: int = 0
    expected_cost: float = 0.0
    charged_cost: float = 0.0
    is_under_floor: bool = False
    skips: int = 0
    held_for: Reason | None = None
    predicted_total: int = 0
    predicted_until: int = 0
    predicted_version: int = -1
    block_table: list[int] = field(default_factory=list)
    capacity: int = 0
    num_registered: int = 0
    host_table: list[int] = field(default_factory=list)
    fence: int = 0
    reserved_blocks: int = 0
    incoming_blocks: int = 0

    @property
    def num_output_tokens(self) -> int:
        """Output tokens generated so far."""
        return self.num_tokens - len(self.request.prompt_ids)

    @property
    def pending_tokens(self) -> int:
        """Tokens still to be computed: a whole context at prefill, one at decode."""
        return self.num_tokens - self.computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether its next step computes its newest output token alone."""
        return self.pending_tokens == 1 and self.num_output_tokens > 0

    @property
    def uncharged_prompt_tokens(self) -> int:
        """Prompt tokens that its tenant has not paid for."""
        return max(0, len(self.request.prompt_ids) - self.charged_tokens)

    @property
    def must_fit_at_worst(self) -> bool:
        """Whether it is admitted only with its longest context, since it can't be taken out."""
        return self.is_at_cap or not self.tenant.is_preemptible

    @property
    def is_at_cap(self) -> bool:
        """Whether it was preempted as often as its tenant's policy allows."""
        return self.preemptions >= self.tenant.rule.preemption.max_preemptions

    def clip(self, max_tokens: int, *, block_size: int) -> None:
        """Allow no longer context than `max_tokens`, the last output token included."""
        self.max_tokens = max_tokens
        self.max_output_tokens = max(1, max_tokens - len(self.request.prompt_ids))
        self.most_blocks = -(-(max_tokens - 1) // block_size)

    def shield(self, *, is_tier_at_floor: bool) -> Shield:
        """Return what keeps it, while it runs, from being a victim."""
        return shield(
            rule=self.tenant.rule.preemption,
            preemptions=self.preemptions,
            produced_since_admission=self.num_tokens - self.admitted_tokens,
            is_prefilling=not self.is_decoding,
            computed_share=self.computed_tokens / self.num_tokens,
            remaining_tokens=self.max_tokens - self.num_tokens,
            under_floor=self.is_under_floor and is_tier_at_floor,
        )
