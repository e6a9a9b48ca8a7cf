"""The bounds of one engine's batch and queue."""

from dataclasses import dataclass, replace

from tidegate_policies.snapshot import BatchingRule


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The engine's own limits; a policy may set the first two anew.

    Attributes:
        max_num_seqs: Most requests in one batch.
        max_batched_tokens: Most tokens computed in one step.
        max_waiting: Most requests queued, of all tenants together.
    """

    max_num_seqs: int = 32
    max_batched_tokens: int = 256
    max_waiting: int = 10_000

    def under(self, rule: BatchingRule) -> "EngineLimits":
        """Return these limits with those that the policy sets."""
        return replace(
            self,
            max_num_seqs=rule.max_num_seqs or self.max_num_seqs,
            max_batched_tokens=rule.max_batched_tokens or self.max_batched_tokens,
        )
