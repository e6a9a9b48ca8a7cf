"""Steps that lower tiers leave to the prompts of a higher one."""

from collections.abc import Sequence as Ordered

from tidegate_engine.core.batch import Batch, compose
from tidegate_engine.core.books import Books
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.running import load_of
from tidegate_engine.core.sequence import Sequence
from tidegate_engine.core.step_time import StepFeatures

UNTARGETED_ITL_SECONDS = 1.0
"""How long a stream may pause whose tenant has no target of the time between two tokens."""

_WORTH = 2.0  # by how much what the prompts gain has to be more than what the engine loses


class Precedence:
    """Decides which steps a higher tier has for itself while its prompts are read.

    The decodes of lower tiers make a step longer for every prompt of the higher one. Without them
    the engine needs a step more for the same tokens, at the price that a step has whatever it
    computes. Where they cost the prompts more than that, they stand back, and lower prompts with
    them, for as long as their targets of the time between two tokens allow.
    """

    def __init__(self, books: Books) -> None:
        """Begin with a step that is shared."""
        self._running = books.running
        self._step_times = books.step_times
        self._itl = books.itl
        self._standing_since: float | None = None

    def compose(self, decodes: Ordered[Sequence], limits: EngineLimits, now: float) -> Batch:
        """Return the next step.

        Args:
            decodes: Who may get an output token.
            limits: Of the engine, or of its policy.
            now: When the step begins, on the scheduler's clock.
        """
        running = self._running
        load = running.load if len(decodes) == len(running.decoding) else load_of(decodes)
        in_turn = self._itl.take_turns(decodes, load)
        if len(in_turn) < len(decodes):
            decodes, load = in_turn, load_of(in_turn)
        shared = compose(
            decodes, load, running.prefilling, limits=limits, step_times=self._step_times
        )
        alone = self._alone(shared, limits)
        if alone is not None:
            since = now if self._standing_since is None else self._standing_since
            if self._is_in_time(shared, alone, now - since):
                self._standing_since = since
                for seq in set(shared.decodes).difference(alone.decodes):
                    seq.tenant.totals.deferred_decodes += 1
                return alone
        self._standing_since = None
        return shared

    def _alone(self, shared: Batch, limits: EngineLimits) -> Batch | None:
        """Return the step without lower tiers; None = it isn't worth what it costs."""
        top = max(
            (seq.tenant.tier_value for seq in shared.shares if seq.tenant.tier.preempts_lower),
            default=None,
        )
        if top is None or not self._running.has_below(top):
            return None
        prompts = [seq for seq in shared.shares if seq.tenant.tier_value >= top]
        decodes = [seq for seq in shared.decodes if seq.tenant.tier_value >= top]
        load = load_of(decodes)
        lower = StepFeatures(
            prefill_tokens=0,
            decodes=shared.load.num_decodes - load.num_decodes,
            context_tokens=shared.load.context_tokens - load.context_tokens,
            prefill_pairs=0,
        )
        fixed_seconds = self._step_times.costs.step_seconds
        added_seconds = self._step_times.predict(lower) - fixed_seconds
        if self._num_waiting(prompts) * added_seconds <= _WORTH * fixed_seconds:
            return None
        alone = compose(decodes, load, prompts, limits=limits, step_times=self._step_times)
        return alone if any(alone.shares.values()) else None

    def _num_waiting(self, prompts: Ordered[Sequence]) -> int:
        """Return how many requests wait for a step with these prompts to end: those behind, too."""
        tenants = {seq.tenant for seq in prompts}
        return len(prompts) + sum(len(one.queue) for one in tenants if one.wants_service)

    def _is_in_time(self, shared: Batch, alone: Batch, stood_seconds: float) -> bool:
        """Tell whether those who stand back can wait for a shared step after this one."""
        remaining = {seq.tenant for seq in alone.decodes}
        targets = [
            tenant.rule.service.itl_seconds or UNTARGETED_ITL_SECONDS
            for tenant in {seq.tenant for seq in shared.decodes} - remaining
        ]
        seconds = stood_seconds + sum(
            self._step_times.predict(step.features) for step in (alone, shared)
        )
        return seconds <= (1.0 - self._step_times.margin) * min(targets)
