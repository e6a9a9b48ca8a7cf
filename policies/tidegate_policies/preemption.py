"""Who leaves when a higher tier, an owner of KV blocks or a running decode needs room, and how."""

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from tidegate_policies.rules import PreemptionMode, PreemptionRule

FINISHING_TOKENS = 8
"""A decode with at most so many tokens to go isn't worth taking out."""

NEARLY_COMPUTED_SHARE = 0.75
"""Share of its context from which on a prefill isn't worth throwing away."""

LEANING_MARGIN = 0.2
"""How much cheaper the other mode must be before `Auto` changes its leaning."""


class Cause(enum.StrEnum):
    """Why a request was taken out.

    DISPLACED: a higher tier needed its slot or its borrowed blocks. RECLAIMED: an owner wanted
    its nominal blocks. PRESSURE: running requests grew beyond the pool.
    """

    DISPLACED = "displaced"
    RECLAIMED = "reclaimed"
    PRESSURE = "pressure"


class Mode(enum.StrEnum):
    """What becomes of a victim's KV."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


class Shield(enum.StrEnum):
    """What protects a running request from being taken out."""

    NONE = "none"
    NOT_PREEMPTIBLE = "not_preemptible"
    AT_CAP = "at_cap"
    IN_QUANTUM = "in_quantum"
    ABOUT_TO_FINISH = "about_to_finish"
    PREFILL_NEARLY_DONE = "prefill_nearly_done"
    UNDER_FLOOR = "under_floor"


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimCandidate:
    """A running request that may be taken out.

    Attributes:
        tier_value: Of its tenant's tier.
        over_share: What its tenant borrows, in blocks, over the tenant's weight; infinite for
            weight 0.
        backlog: Requests of its tenant that wait in its tier and never ran, over the tenant's
            weight; infinite for weight 0.
        blocks: Freed by taking it out: those that nobody shares.
        seconds: Cost of taking it out and of bringing it back.
        admission: Grows with every admission: the largest is the newest.
    """

    request_id: str
    tenant: str
    tier_value: int
    over_share: float
    backlog: float
    blocks: int
    seconds: float
    admission: int


def plan_victims(
    candidates: Sequence[VictimCandidate],
    *,
    is_enough: Callable[[Sequence[VictimCandidate]], bool],
) -> tuple[VictimCandidate, ...] | None:
    """Choose whom to take out so that it is enough, and nobody who isn't needed for that.

    In order of yielding: lowest tier, most over share, longest backlog, least cost per block freed,
    newest. As many as it takes yield; then those turn out unneeded without whom the others are
    still enough, looked for from the highest tier and the highest cost on.

    The backlog decides mostly where a place is wanted, of which nobody can be over share: whoever
    fills the batch and still has most waiting leaves, not those who want no more than they have.

    Args:
        candidates: None of them protected.
        is_enough: Simulates taking these out. Monotone: with more victims it stays enough. Called
            O(log n) times for the first choice and once per victim beyond the first.

    Returns:
        The victims in order of yielding: no proper subset of them is enough. None when all
        candidates together aren't: then nobody should be taken out.
    """
    order = sorted(candidates, key=_yields_first)
    count = _shortest_enough(order, is_enough)
    return None if count is None else _without_unneeded(order[:count], is_enough)


def _shortest_enough(
    order: list[VictimCandidate], is_enough: Callable[[Sequence[VictimCandidate]], bool]
) -> int | None:
    """Return the length of the shortest prefix that is enough.

    Doubles until a prefix is enough, then bisects: mostly a victim or two suffice, and a
    simulation costs at least as much as its prefix is long.
    """
    too_short, count = -1, 0
    while not is_enough(order[:count]):
        if count == len(order):
            return None
        too_short, count = count, min(len(order), max(1, 2 * count))
    while count - too_short > 1:
        middle = (too_short + count) // 2
        if is_enough(order[:middle]):
            count = middle
        else:
            too_short = middle
    return count


def _without_unneeded(
    victims: list[VictimCandidate], is_enough: Callable[[Sequence[VictimCandidate]], bool]
) -> tuple[VictimCandidate, ...]:
    """Drop each victim without whom it is still enough.

    One pass is minimal: a victim was kept because those that were left then weren't enough without
    it, and later drops only leave fewer. For the same reason the last to yield is always needed.
    """
    left = list(victims)
    for dearest in sorted(victims[:-1], key=_dearness, reverse=True):
        rest = [victim for victim in left if victim is not dearest]
        if is_enough(rest):
            left = rest
    return tuple(left)


def _yields_first(candidate: VictimCandidate) -> tuple[int, float, float, float, int, str]:
    return (
        candidate.tier_value,
        -candidate.over_share,
        -candidate.backlog,
        candidate.seconds / candidate.blocks if candidate.blocks else inf,
        -candidate.admission,
        candidate.request_id,
    )


def _dearness(candidate: VictimCandidate) -> tuple[int, float, str]:
    # The tier first: a request of a higher tier isn't taken out to spare a lower one some seconds.
    return candidate.tier_value, candidate.seconds, candidate.request_id


def choose_pressure_victim(candidates: Iterable[VictimCandidate]) -> VictimCandidate:
    """Pick the newest request of the most over-share tenant of the lowest tier.

    Raises:
        ValueError: There is no candidate.
    """
    return min(candidates, key=lambda c: (c.tier_value, -c.over_share, -c.admission, c.request_id))


def shield(
    *,
    rule: PreemptionRule,
    preemptions: int,
    produced_since_admission: int,
    is_prefilling: bool,
    computed_share: float,
    remaining_tokens: int,
    under_floor: bool,
) -> Shield:
    """Tell what protects a running request; lasting reasons before passing ones.

    The quantum counts from the first token after each admission. A request that is still
    prefilling is protected only when most of its context is computed: a long prompt must not hold
    a slot against a higher tier for its whole prefill.

    Args:
        rule: Of the request's tenant.
        preemptions: Of this request so far.
        produced_since_admission: Output tokens since it was last admitted.
        is_prefilling: Whether its context isn't wholly computed yet.
        computed_share: Of its context, in [0, 1]; looked at while it is prefilling.
        remaining_tokens: Output tokens to go at worst.
        under_floor: Whether it was admitted under its tier's floor, and the tier isn't above it.
    """
    if not rule.preemptible:
        return Shield.NOT_PREEMPTIBLE
    if preemptions >= rule.max_preemptions:
        return Shield.AT_CAP
    if under_floor:
        return Shield.UNDER_FLOOR
    if is_prefilling:
        is_nearly_done = computed_share >= NEARLY_COMPUTED_SHARE
        return Shield.PREFILL_NEARLY_DONE if is_nearly_done else Shield.NONE
    if remaining_tokens <= FINISHING_TOKENS:
        return Shield.ABOUT_TO_FINISH
    is_in_quantum = produced_since_admission < rule.min_quantum_tokens
    return Shield.IN_QUANTUM if is_in_quantum else Shield.NONE


class ModeChoice:
    """Swap or recompute, by cost, with hysteresis over the victims of one engine."""

    def __init__(self) -> None:
        self._leaning: Mode | None = None

    def choose(
        self,
        wish: PreemptionMode,
        *,
        swap_seconds: float,
        recompute_seconds: float,
        has_host_room: bool,
    ) -> Mode:
        """Choose the mode of one victim.

        `Swap` and `Recompute` are obeyed. `Auto` takes the cheaper, and changes its leaning only
        when the other is cheaper by `LEANING_MARGIN`. Without host room for its blocks, whatever
        the wish, the victim is recomputed.
        """
        if wish is PreemptionMode.AUTO:
            mode = self._lean(swap_seconds, recompute_seconds)
        else:
            mode = Mode.SWAP if wish is PreemptionMode.SWAP else Mode.RECOMPUTE
        return mode if has_host_room else Mode.RECOMPUTE

    def _lean(self, swap_seconds: float, recompute_seconds: float) -> Mode:
        if self._leaning is Mode.SWAP:
            swap_seconds *= 1 - LEANING_MARGIN
        elif self._leaning is Mode.RECOMPUTE:
            recompute_seconds *= 1 - LEANING_MARGIN
        if swap_seconds == recompute_seconds:
            return self._leaning or Mode.RECOMPUTE
        self._leaning = Mode.SWAP if swap_seconds < recompute_seconds else Mode.RECOMPUTE
        return self._leaning
