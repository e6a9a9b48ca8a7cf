"""The scheduler's decision and the executor's answer, as frozen data.

A plan is everything that the executor has to do in one step. Rows are computed together, in one
forward pass; what has to happen to KV blocks before the pass (copies, swaps) belongs beside them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidegate_engine.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """The tokens of one request in one step: one at decode, a prompt chunk at prefill.

    Attributes:
        start: Position of the first token to compute, counted from 0.
        token_ids: Tokens at positions `start`, `start + 1`, ...; never empty.
        block_ids: Block table: entry `i` is the KV block of positions `i*B .. i*B + B - 1`. Covers
            at least every position up to the row's last.
        is_decode: True when the row computes a request's newest output token alone; a prompt chunk
            may have one token too.
        samples: True when the row's last token yields an output token (a decode, or the last
            chunk of a prompt).
        sampling: How to choose that token.
    """

    request_id: str
    start: int
    token_ids: Sequence[int]
    block_ids: Sequence[int]
    samples: bool
    sampling: SamplingParams
    is_decode: bool = False

    @property
    def end(self) -> int:
        """Position after the row's last token: the length of the context it is computed in."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step does. vLLM calls this `SchedulerOutput`.

    Attributes:
        step: Number of the step, from 1; grows with every plan that has rows.
        revision: The policy this was decided under; 0 = none yet.
        rows: Decodes first, then prefill chunks, in a reproducible order.
        admitted: Requests that joined the batch with this plan.
        preempted: Requests whose KV blocks were taken before this step, for recompute.
        ended: Requests that ended while planning, with the tokens they had: they can never get
            the KV block for another one.
    """

    step: int
    revision: int
    rows: tuple[PlanRow, ...] = ()
    admitted: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """One output token.

    Attributes:
        logprob: Natural logarithm of its probability; None when it wasn't asked for.
        top_logprobs: The most likely tokens with theirs, best first.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step produced: a token for every row that samples, by request."""

    tokens: Mapping[str, SampledToken] = field(default_factory=dict)
