"""How an engine leaves its pool, as the pool's policy says."""

import logging
from collections.abc import Callable
from typing import Protocol

from tidegate_engine.policy_board import PolicyInForce
from tidegate_engine.settings import Settings

_log = logging.getLogger(__name__)


class Drainable(Protocol):
    """What takes new work, or doesn't."""

    def follow_drain(self, *, is_told: bool) -> None:
        """Refuse new work while told to."""


class Leave:
    """Drains the engine while the policy names it, and knows what grace is left at its end."""

    def __init__(
        self, generations: Drainable, settings: Settings, *, clock: Callable[[], float]
    ) -> None:
        """Take new work, until a policy says otherwise.

        Args:
            generations: Of this engine.
            settings: Its name in the pool, and the grace unless the policy has one.
            clock: Monotonic, in seconds.
        """
        self._generations = generations
        self._settings = settings
        self._clock = clock
        self._since: float | None = None
        self._drain_seconds: float | None = None

    def use_policy(self, policy: PolicyInForce) -> None:
        """Begin or end to refuse new work, as the policy says."""
        rule = policy.snapshot.drain
        is_told = self._settings.pod_name in rule.engines
        self._drain_seconds = rule.seconds
        if is_told == (self._since is not None):
            return
        _log.info("the policy says: %s", "drain" if is_told else "take new work")
        self._since = self._clock() if is_told else None
        self._generations.follow_drain(is_told=is_told)

    def grace_seconds(self) -> float:
        """Return how long requests may go on from now on, at the engine's end.

        The policy's time counts from when it told the engine to drain; the engine's own setting
        counts from now.
        """
        if self._drain_seconds is None:
            return self._settings.drain_seconds
        drained = 0.0 if self._since is None else self._clock() - self._since
        return max(0.0, self._drain_seconds - drained)
