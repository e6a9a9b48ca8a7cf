"""Label selectors as the API server's `labelSelector` parameter has them: written and read."""

import re
from typing import Any

from pydantic import ValidationError

from tidegate_operator.resources import LabelSelector

_KEY, _VALUE = r"[-A-Za-z0-9_./]+", r"[-A-Za-z0-9_.]*"
_TERM = re.compile(
    rf"\s*(?:!\s*(?P<absent>{_KEY})|(?P<key>{_KEY})"
    rf"(?:\s*(?P<sign>==|=|!=)\s*(?P<value>{_VALUE})|\s+(?P<word>in|notin)\s*\((?P<values>[^()]*)\))?)"
    r"\s*(?:,(?!$)|$)"
)
_OPERATORS = {"=": "In", "==": "In", "!=": "NotIn", "in": "In", "notin": "NotIn"}


class SelectorError(ValueError):
    """A text is no label selector.

    Attributes:
        text: What it is.
    """

    def __init__(self, text: str) -> None:
        super().__init__(f"not a label selector: {text!r}")
        self.text = text


def selector_text(selector: LabelSelector) -> str:
    """Write a label selector as the API server's `labelSelector` parameter takes it."""
    parts = [f"{key}={value}" for key, value in sorted(selector.match_labels.items())]
    for term in selector.match_expressions:
        match term.operator.value:
            case "In":
                parts.append(f"{term.key} in ({','.join(term.values)})")
            case "NotIn":
                parts.append(f"{term.key} notin ({','.join(term.values)})")
            case "Exists":
                parts.append(term.key)
            case "DoesNotExist":
                parts.append(f"!{term.key}")
    return ",".join(parts)


def parse_selector(text: str) -> LabelSelector:
    """Read what `selector_text` writes, and whatever else Kubernetes takes; empty selects all.

    Raises:
        SelectorError: It is none.
    """
    terms: list[dict[str, Any]] = []
    position = 0
    while position < len(text):
        found = _TERM.match(text, position)
        if found is None:
            raise SelectorError(text)
        terms.append(_requirement(found))
        position = found.end()
    try:
        return LabelSelector.model_validate({"matchExpressions": terms})
    except ValidationError as error:
        raise SelectorError(text) from error


def _requirement(term: re.Match[str]) -> dict[str, Any]:
    if absent := term["absent"]:
        return {"key": absent, "operator": "DoesNotExist"}
    relation = term["sign"] or term["word"]
    if relation is None:
        return {"key": term["key"], "operator": "Exists"}
    values = [term["value"]] if term["sign"] else [one.strip() for one in term["values"].split(",")]
    return {"key": term["key"], "operator": _OPERATORS[relation], "values": values}
