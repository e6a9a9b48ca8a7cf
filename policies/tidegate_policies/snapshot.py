"""The compiled policy of one pool: the one document that crosses from control plane to engine.

The operator compiles many custom resources into one `PolicySnapshot`; an engine obeys it whole,
from one step boundary on. Both sides share this module. A snapshot holds what engines enforce and
nothing else, so that a change that no engine could notice makes no new revision.

Its text has a line of JSON for the pool and one for each tenant, and leaves out what equals its
default. The defaults here are part of the format: a changed one would give the same text another
meaning.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tidegate_policies.problems import SnapshotError, first_problem
from tidegate_policies.rules import (
    KNOWN_FIELDS_ONLY,
    MAX_RESERVED_PERCENT,
    UNKNOWN_TENANT,
    BatchingRule,
    DrainRule,
    KvEstimate,
    TenantRule,
    TierRule,
    UnknownAction,
    UnknownTenantsRule,
    WatermarkRule,
)


@dataclass(frozen=True, kw_only=True)
class PolicySnapshot:
    """The policy of one pool; build it with `of`, read it with `from_json`.

    Attributes:
        pool: `namespace/name` of the EnginePool.
        tiers: By value, highest first, then by name.
        tenants: By name.
    """

    __pydantic_config__: ClassVar[ConfigDict] = KNOWN_FIELDS_ONLY

    pool: str
    batching: BatchingRule = field(default_factory=BatchingRule)
    watermarks: WatermarkRule = field(default_factory=WatermarkRule)
    kv_estimate: KvEstimate = KvEstimate.PREDICTED
    unknown_tenants: UnknownTenantsRule = field(default_factory=UnknownTenantsRule)
    tiers: tuple[TierRule, ...] = ()
    tenants: tuple[TenantRule, ...] = ()
    drain: DrainRule = field(default_factory=DrainRule)

    def __post_init__(self) -> None:
        _check_consistency(self)

    @classmethod
    def of(
        cls,
        pool: str,
        *,
        tiers: Iterable[TierRule] = (),
        tenants: Iterable[TenantRule] = (),
        batching: BatchingRule | None = None,
        watermarks: WatermarkRule | None = None,
        kv_estimate: KvEstimate = KvEstimate.PREDICTED,
        unknown_tenants: UnknownTenantsRule | None = None,
        drain: DrainRule | None = None,
    ) -> "PolicySnapshot":
        """Build a snapshot in canonical order: same content, same digest.

        Raises:
            SnapshotError: The parts contradict each other; the message says which.
        """
        return cls(
            pool=pool,
            batching=batching or BatchingRule(),
            watermarks=watermarks or WatermarkRule(),
            kv_estimate=kv_estimate,
            unknown_tenants=unknown_tenants or UnknownTenantsRule(),
            tiers=tuple(sorted(tiers, key=lambda t: (-t.value, t.name))),
            tenants=tuple(sorted(tenants, key=lambda t: t.tenant)),
            drain=drain or DrainRule(),
        )

    @classmethod
    def from_text(cls, text: str) -> "PolicySnapshot":
        """Read a snapshot written by `to_text`.

        Raises:
            SnapshotError: Not JSON, a field is missing or out of range, or parts contradict.
        """
        pool, *tenants = text.split("\n")
        whole = f'{pool[:-1]},"tenants":[{",".join(tenants)}]}}' if tenants else pool
        try:
            snapshot = _ADAPTER.validate_json(whole)
        except ValidationError as error:
            raise SnapshotError(first_problem(error, whole="snapshot")) from error
        if len(snapshot.tenants) != len(tenants):
            raise SnapshotError("tenants: each has a line of its own")
        return snapshot

    def to_text(self) -> str:
        """Write the canonical text, over whose lines `digest` is computed."""
        return "\n".join(self.lines)

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The lines of the text: one for the pool, then one for each tenant."""
        pool = _ADAPTER.dump_json(self, exclude_defaults=True, exclude={"tenants"}).decode()
        return pool, *(rule.to_json() for rule in self.tenants)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over the SHA-256 of each line."""
        return digest_of_lines(map(line_digest, self.lines))

    @cached_property
    def tenant_rules(self) -> MappingProxyType[str, TenantRule]:
        """The rules by tenant."""
        return MappingProxyType({rule.tenant: rule for rule in self.tenants})

    @cached_property
    def tier_values(self) -> Mapping[str, int]:
        """The tiers' values by name."""
        return MappingProxyType({tier.name: tier.value for tier in self.tiers})

    @cached_property
    def tenant_by_key_digest(self) -> Mapping[str, str]:
        """Which tenant the holder of a key is, by the key's SHA-256."""
        return MappingProxyType(
            {digest: rule.tenant for rule in self.tenants for digest in rule.key_digests}
        )


