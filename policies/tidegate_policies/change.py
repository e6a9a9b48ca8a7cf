"""What leads from one revision of a pool's policy to the next.

A pool's text has a line for the pool and one for each tenant, and its digest is over the digests of
the lines. So an engine that knows a policy line by line takes a change at the cost of what has
changed, and what comes out is checked as strictly as a whole text: the operator's signature is over
the digest of the result, and a change that doesn't lead there is not taken.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from tidegate_policies.envelope import Envelope
from tidegate_policies.problems import SnapshotError, first_problem
from tidegate_policies.rules import TenantRule
from tidegate_policies.snapshot import PolicySnapshot, digest_of_lines, line_digest


class ChangeError(ValueError):
    """A change can't be used; the whole policy has to be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChange:
    """One revision as the difference from an earlier one.

    Attributes:
        envelope: Of the new revision, signed, without its body.
        base: Digest of the policy that this changes.
        pool: The pool's new line; None = as before.
        tenants: The new lines of tenants that are new or changed.
        removed: Tenants that are gone.
    """

    envelope: Envelope
    base: Annotated[str, Field(min_length=1)]
    pool: str | None = None
    tenants: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Write the text that travels."""
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> "PolicyChange":
        """Read a change; nothing is verified yet.

        Raises:
            ChangeError: It is none.
        """
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError as error:
            raise ChangeError(first_problem(error, whole="change")) from error


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a snapshot's text, with its SHA-256."""

    text: str
    digest: bytes

    @classmethod
    def of(cls, text: str) -> "Line":
        """Digest a line."""
        return cls(text, line_digest(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinedPolicy:
    """A policy and its text, line by line; build it with `of`.

    Attributes:
        snapshot: What the lines say.
        pool_line: The first one.
        tenant_lines: The others, by tenant and in this order.
        digest: SHA-256 (hex), as that of the whole text.
    """

    snapshot: PolicySnapshot
    pool_line: Line
    tenant_lines: Mapping[str, Line]
    digest: str

    @classmethod
    def of(cls, snapshot: PolicySnapshot, text: str | None = None) -> "LinedPolicy":
        """Take a policy's text apart.

        Args:
            snapshot: Any.
            text: What it was read from; None = its own.
        """
        pool, *tenants = map(Line.of, snapshot.lines if text is None else text.split("\n"))
        return cls(
            snapshot=snapshot,
            pool_line=pool,
            tenant_lines={
                rule.tenant: line for rule, line in zip(snapshot.tenants, tenants, strict=True)
            },
            digest=digest_of_lines(line.digest for line in (pool, *tenants)),
        )

    @property
    def text(self) -> str:
        """The whole text."""
        return "\n".join(line.text for line in (self.pool_line, *self.tenant_lines.values()))

    def change_to(self, new: "LinedPolicy", envelope: Envelope) -> PolicyChange:
        """Return what makes `new` of this policy.

        Args:
            new: The policy of `envelope`.
            envelope: Signed.
        """
        return PolicyChange(
            envelope=replace(envelope, body=""),
            base=self.digest,
            pool=None if new.pool_line == self.pool_line else new.pool_line.text,
            tenants=tuple(
                line.text
                for name, line in new.tenant_lines.items()
                if self.tenant_lines.get(name) != line
            ),
            removed=tuple(name for name in self.tenant_lines if name not in new.tenant_lines),
        )

    def changed_by(self, change: PolicyChange) -> "LinedPolicy":
        """Return the policy that a change leads to.

        Raises:
            ChangeError: The change is for another base, or doesn't lead to the digest that was
                signed, or what it leads to is no policy.
        """
        if change.base != self.digest:
            raise ChangeError("the change is for another policy than the one in force")
        try:
            rules = {rule.tenant: rule for rule in map(TenantRule.from_json, change.tenants)}
            lines = {name: Line.of(text) for name, text in zip(rules, change.tenants, strict=True)}
            tenants = _merged(self.tenant_lines, lines, change.removed)
            pool = self.pool_line if change.pool is None else Line.of(change.pool)
            digest = digest_of_lines([line.digest for line in (pool, *tenants.values())])
            if digest != change.envelope.digest:
                raise ChangeError("the change doesn't lead to the policy that was signed")
            snapshot = _with_tenants(
                self.snapshot if change.pool is None else PolicySnapshot.from_text(change.pool),
                self.snapshot.tenant_rules | rules,
                tenants,
            )
        except SnapshotError as error:
            raise ChangeError(str(error)) from error
        return LinedPolicy(snapshot=snapshot, pool_line=pool, tenant_lines=tenants, digest=digest)


def _merged(
    old: Mapping[str, Line], new: Mapping[str, Line], removed: tuple[str, ...]
) -> Mapping[str, Line]:
    """Return the lines after a change, by name."""
    merged = {**old, **new}
    for name in removed:
        merged.pop(name, None)
    if new.keys() <= old.keys():
        return merged
    return dict(sorted(merged.items()))


def _with_tenants(
    snapshot: PolicySnapshot, rules: Mapping[str, TenantRule], names: Mapping[str, Line]
) -> PolicySnapshot:
    return replace(snapshot, tenants=tuple(map(rules.__getitem__, names)))


_ADAPTER = TypeAdapter(PolicyChange)
