"""Requests held to the rate limits of their tenants: set aside before, settled after."""

from collections.abc import Sequence

from tidegate_engine.core.request import Request
from tidegate_engine.fleet.rates import FleetRates, Reservation, Shortage
from tidegate_engine.policy_board import PolicyInForce
from tidegate_engine.server.errors import RateLimitedError

_FIRST_GUESS_TOKENS = 128.0
"""The output expected of a tenant of which nothing is known."""

_NEWEST_COUNTS = 0.1  # share of the newest output in the expectation of the next


class RateGate:
    """Expects outputs by those that went before; what it expects wrongly is settled anyway."""

    def __init__(self, rates: FleetRates) -> None:
        self._rates = rates
        self._mean_output: dict[str, float] = {}

    @property
    def is_alone(self) -> bool:
        """Whether limits are divided by the number of engines, as Redis can't be asked."""
        return self._rates.is_alone

    def use_policy(self, policy: PolicyInForce) -> None:
        """Obey the limits of another policy."""
        self._rates.use_policy(policy.snapshot)
        known = policy.snapshot.tenant_rules
        self._mean_output = {t: mean for t, mean in self._mean_output.items() if t in known}

    def check(self, tenant: str) -> None:
        """Refuse what is known to be refused, before anything is done for it.

        Raises:
            RateLimitedError: The tenant was told to come back later than now.
        """
        if (shortage := self._rates.known_shortage(tenant)) is not None:
            raise _rate_limited(shortage)

    def limits_tokens(self, tenant: str) -> bool:
        """Tell whether it counts how many tokens a request of `tenant` will use."""
        return self._rates.limits_tokens(tenant)

    async def reserve(
        self, tenant: str, requests: Sequence[Request], *, prompt_tokens: int
    ) -> Reservation:
        """Set aside what the choices of one HTTP request will use.

        Args:
            tenant: Whose.
            requests: The choices.
            prompt_tokens: To be computed of all prompts, each counted once.

        Raises:
            RateLimitedError: It isn't there now.
        """
        mean = self._mean_output.get(tenant, _FIRST_GUESS_TOKENS)
        outputs = sum(min(float(request.max_output_tokens), mean) for request in requests)
        reserved = await self._rates.reserve(tenant, prompt_tokens + outputs)
        if isinstance(reserved, Shortage):
            raise _rate_limited(reserved)
        return reserved

    def settle(
        self, reservation: Reservation, *, computed_tokens: int, outputs: Sequence[int]
    ) -> None:
        """Charge what was used instead of what was set aside.

        Args:
            reservation: Of one HTTP request.
            computed_tokens: Of its prompts; what the prefix cache had is free.
            outputs: Output tokens of each choice.
        """
        self._rates.settle(reservation, used_tokens=computed_tokens + sum(outputs))
        mean = self._mean_output.get(reservation.tenant, _FIRST_GUESS_TOKENS)
        for length in outputs:
            mean += (length - mean) * _NEWEST_COUNTS
        self._mean_output[reservation.tenant] = mean


def _rate_limited(shortage: Shortage) -> RateLimitedError:
    return RateLimitedError(
        shortage.unit, per_minute=shortage.per_minute, wait_seconds=shortage.wait_seconds
    )
