"""The bounds of one engine's batch and queue."""

from dataclasses import dataclass, replace
from typing import TypeVar

from tidegate_policies.rules import BatchingRule

_Limit = TypeVar("_Limit", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The engine's own limits; a policy may set all but the queue's anew.

    Attributes:
        max_num_seqs: Most requests in one batch.
        max_batched_tokens: Most tokens computed in one step.
        max_waiting: Most requests queued, of all tenants together.
        wait_window_seconds: How long a first arrival may be held to fill a batch.
        prefill_chunk_min: Prompt tokens that a step offers at least, whatever its decodes' targets.
        prefill_chunk_max: Most prompt tokens in one step.
        max_partial_prefills: Prompts that may be half read at a time.
    """

    max_num_seqs: int = 32
    max_batched_tokens: int = 256
    max_waiting: int = 10_000
    wait_window_seconds: float = 0.0
    prefill_chunk_min: int = 32
    prefill_chunk_max: int = 1 << 20
    max_partial_prefills: int = 2

    def under(self, rule: BatchingRule) -> "EngineLimits":
        """Return these limits with those that the policy sets."""
        return replace(
            self,
            max_num_seqs=_set(rule.max_num_seqs, self.max_num_seqs),
            max_batched_tokens=_set(rule.max_batched_tokens, self.max_batched_tokens),
            wait_window_seconds=_set(rule.wait_window_seconds, self.wait_window_seconds),
            prefill_chunk_min=_set(rule.prefill_chunk_min, self.prefill_chunk_min),
            prefill_chunk_max=_set(rule.prefill_chunk_max, self.prefill_chunk_max),
            max_partial_prefills=_set(rule.max_partial_prefills, self.max_partial_prefills),
        )


def _set(ruled: _Limit | None, own: _Limit) -> _Limit:
    return own if ruled is None else ruled
