"""Values that break a structural schema, one for each of its rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tidegate_testing.manifests import REMOVED

Schema = dict[str, Any]

_OTHER_TYPES: dict[str, object] = {
    "string": 7,
    "integer": "seven",
    "boolean": "maybe",
    "array": "not-a-list",
    "object": "not-an-object",
}
# From a rule's limit and a valid value to one just outside.
_BREAKING: dict[str, Callable[[Any, Any], object]] = {
    "minimum": lambda limit, _: limit - 1,
    "maximum": lambda limit, _: limit + 1,
    "minLength": lambda limit, _: "a" * (limit - 1),
    "maxLength": lambda limit, _: "a" * (limit + 1),
    "pattern": lambda _, __: "\t!",
    "minItems": lambda limit, example: example[: limit - 1],
    "maxItems": lambda limit, example: example[:1] * (limit + 1),
    "maxProperties": lambda limit, _: {f"key-{n}": "x" for n in range(limit + 1)},
}


@dataclass(frozen=True)
class Violation:
    """A change that breaks one rule.

    Attributes:
        rule: `path keyword`, as in `spec.weight maximum`.
        path: Where to put the value, with dots, as `manifests.changed` takes it.
        blamed: The field that the API server has to name.
        says: What its message has to contain besides.
    """

    rule: str
    path: str
    value: object
    blamed: str
    says: tuple[str, ...] = ()


def rules(schema: Schema, path: str = "spec") -> Iterator[str]:
    """Names every CEL rule in `schema`: `path: message`."""
    for rule in schema.get("x-kubernetes-validations", ()):
        yield f"{path}: {rule['message']}"
    for inner_path, inner in _children(schema, path):
        yield from rules(inner, inner_path)


def violations(schema: Schema, example: Any, path: str = "spec") -> Iterator[Violation]:  # noqa: ANN401
    """Yields one violation for each rule of `schema` but CEL, at every depth of `example`.

    Args:
        schema: A structural schema.
        example: A value of that schema in which everything is present.
        path: Where the value is.
    """
    blamed = _json_path(path)
    kind = schema["type"]
    yield Violation(f"{path} type", path, _OTHER_TYPES[kind], blamed, (f"must be of type {kind}",))
    if "enum" in schema:
        allowed = tuple(f'"{value}"' for value in schema["enum"])
        yield Violation(f"{path} enum", path, "Sometimes", blamed, allowed)
    else:
        yield from _bound_violations(schema, example, path)
    for name in schema.get("required", ()):
        inner = f"{path}.{name}"
        yield Violation(f"{inner} required", inner, REMOVED, _json_path(inner), ("Required value",))
    for inner_path, inner_schema in _children(schema, path):
        step = inner_path.removeprefix(f"{path}.")
        key = next(iter(example)) if step == "*" and kind == "object" else step
        key = "0" if step == "*" and kind == "array" else key
        inner_example = example[0] if kind == "array" else example.get(key)
        if inner_example is not None:
            yield from violations(inner_schema, inner_example, f"{path}.{key}")


def _bound_violations(schema: Schema, example: Any, path: str) -> Iterator[Violation]:  # noqa: ANN401
    blamed = _json_path(path)
    for keyword, breaking in _BREAKING.items():
        if keyword in schema:
            limit = schema[keyword]
            yield Violation(
                f"{path} {keyword}", path, breaking(limit, example), blamed, (str(limit),)
            )
    for rule in schema.get("x-kubernetes-validations", ()):
        for value in _durations_against(rule["rule"]):
            yield Violation(f"{path} = {value}", path, value, blamed, (rule["message"],))
    if schema.get("x-kubernetes-list-type") in ("set", "map"):
        twice = example[:1] * 2
        yield Violation(f"{path} unique", path, twice, f"{blamed}[1]", ("Duplicate value",))


def _durations_against(rule: str) -> tuple[str, ...]:
    """Durations that a CEL rule on durations refuses: the longest that can be said, and zero."""
    if "duration(self) <=" not in rule:
        return ()
    return ("99999h", "0s") if "duration(self) > duration('0s')" in rule else ("99999h",)


def _children(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}.{name}", inner
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            yield f"{path}.*", schema[keyword]


def _json_path(path: str) -> str:
    """Writes `a.0.b` as the API server does: `a[0].b`."""
    steps = (f"[{step}]" if step.isdigit() else f".{step}" for step in path.split("."))
    return "".join(steps).removeprefix(".")
