"""Field types that several kinds share: names, durations, references, selectors."""

import enum
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, ClassVar

from pydantic import Field

from tidegate_operator.resources.base import CelRule, Model

Name = Annotated[
    str,
    Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"),
]
Namespace = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
]
Weight = Annotated[int, Field(ge=0, le=1_000_000)]
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]

_MILLISECONDS_PER_UNIT = {"h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_DURATION_PART = re.compile(r"([0-9]{1,5})(h|ms|m|s)")

# The subset of Go's format without fractions: one text per length, exact in every language.
Duration = Annotated[str, Field(max_length=32, pattern=r"^([0-9]{1,5}(h|m|s|ms)){1,4}$")]
TimeLimit = Annotated[
    Duration,
    CelRule(
        "duration(self) > duration('0s') && duration(self) <= duration('24h')",
        "must be a duration longer than 0s and at most 24h",
    ),
]
# Zero is a choice here: never hold a request back to fill a batch.
HoldTime = Annotated[
    Duration,
    CelRule("duration(self) <= duration('60s')", "must be a duration of at most 60s"),
]


# Thousands of policies say the same few durations, and a compilation reads all of them.
@lru_cache(maxsize=1024)
def duration_seconds(text: str) -> float:
    """Return the length of a duration such as `250ms`, `30s`, `5m` or `1h30m`.

    Raises:
        ValueError: `text` is not in that format.
    """
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"duration {text!r} is not like 250ms, 30s, 5m or 1h30m")
    # In whole milliseconds, so that 1s100ms and 1100ms are the same number to the last bit.
    return sum(int(number) * _MILLISECONDS_PER_UNIT[unit] for number, unit in parts) / 1000


def duration_text(seconds: float) -> str:
    """Return the duration that is as long, or next longer: `480ms`, `1500ms`, `30s`, `1h30m`.

    Args:
        seconds: Rounded up to milliseconds, and from 100 s on to seconds.
    """
    # What is a whole number but for the last bits is that number.
    milliseconds = math.ceil(round(seconds * 1000, 6))
    if milliseconds % 1000 and milliseconds < 100_000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(math.ceil(milliseconds / 1000), 60)
    parts = ((minutes // 60, "h"), (minutes % 60, "m"), (rest, "s"))
    return "".join(f"{number}{unit}" for number, unit in parts if number) or "0s"


class LocalRef(Model):
    """Reference to an object in the same namespace."""

    name: Annotated[Name, Field(description="Name of the object, in the namespace of this one.")]


LabelKey = Annotated[str, Field(min_length=1, max_length=317)]
LabelValue = Annotated[
    str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")
]


class SelectorOperator(enum.StrEnum):
    """How a label is compared with the values."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class LabelRequirement(Model):
    """One requirement on a label."""

    cel_rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            "(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
            "values must be given with In and NotIn, and left out with Exists and DoesNotExist",
            ".values",
        ),
    )

    key: Annotated[LabelKey, Field(description="Key of the label.")]
    operator: Annotated[
        SelectorOperator,
        Field(description="Relation of the label to the values: In, NotIn, Exists, DoesNotExist."),
    ]
    values: Annotated[
        tuple[LabelValue, ...],
        Field(max_length=64, description="Values to compare with; needed by In and NotIn alone."),
    ] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Tell whether `labels` meet the requirement, by Kubernetes' rules."""
        match self.operator:
            case SelectorOperator.IN:
                return labels.get(self.key) in self.values
            case SelectorOperator.NOT_IN:
                return labels.get(self.key) not in self.values
            case SelectorOperator.EXISTS:
                return self.key in labels
            case SelectorOperator.DOES_NOT_EXIST:
                return self.key not in labels


class LabelSelector(Model):
    """Objects whose labels meet every requirement; an empty selector takes all."""

    match_labels: Annotated[
        dict[str, LabelValue],
        Field(max_length=64, description="Labels that must be present with exactly these values."),
        CelRule(
            "self.all(key, size(key) >= 1 && size(key) <= 317)",
            "every label key must have 1 to 317 characters",
        ),
    ] = Field(default_factory=dict)
    match_expressions: Annotated[
        tuple[LabelRequirement, ...],
        Field(max_length=64, description="Further requirements on labels; all must hold."),
    ] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Tell whether an object with these labels is selected."""
        return all(labels.get(key) == value for key, value in self.match_labels.items()) and all(
            requirement.matches(labels) for requirement in self.match_expressions
        )


class NamespacesFrom(enum.StrEnum):
    """Which namespaces are let in."""

    SAME = "Same"
    ALL = "All"
    SELECTOR = "Selector"


class AllowedNamespaces(Model):
    """The namespaces whose TenantPolicies may name this object."""

    cel_rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            "has(self.selector) == (self.from == 'Selector')",
            "selector must be given with from: Selector, and left out otherwise",
            ".selector",
        ),
    )

    from_: Annotated[
        NamespacesFrom,
        Field(
            alias="from",
            description="Which namespaces are let in: Same, All, or those that match the Selector.",
        ),
    ]
    selector: Annotated[
        LabelSelector | None,
        Field(description="Labels of the namespaces let in; needed with from: Selector."),
    ] = None

    def allows(self, *, namespace: str, own_namespace: str, labels: Mapping[str, str]) -> bool:
        """Tell whether a policy in `namespace`, which carries `labels`, may name this object.

        Args:
            namespace: Where the policy lives.
            own_namespace: Where this object lives; empty for a cluster-scoped one.
            labels: Labels of the namespace `namespace`.
        """
        match self.from_:
            case NamespacesFrom.ALL:
                return True
            case NamespacesFrom.SAME:
                return namespace == own_namespace
            case NamespacesFrom.SELECTOR:
                return self.selector is not None and self.selector.matches(labels)
