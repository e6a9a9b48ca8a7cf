"""What inter-token latency targets leave room for: who joins the batch, who is in a step.

Each decode makes the step longer for everybody in it. Who would make it longer than a target of
its own tier or of a higher one allows waits; lower tiers' decodes that run already take turns.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import groupby
from math import inf

from tidegate_engine.core.running import DecodeLoad, Running
from tidegate_engine.core.sequence import Sequence
from tidegate_engine.core.step_time import StepFeatures, StepTimeModel


@dataclass(slots=True)
class _Load:
    """What requests bring into a step once their prompts are read.

    Attributes:
        requests: How many they are.
        context_tokens: Their context, added up.
        target: The tightest of their targets, in seconds; infinite without any.
    """

    requests: int = 0
    context_tokens: int = 0
    target: float = inf

    def add(self, other: "_Load") -> None:
        self.requests += other.requests
        self.context_tokens += other.context_tokens
        self.target = min(self.target, other.target)


class ItlTargets:
    """Keeps decodes within the targets of those beside them.

    A target that a single decode would miss is nobody's concern: no batch meets it.
    """

    def __init__(self, running: Running, step_times: StepTimeModel) -> None:
        """Read the scheduler's own state; nothing of it is changed."""
        self._running = running
        self._step_times = step_times
        self._loads: dict[int, _Load] = {}
        self._seen = -1
        self._least_target = 0.0
        self._stood: dict[Sequence, int] = {}

    def begin_step(self) -> None:
        """Look at the running requests anew: their context has grown."""
        self._seen = -1

    def note_start(self, seq: Sequence) -> None:
        """Note that a request has joined the batch, and nothing else has changed."""
        if self._seen == self._running.version - 1:
            self._seen += 1
            self._loads.setdefault(seq.tenant.tier_value, _Load()).add(self._load_of(seq))

    def num_fitting(self, tier_value: int, context_tokens: float) -> float:
        """Return how many more requests a tier may have beside those of it and of higher tiers.

        Lower tiers don't count: they make way. Nor do the newcomers' own targets: who has a tight
        one would be kept out by those who run, and by whoever comes after them, for ever.

        Args:
            tier_value: Of the tier.
            context_tokens: Of each of the requests.
        """
        if not self._has_targets():
            return inf
        beside = _Load()
        for value, load in self._look().items():
            if value >= tier_value:
                beside.add(load)
        if beside.target == inf:
            return inf
        costs = self._step_times.costs
        each = costs.decode_seconds + costs.context_token_seconds * context_tokens
        room = self._within(beside.target) - self._predict(beside)
        if each <= 0.0:
            return inf if room >= 0.0 else 0.0
        return max(0.0, room / each)

    def keeps_out(self, seq: Sequence) -> bool:
        """Tell whether a request would make steps too long for those who run."""
        return self.num_fitting(seq.tenant.tier_value, seq.num_tokens) < 1.0

    def take_turns(self, decodes: Ordered[Sequence], load: DecodeLoad) -> Ordered[Sequence]:
        """Return who of these has a row in the next step.

        All of them, if that is within everybody's target. Else decodes of lower tiers stand back
        for the targets of higher ones; who has stood for longest goes on first, and one of each
        tier does in every step.

        Args:
            decodes: Who may get an output token.
            load: What they bring into a step.
        """
        target = load.tightest_itl or inf
        whole = _Load(load.num_decodes, load.context_tokens, target)
        if self._predict(whole) <= self._within(target):
            self._stood = {}
            return decodes
        self._least_target = self._least()
        chosen: dict[Sequence, None] = {}
        above, taken = inf, _Load()
        for _, tier in groupby(sorted(decodes, key=_from_the_top), key=_from_the_top):
            for number, seq in enumerate(sorted(tier, key=self._turn)):
                more = _Load(taken.requests, taken.context_tokens, taken.target)
                more.add(self._load_of(seq))
                if not number or self._predict(more) <= self._within(above):
                    chosen[seq] = None
                    taken = more
            above = taken.target
        self._stood = {seq: self._stood.get(seq, 0) + 1 for seq in decodes if seq not in chosen}
        for seq in self._stood:
            seq.tenant.totals.deferred_decodes += 1
        return [seq for seq in decodes if seq in chosen]

    def _turn(self, seq: Sequence) -> int:
        return -self._stood.get(seq, 0)

    def _has_targets(self) -> bool:
        running = self._running
        return running.load.tightest_itl is not None or any(
            seq.tenant.rule.service.itl_seconds is not None for seq in running.prefilling
        )

    def _look(self) -> dict[int, _Load]:
        """Return what runs, by tier value."""
        if self._seen != self._running.version:
            self._seen = self._running.version
            self._least_target = self._least()
            running = self._running
            self._loads = {
                value: _Load(number, running.context_by_tier[value])
                for value, number in running.decodes_by_tier.items()
            }
            for value, target in running.targets_by_tier:
                self._loads[value].add(_Load(target=self._binding(target)))
            for seq in running.prefilling:
                self._loads.setdefault(seq.tenant.tier_value, _Load()).add(self._load_of(seq))
        return self._loads

    def _load_of(self, seq: Sequence) -> _Load:
        return _Load(1, seq.num_tokens, self._binding(seq.tenant.rule.service.itl_seconds))

    def _binding(self, target: float | None) -> float:
        """Return a target, or infinity in place of one that binds nobody."""
        return inf if target is None or target < self._least_target else target

    def _least(self) -> float:
        """Return the least target that a decode which is alone in its step meets."""
        return self._predict(_Load(1, 0)) / (1.0 - self._step_times.margin)

    def _predict(self, load: _Load) -> float:
        return self._step_times.predict(StepFeatures(0, load.requests, load.context_tokens, 0))

    def _within(self, target: float) -> float:
        return (1.0 - self._step_times.margin) * target


def _from_the_top(seq: Sequence) -> int:
    return -seq.tenant.tier_value
