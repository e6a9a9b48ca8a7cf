"""The scheduler's decision and the executor's answer, as frozen data.

A plan is everything that the executor has to do in one step. Rows are computed together, in one
forward pass; what has to happen to KV blocks before the pass (copies, swaps) belongs beside them.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tidegate_engine.core.decisions import Decision
from tidegate_engine.core.sampling import SamplingContext


class PlanRow(NamedTuple):
    """The tokens of one request in one step: one at decode, a prompt chunk at prefill.

    A named tuple, as hundreds are made every step. `block_ids` is the request's own block table,
    which only ever grows at its end while a request holds it: what a row covers never changes.

    Attributes:
        start: Position of the first token to compute, counted from 0.
        token_ids: Tokens at positions `start`, `start + 1`, ...; never empty.
        block_ids: Block table: entry `i` is the KV block of positions `i*B .. i*B + B - 1`. Covers
            at least every position up to the row's last.
        samples: True when the row's last token yields an output token (a decode, or the last
            chunk of a prompt).
        sampling: How to choose that token, and after which; the request's own.
        is_decode: True when the row computes a request's newest output token alone; a prompt chunk
            may have one token too.
        is_padding: True when the row is computed and thrown away, as static batching does: nothing
            of it may reach a KV block, and it never samples.
    """

    request_id: str
    start: int
    token_ids: Sequence[int]
    block_ids: Sequence[int]
    samples: bool
    sampling: SamplingContext
    is_decode: bool = False
    is_padding: bool = False

    @property
    def end(self) -> int:
        """Position after the row's last token: the length of the context it is computed in."""
        return self.start + len(self.token_ids)


class ExpiryCause(enum.StrEnum):
    """Which limit a dropped request has reached."""

    QUEUE_TIMEOUT = "queue_timeout"
    REQUEST_TIMEOUT = "request_timeout"


class Expiry(NamedTuple):
    """A request that was dropped for its time limit."""

    request_id: str
    cause: ExpiryCause


class CachedPrompt(NamedTuple):
    """Tokens at the start of a request's prompt that were found in the prefix cache."""

    request_id: str
    num_tokens: int


class BlockCopy(NamedTuple):
    """A KV block to copy on the device before the rows are computed: a copy on write."""

    source: int
    target: int


class SwapCopy(NamedTuple):
    """KV blocks to move between device and host, beside the steps.

    Attributes:
        fence: Number of the copy, unique; its executor names it when the copy is complete.
        device_blocks: From where or to where, on the device.
        host_blocks: To where or from where, in host memory; the i-th goes with the i-th.
    """

    fence: int
    request_id: str
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step does. vLLM calls this `SchedulerOutput`.

    Its parts take effect in this order: `swap_out` reads device blocks as they are before
    anything else, `swap_in` begins to write others, `copies` are done, `rows` are computed. Until
    its fence has passed, in this plan and in later ones: what a swap-out reads may be read, as
    shared prefixes are, but not written; what a swap-in writes is touched by nobody.

    Attributes:
        step: Number of the step, from 1; grows with every plan that has rows.
        revision: The policy this was decided under; 0 = none yet.
        rows: Decodes first, then prefill chunks, in a reproducible order.
        copies: Copies on write.
        swap_out: Copies to the host that begin with this step.
        swap_in: Copies from the host that begin with this step.
        num_open_fences: Swaps that are in flight once this plan has begun, its own included. A plan
            without rows is executed all the same while there are any, and then waits for one.
        admitted: Requests that joined the batch with this plan, resumed ones included.
        cached: Of those that were admitted for the first time, what needs no computing; requests of
            which nothing was found are left out.
        preempted: Requests that were taken out of the batch before this step.
        ended: Requests that ended while planning, with the tokens they had: they can never get
            the KV block for another one.
        expired: Requests that were dropped while planning, since they waited or ran for too long.
        stopped: Requests that were dropped because their tenant's policy cancels them.
        decisions: Why requests were admitted, held, preempted or dropped.
        watermark: State of the watermark gate, by its name; empty where there is none.
        wake_at: When to plan anew, even though nothing has arrived and nothing runs; None = only
            events can change the plan.
    """

    step: int
    revision: int
    rows: tuple[PlanRow, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    swap_out: tuple[SwapCopy, ...] = ()
    swap_in: tuple[SwapCopy, ...] = ()
    num_open_fences: int = 0
    admitted: tuple[str, ...] = ()
    cached: tuple[CachedPrompt, ...] = ()
    preempted: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    expired: tuple[Expiry, ...] = ()
    stopped: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    watermark: str = ""
    wake_at: float | None = None

    @property
    def is_executable(self) -> bool:
        """Whether the executor has anything to compute, to copy or to wait for."""
        return bool(self.rows) or self.num_open_fences > 0


class SampledToken(NamedTuple):
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
    """What one step produced.

    Attributes:
        tokens: A token for every row that samples and didn't fail, by request.
        failures: Why a row that samples could not be given a token, by request. The others of the
            step are as good as ever.
        passed_fences: The swaps, of this plan or of earlier ones, that were found complete.
    """

    tokens: Mapping[str, SampledToken] = field(default_factory=dict)
    passed_fences: tuple[int, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)

    def tokens_of(self, plan: StepPlan) -> list[SampledToken | None]:
        """Return the token of each row that samples, in order; None for one that failed.

        Raises:
            KeyError: A row has neither a token nor failed.
        """
        tokens = self.tokens
        found = [tokens.get(row[0]) for row in plan.rows if row[4]]
        if not all(found):  # a token is never empty
            answered = tokens.keys() | self.failures.keys()
            missing = [
                r.request_id for r in plan.rows if r.samples and r.request_id not in answered
            ]
            if missing:
                raise KeyError(f"step {plan.step}: no token for requests {missing}")
        return found
