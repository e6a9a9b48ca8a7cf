"""Faults to seed into the scheduler, to show that what watches it can fail.

A fault is put into the product's methods by the test, for its duration.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from tidegate_testing.scheduler_driver import RandomDriver
from tidegate_testing.scheduler_invariants import Invariant, InvariantError
from tidegate_testing.scheduler_policies import KV_ALONE, TENANTS, Trait

Patch = pytest.MonkeyPatch
Seed = Callable[[Patch], None]

_NUM_EVENTS = 40


@dataclass(frozen=True, kw_only=True)
class SeededFault:
    """A fault, and an invariant that it breaks.

    Attributes:
        seed: Puts the fault into the product.
        traits: Of the policies under which it is looked for.
        drawn: Traits that come and go.
        checks_books: Whether the scheduler verifies itself, too: else it is found from outside.
    """

    seed: Seed
    breaks: Invariant
    traits: tuple[Trait, ...] = field(repr=False)
    drawn: list[Trait] = field(repr=False)
    checks_books: bool


ALL_SWAP = tuple((tenant, "swaps") for tenant in TENANTS)
TWO_TIERS = (("a", "low"), ("b", "low"), ("c", "high"), ("d", "high"))
OWNERS = (("a", "owns much"), ("a", "low"), ("b", "owns much"), ("b", "low"))
HALF_LENT = (("a", "lends half"), ("b", "lends half"))


def fault(
    breaks: Invariant,
    *traits: Trait,
    drawn: list[Trait] = KV_ALONE,
    checks_books: bool = False,
) -> Callable[[Seed], SeededFault]:
    """Make a function that puts a fault into the product a `SeededFault`."""

    def make(seed: Seed) -> SeededFault:
        return SeededFault(
            seed=seed, breaks=breaks, traits=traits, drawn=drawn, checks_books=checks_books
        )

    return make


def faults_in(names: Mapping[str, object]) -> dict[str, SeededFault]:
    """Return the faults of a module, by name."""
    return {name: value for name, value in names.items() if isinstance(value, SeededFault)}


def violations(fault: SeededFault, *, num_seeds: int = 100) -> Iterator[Invariant]:
    """Yield the invariant that is broken first, of every seed that breaks any."""
    for seed in range(num_seeds):
        try:
            driver = RandomDriver(
                seed, given=fault.traits, drawn=fault.drawn, checks_books=fault.checks_books
            )
            driver.run(_NUM_EVENTS)
        except InvariantError as error:
            yield error.invariant
