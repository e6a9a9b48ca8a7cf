"""How an engine leaves its pool, as the pool's policy says."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from tidegate_engine.policy_board import PolicyInForce
from tidegate_engine.settings import Settings

_log = logging.getLogger(__name__)


NOTICE_SECONDS = 10.0
"""How long routers may take to see that the engine isn't ready: what they send is served."""


class Drainable(Protocol):
    """What takes new work, or doesn't.

    Attributes:
        is_leaving: Routers are to send nothing more.
    """

    is_leaving: bool

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
        self._refusal: asyncio.TimerHandle | None = None

    def use_policy(self, policy: PolicyInForce) -> None:
        """Leave or stay, as the policy says: not ready at once, and refusing a moment later."""
        rule = policy.snapshot.drain
        is_told = self._settings.pod_name in rule.engines
        self._drain_seconds = rule.seconds
        if is_told == (self._since is not None):
            return
        _log.info("the policy says: %s", "drain" if is_told else "take new work")
        self._since = self._clock() if is_told else None
        self._generations.is_leaving = is_told
        if self._refusal is not None:
            self._refusal.cancel()
        self._generations.follow_drain(is_told=False)
        if is_told:
            self._refusal = asyncio.get_running_loop().call_later(
                NOTICE_SECONDS, lambda: self._generations.follow_drain(is_told=True)
            )

    def grace_seconds(self) -> float:
        """Return how long requests may go on from now on, at the engine's end.

        The policy's time counts from when it told the engine to drain; the engine's own setting
        counts from now.
        """
        if self._drain_seconds is None:
            return self._settings.drain_seconds
        drained = 0.0 if self._since is None else self._clock() - self._since
        return max(0.0, self._drain_seconds - drained)
