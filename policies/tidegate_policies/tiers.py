"""How much of the service each priority tier got lately, against the share reserved for it."""

from collections.abc import Mapping
from math import exp, inf


class TierShares:
    """Charged service by tier value, as exponentially fading sums.

    What was charged t seconds ago weighs exp(-t / window). All tiers fade alike, at most once per
    moment. A clock that steps back counts as no time passed. A tier is known by its value: two
    tiers of equal value are served as one.
    """

    def __init__(self, window_seconds: float = 60.0) -> None:
        self._window_seconds = window_seconds
        self._service: dict[int, float] = {}
        self._given: dict[int, float] = {}
        self._now = -inf

    def charge(self, tier_value: int, cost: float, now: float) -> None:
        """Add service that the tier was given now."""
        if now > self._now:
            self._fade(now)
        self._service[tier_value] = self._service.get(tier_value, 0.0) + cost
        self._given[tier_value] = self._given.get(tier_value, 0.0) + cost

    @property
    def given(self) -> Mapping[int, float]:
        """What each tier was ever charged: it never fades."""
        return self._given

    def share(self, tier_value: int, now: float) -> float:
        """Return the tier's share of the service, in [0, 1]; 0 when nothing was charged."""
        if now > self._now:
            self._fade(now)
        total = sum(self._service.values())
        return self._service.get(tier_value, 0.0) / total if total else 0.0

    def is_below_floor(
        self,
        tier_value: int,
        *,
        reserved_percent: int,
        now: float,
        committed: Mapping[int, float],
    ) -> bool:
        """Tell whether the tier is to be served next for its floor's sake.

        `committed` is the predicted cost, by tier value, that what runs already will still be
        charged. It counts like service given, so that a floor isn't overshot by admitting more and
        more while what was admitted is still to be served.
        """
        if now > self._now:
            self._fade(now)
        total = sum(self._service.values()) + sum(committed.values())
        if not total:
            return reserved_percent > 0
        own = self._service.get(tier_value, 0.0) + committed.get(tier_value, 0.0)
        return 100 * own < reserved_percent * total

    def _fade(self, now: float) -> None:
        factor = exp((self._now - now) / self._window_seconds)
        for tier_value in self._service:
            self._service[tier_value] *= factor
        self._now = now
