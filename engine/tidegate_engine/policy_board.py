"""The policy in force, as everybody outside the engine's thread sees it.

Between a policy's arrival and its effect lies a step boundary. Identity, metrics and reports follow
what is in force, never what is merely on its way.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tidegate_engine.events import PolicyApplied
from tidegate_policies.snapshot import PolicySnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInForce:
    """The policy that the engine obeys.

    Attributes:
        digest: SHA-256 (hex) of the snapshot's text.
        step: The first step that was planned under it.
        at: The engine's clock when it took effect.
    """

    snapshot: PolicySnapshot
    revision: int
    digest: str
    step: int
    at: float


class PolicyBoard:
    """Hands policies to the engine and shows which one is in force.

    Attributes:
        on_change: Called with the policy that has come into force, in order.
    """

    def __init__(self, hand_over: Callable[[PolicySnapshot, int], object]) -> None:
        """Show nothing yet.

        Args:
            hand_over: Puts a policy in force at the next step boundary; `applied` is called then.
        """
        self._hand_over = hand_over
        self._offered: dict[int, tuple[PolicySnapshot, str]] = {}
        self._in_force: PolicyInForce | None = None
        self.on_change: list[Callable[[PolicyInForce], None]] = []

    @property
    def in_force(self) -> PolicyInForce | None:
        """The policy in force; None before the first."""
        return self._in_force

    @property
    def newest_revision(self) -> int:
        """The largest revision that was offered; 0 = none yet."""
        in_force = self._in_force.revision if self._in_force else 0
        return max(self._offered, default=in_force)

    @property
    def newest_digest(self) -> str:
        """Digest of the newest revision that was offered; empty = none yet."""
        if self._offered:
            return self._offered[max(self._offered)][1]
        return self._in_force.digest if self._in_force else ""

    def offer(self, snapshot: PolicySnapshot, *, revision: int, digest: str) -> None:
        """Put a policy in force at the next step boundary.

        Args:
            snapshot: Verified.
            revision: Larger than `newest_revision`.
            digest: Of the snapshot's text.
        """
        self._offered[revision] = (snapshot, digest)
        self._hand_over(snapshot, revision)

    def applied(self, applied: PolicyApplied) -> None:
        """Note that an offered policy took effect."""
        snapshot, digest = self._offered[applied.revision]
        # Older ones were overtaken before they took effect.
        self._offered = {r: o for r, o in self._offered.items() if r > applied.revision}
        self._in_force = PolicyInForce(
            snapshot=snapshot,
            revision=applied.revision,
            digest=digest,
            step=applied.step,
            at=applied.at,
        )
        for callback in self.on_change:
            callback(self._in_force)
