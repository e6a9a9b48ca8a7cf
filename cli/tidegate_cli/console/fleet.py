"""What the console knows at one moment, as it was read; pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tidegate_policies.snapshot import PolicySnapshot
from tidegate_policies.wire import EngineReport

Json = dict[str, Any]
Reports = Mapping[str, EngineReport]
"""The newest report of each engine of a pool, by pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPolicy:
    """The newest policy of a pool, from Redis."""

    revision: int
    snapshot: PolicySnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What a pool's engines reported a while ago, from which rates are taken.

    Attributes:
        seconds: How long ago.
    """

    seconds: float
    reports: Reports


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All pools; whatever could not be read is missing.

    Attributes:
        pools: EnginePool objects by `namespace/name`.
        policies: TenantPolicy objects by `namespace/name`.
        published: By pool.
        reports: By pool.
        past: By pool.
    """

    pools: Mapping[str, Json] = field(default_factory=dict)
    policies: Mapping[str, Json] = field(default_factory=dict)
    published: Mapping[str, PublishedPolicy] = field(default_factory=dict)
    reports: Mapping[str, Reports] = field(default_factory=dict)
    past: Mapping[str, Past] = field(default_factory=dict)

    @property
    def pool_names(self) -> list[str]:
        """Every pool of which anything is known."""
        return sorted({*self.pools, *self.published, *(p for p, r in self.reports.items() if r)})


def condition(thing: Json, kind: str) -> Json | None:
    """Return a condition of an object that is about its current generation; None without one."""
    generation = thing.get("metadata", {}).get("generation")
    for one in thing.get("status", {}).get("conditions") or ():
        if one.get("type") == kind and one.get("observedGeneration", generation) == generation:
            found: Json = one
            return found
    return None
