"""The watched objects in plain dicts: fed by events and lists, read as one frozen view."""

import base64
import binascii
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from tidegate_operator.cluster import (
    DRAINING_ANNOTATION,
    ClusterView,
    InvalidObject,
    PodView,
    pool_keys,
)
from tidegate_operator.kube import API_KEYS_LABEL, NAMESPACES, PODS, POOLS, SECRETS, Watched
from tidegate_operator.resources import (
    EnginePool,
    ObjectMeta,
    PreemptionPolicy,
    PriorityTier,
    Resource,
    ServiceLevel,
    TenantPolicy,
)
from tidegate_policies.problems import first_problem

Raw = Mapping[str, Any]
Value = Resource | InvalidObject | PodView | Mapping[str, str] | Mapping[str, str | None]


class _Entry:
    """One object: what it was when it was last read."""

    __slots__ = ("key", "namespace", "uid", "value", "version")

    def __init__(self, raw: Raw, value: Value) -> None:
        metadata = raw["metadata"]
        self.uid: str = metadata.get("uid", "")
        self.namespace: str = metadata.get("namespace", "")
        self.key = f"{self.namespace}/{metadata['name']}" if self.namespace else metadata["name"]
        self.version = _version(raw)
        self.value = value


class WatchCache:
    """What the operator knows of the cluster.

    Every change returns the keys of the pools that it may affect, or None when it affects nothing:
    status writes, the operator's own above all, must never lead to a compilation.
    """

    def __init__(self) -> None:
        self._entries: dict[Watched, dict[str, _Entry]] = {}
        # How many policies of each namespace refer to each pool.
        self._references: dict[str, Counter[str]] = {}
        self._view: ClusterView | None = None
        self._gone_since_sweep: set[str] = set()
        self._told_since_sweep: set[str] = set()

    def put(self, watched: Watched, raw: Raw) -> frozenset[str] | None:
        """Take in an object as an event tells it; what is older than known is ignored."""
        uid = raw["metadata"].get("uid", "")
        self._told_since_sweep.add(uid)
        known = self._entries.get(watched, {}).get(uid)
        if known is not None and _is_older(_version(raw), known.version):
            return None
        return self._take(watched, raw)

    def _take(self, watched: Watched, raw: Raw) -> frozenset[str] | None:
        entries = self._entries.setdefault(watched, {})
        uid = raw["metadata"].get("uid", "")
        known, version = entries.get(uid), _version(raw)
        if known is not None and version and version == known.version:
            return None
        # Generations tell nothing when an older state of the cluster was restored.
        is_restored = known is not None and _is_older(version, known.version)
        if known is not None and not is_restored and _is_same(watched, known, raw):
            known.version = version
            return None
        entry = _Entry(raw, _read(watched, raw))
        entries[uid] = entry
        if known is not None:
            self._count_references(known, -1)
        self._count_references(entry, +1)
        if known is not None and known.value == entry.value:
            return None
        self._view = None
        return self._affected(watched, entry) | (
            self._affected(watched, known) if known is not None else frozenset()
        )

    def remove(self, watched: Watched, uid: str) -> frozenset[str] | None:
        """Forget an object; None when it wasn't known."""
        self._gone_since_sweep.add(uid)
        entry = self._entries.get(watched, {}).pop(uid, None)
        if entry is None:
            return None
        self._count_references(entry, -1)
        self._view = None
        return self._affected(watched, entry)

    def begin_sweep(self, watched: Watched) -> frozenset[str]:
        """Return the uids known before a list is asked for, to be given to `end_sweep`."""
        self._gone_since_sweep.clear()
        self._told_since_sweep.clear()
        return frozenset(self._entries.get(watched, {}))

    def end_sweep(
        self, watched: Watched, before: frozenset[str], listed: Iterable[Raw]
    ) -> frozenset[str] | None:
        """Make the cache equal to a list, as far as the list can know.

        An object that appeared while the list was under way stays; one that a watch reported
        deleted meanwhile stays deleted. What no watch told of meanwhile is as the list says, even
        where that is older: the cluster may have been restored.
        """
        affected: frozenset[str] | None = None
        present = set()
        gone_meanwhile = frozenset(self._gone_since_sweep)
        told_meanwhile = frozenset(self._told_since_sweep)
        for raw in listed:
            uid = raw["metadata"].get("uid", "")
            present.add(uid)
            if uid not in gone_meanwhile:
                take = self.put if uid in told_meanwhile else self._take
                affected = _union(affected, take(watched, raw))
        for uid in sorted(before - present):
            affected = _union(affected, self.remove(watched, uid))
        return affected

    def view(self) -> ClusterView:
        """Return everything as one frozen value; the same one until something changes."""
        if self._view is None:
            self._view = self._build_view()
        return self._view

    def _build_view(self) -> ClusterView:
        by_model: dict[type, dict[str, Any]] = {}
        invalid = []
        for watched, entries in self._entries.items():
            if watched.model is None:
                continue
            for entry in entries.values():
                if isinstance(entry.value, InvalidObject):
                    invalid.append(entry.value)
                else:
                    by_model.setdefault(watched.model, {})[entry.key] = entry.value
        return ClusterView(
            pools=by_model.get(EnginePool, {}),
            policies=by_model.get(TenantPolicy, {}),
            tiers=by_model.get(PriorityTier, {}),
            preemption_policies=by_model.get(PreemptionPolicy, {}),
            service_levels=by_model.get(ServiceLevel, {}),
            secrets=self._values(SECRETS),
            namespaces=self._values(NAMESPACES),
            pods=self._values(PODS),
            invalid=tuple(invalid),
        )

    def _values(self, watched: Watched) -> dict[str, Any]:
        return {entry.key: entry.value for entry in self._entries.get(watched, {}).values()}

    def _affected(self, watched: Watched, entry: _Entry) -> frozenset[str]:
        """Return the pools whose policy or status may look different now."""
        value = entry.value
        if isinstance(value, TenantPolicy):
            return frozenset(pool_keys(value))
        if watched.model is EnginePool:
            return frozenset({entry.key})
        if isinstance(value, PodView):
            return frozenset(
                known.key
                for known in self._entries.get(POOLS, {}).values()
                if isinstance(pool := known.value, EnginePool)
                and pool.metadata.namespace == value.namespace
                and pool.spec.selector.matches(value.labels)
            )
        if watched.model is PriorityTier:
            pools = {pool.key for pool in self._entries.get(POOLS, {}).values()}
            # A policy is told of its tier even while there is no pool for it.
            return frozenset(pools).union(*self._references.values())
        return self._pools_named_in(entry.key if watched is NAMESPACES else entry.namespace)

    def _pools_named_in(self, namespace: str) -> frozenset[str]:
        return frozenset(self._references.get(namespace, ()))

    def _count_references(self, entry: _Entry, change: int) -> None:
        if not isinstance(entry.value, TenantPolicy):
            return
        counts = self._references.setdefault(entry.namespace, Counter())
        for pool in pool_keys(entry.value):
            counts[pool] += change
            if not counts[pool]:
                del counts[pool]


