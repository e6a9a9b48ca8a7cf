"""Who leaves when KV memory runs short."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimCandidate:
    """A running request that may be preempted.

    Attributes:
        tier_value: Of its tenant's tier.
        weight: Of its tenant.
        borrowed_blocks: What its tenant holds above nominal.
        admission: Grows with every admission: the largest is the newest.
    """

    request_id: str
    tier_value: int
    weight: int
    borrowed_blocks: int
    admission: int


def choose_victim(candidates: Iterable[VictimCandidate]) -> VictimCandidate:
    """Pick the newest request of the most over-share tenant of the lowest tier.

    Raises:
        ValueError: There is no candidate.
    """
    return min(candidates, key=_yields_first)


def _yields_first(candidate: VictimCandidate) -> tuple[int, float, int]:
    over_share = candidate.borrowed_blocks / candidate.weight if candidate.weight else float("inf")
    return candidate.tier_value, -over_share, -candidate.admission