def text_digest(text: str) -> str:
    """Return the digest of a snapshot's text."""
    return digest_of_lines(map(line_digest, text.split("\n")))


def line_digest(line: str) -> bytes:
    """Return the SHA-256 of one line of a snapshot's text."""
    return hashlib.sha256(line.encode()).digest()


def digest_of_lines(digests: Iterable[bytes]) -> str:
    """Return the digest (hex) of a text whose lines have these digests."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _check_consistency(snapshot: PolicySnapshot) -> None:
    """Refuse what no engine could obey."""
    _check_watermarks(snapshot.watermarks)
    _check_batching(snapshot.batching)
    _check_names(snapshot)
    _check_sums(snapshot)


def _check_watermarks(marks: WatermarkRule) -> None:
    if not 0 < marks.low_percent < marks.high_percent < 100:
        raise SnapshotError(
            f"watermarks: 0 < low < high < 100 must hold, got low {marks.low_percent} and"
            f" high {marks.high_percent}"
        )


def _check_batching(batching: BatchingRule) -> None:
    """Refuse limits that no number of prompt tokens meets."""
    names = ("prefill_chunk_min", "prefill_chunk_max", "max_batched_tokens")
    limits = [(name, limit) for name in names if (limit := getattr(batching, name)) is not None]
    for (low_name, low), (high_name, high) in pairwise(limits):
        if low > high:
            raise SnapshotError(
                f"batching: {low_name} is {low}, more than the {high_name} of {high}"
            )


def _check_names(snapshot: PolicySnapshot) -> None:
    _refuse_twice("tiers", (tier.name for tier in snapshot.tiers))
    if len(snapshot.tenant_rules) < len(snapshot.tenants):
        _refuse_twice("tenants", (rule.tenant for rule in snapshot.tenants))
    if len(snapshot.tenant_by_key_digest) < sum(len(rule.key_digests) for rule in snapshot.tenants):
        _refuse_twice("key_digests", (d for rule in snapshot.tenants for d in rule.key_digests))
    tiers = {tier.name: tier.value for tier in snapshot.tiers}
    # Thousands of tenants have the same few tiers; of each choice the first tenant stands for all.
    choices = {(rule.tier, rule.allowed_tiers): rule for rule in reversed(snapshot.tenants)}
    for rule in choices.values():
        for tier in (rule.tier, *rule.allowed_tiers):
            if tier not in tiers:
                raise SnapshotError(f"tenant {rule.tenant!r}: tier {tier!r} is not in the snapshot")
        for tier in rule.allowed_tiers:
            if tiers[tier] >= tiers[rule.tier]:
                raise SnapshotError(
                    f"tenant {rule.tenant!r}: allowed tier {tier!r} is not below {rule.tier!r}"
                )
    if UNKNOWN_TENANT in snapshot.tenant_rules:
        raise SnapshotError(f"tenant {UNKNOWN_TENANT!r}: the name is kept for undeclared tenants")
    unknown = snapshot.unknown_tenants
    if unknown.action is UnknownAction.ADMIT and unknown.tier not in tiers:
        raise SnapshotError(f"unknown_tenants: tier {unknown.tier!r} is not in the snapshot")


def _check_sums(snapshot: PolicySnapshot) -> None:
    nominal = sum(rule.kv_nominal_percent for rule in snapshot.tenants)
    low = snapshot.watermarks.low_percent
    if nominal > low:
        raise SnapshotError(
            f"tenants: the nominal KV percentages sum up to {nominal}, more than the low"
            f" watermark of {low}"
        )
    reserved = sum(tier.reserved_share_percent for tier in snapshot.tiers)
    if reserved > MAX_RESERVED_PERCENT:
        raise SnapshotError(
            f"tiers: the reserved shares sum up to {reserved} percent, more than"
            f" {MAX_RESERVED_PERCENT}"
        )


def _refuse_twice(what: str, names: Iterable[str]) -> None:
    found = list(names)
    if len(set(found)) == len(found):
        return
    twice = min(name for name, count in Counter(found).items() if count > 1)
    raise SnapshotError(f"{what}: {twice!r} appears twice")


_ADAPTER = TypeAdapter(PolicySnapshot)