def key_digest(value: bytes) -> str | None:
    """Return the SHA-256 (hex) of an API key; None for an empty one.

    White space around it is not part of a key: `echo key | base64` leaves a newline in Secrets.
    """
    key = value.strip()
    return hashlib.sha256(key).hexdigest() if key else None


def _read(watched: Watched, raw: Raw) -> Value:
    if watched is PODS:
        return _read_pod(raw)
    if watched is NAMESPACES:
        return dict(raw["metadata"].get("labels") or {})
    if watched is SECRETS:
        return _read_secret(raw)
    model = watched.model
    if model is None:
        raise TypeError(f"no reader for {watched.plural}")
    metadata = ObjectMeta.model_validate(raw["metadata"])
    try:
        # The status is the operator's own: nothing is decided by it here.
        return model.model_validate({"metadata": metadata, "spec": raw.get("spec")})
    except ValidationError as error:
        problem = first_problem(error, whole=watched.plural)
        return InvalidObject(model=model, metadata=metadata, problem=problem)


def _read_pod(raw: Raw) -> PodView:
    metadata = raw["metadata"]
    conditions = raw.get("status", {}).get("conditions") or ()
    is_terminating = bool(metadata.get("deletionTimestamp"))
    is_ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
    return PodView(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        labels=dict(metadata.get("labels") or {}),
        is_ready=is_ready and not is_terminating,
        is_terminating=is_terminating,
        draining=(metadata.get("annotations") or {}).get(DRAINING_ANNOTATION, ""),
        created=metadata.get("creationTimestamp") or "",
    )


def _read_secret(raw: Raw) -> dict[str, str | None]:
    labels = raw["metadata"].get("labels") or {}
    if labels.get(API_KEYS_LABEL) != "true":
        return {}
    return {key: _decoded_digest(value) for key, value in (raw.get("data") or {}).items()}


def _decoded_digest(value: str) -> str | None:
    try:
        return key_digest(base64.b64decode(value))
    except binascii.Error:
        return None


def _is_same(watched: Watched, known: _Entry, raw: Raw) -> bool:
    """Tell whether the spec of a custom resource is the one that was read; others: look inside."""
    if watched.model is None or not isinstance(known.value, Resource | InvalidObject):
        return False
    metadata = raw["metadata"]
    old = known.value.metadata
    return (old.generation, old.labels) == (
        metadata.get("generation", 0),
        metadata.get("labels") or {},
    )


def _version(raw: Raw) -> str:
    version: str = raw["metadata"].get("resourceVersion", "")
    return version


def _is_older(version: str, known: str) -> bool:
    """Compare resource versions, which grow as numbers; anything else is taken as news."""
    return version.isdecimal() and known.isdecimal() and int(version) < int(known)


def _union(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    if one is None or other is None:
        return other if one is None else one
    return one | other
