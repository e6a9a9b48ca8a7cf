"""What a pool's `/scale` asks of its workload, and which engines leave when it shrinks; pure.

The victims are told to drain by an annotation of their pods, from which the pool's policy is
compiled: it reaches the engines signed, and whoever restarts in between finds it there.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate_operator.cluster import PodView
from tidegate_operator.resources import DrainVictim, EnginePool, LabelSelector, WorkloadKind
from tidegate_operator.verdicts import Flaw, Reason
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_policies.wire import EngineReport

OWN_MANAGER = "tidegate"
"""The field manager by which the operator writes replicas."""

SCALE_DOWN = "scale-down"
"""Value of the draining annotation on the operator's own victims; others' are let alone."""

_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_CLIENT_SIDE_APPLY = "kubectl-client-side-apply"
_NOBODY = "before-first-apply"
"""What the API server calls the owner of what nobody was known to own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The Deployment or StatefulSet of a pool.

    Attributes:
        selector: Of its pods.
        claims: Managers that set its replicas and will again.
        touches: Managers that set its replicas once, and may never again, such as `kubectl scale`.
        is_owned: Whether this operator wrote the replicas that it has.
    """

    kind: WorkloadKind
    name: str
    replicas: int
    selector: LabelSelector
    claims: tuple[str, ...] = ()
    touches: tuple[str, ...] = ()
    is_owned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """An engine that is to leave.

    Attributes:
        is_quiet: Nothing more can be gained by waiting: it does nothing, or takes no new work and
            the rest is up to its own end.
    """

    name: str
    is_marked: bool
    is_quiet: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePlan:
    """What to do now; most of the time nothing.

    Attributes:
        adopt: Replicas that the pool takes over from the workload; None = it has its own.
        mark: Pods to be told to drain, those that lose most last.
        unmark: Pods that may go on after all.
        replicas: What to set the workload's to; None = leave them.
        is_waiting: Engines are draining: look again soon.
        flaws: What keeps the workload from being scaled.
    """

    adopt: int | None = None
    mark: tuple[str, ...] = ()
    unmark: tuple[str, ...] = ()
    replicas: int | None = None
    is_waiting: bool = False
    flaws: tuple[Flaw, ...] = ()


def read_workload(kind: WorkloadKind, raw: Mapping[str, Any]) -> Workload:
    """Read a workload as the API server returns it, managed fields included."""
    metadata, spec = raw["metadata"], raw["spec"]
    claims, touches, is_owned = set[str](), set[str](), False
    for entry in metadata.get("managedFields") or ():
        manager = entry["manager"]
        fields = (entry.get("fieldsV1") or {}).get("f:spec", {})
        if "f:replicas" not in fields or manager == _NOBODY:
            continue
        if manager == OWN_MANAGER and entry["operation"] == "Apply":
            is_owned = True
        elif _is_lasting(entry, metadata):
            claims.add(manager)
        elif entry.get("time") != metadata["creationTimestamp"] or "subresource" in entry:
            # Who created it owns even the default that it left out: that claims nothing.
            touches.add(manager)
    return Workload(
        kind=kind,
        name=metadata["name"],
        replicas=spec.get("replicas", 1),
        selector=LabelSelector.model_validate(spec["selector"]),
        claims=tuple(sorted(claims)),
        touches=tuple(sorted(touches)),
        is_owned=is_owned,
    )


def plan_scale(
    pool: EnginePool, workload: Workload, pods: Sequence[PodView], victims: Sequence[Victim]
) -> ScalePlan:
    """Return what leads from the workload as it is to the pool's replicas.

    Args:
        pool: Its `spec.replicas` are what is wanted.
        workload: What the pool refers to.
        pods: All pods of the pool.
        victims: From `choose_victims`, for this very workload.
    """
    wanted = pool.spec.replicas
    marked = {pod.name for pod in pods if pod.draining == SCALE_DOWN and not pod.is_terminating}
    if foreign := _foreign_owners(workload, wanted):
        return ScalePlan(unmark=tuple(sorted(marked)), flaws=(_conflict(workload, foreign),))
    if wanted is None:
        return ScalePlan(adopt=workload.replicas)
    names = [victim.name for victim in victims]
    mark = tuple(victim.name for victim in victims if not victim.is_marked)
    unmark = tuple(sorted(marked.difference(names)))
    is_waiting = bool(mark) or not all(victim.is_quiet for victim in victims)
    if wanted == workload.replicas and workload.is_owned:
        return ScalePlan(unmark=unmark)
    if is_waiting:
        return ScalePlan(mark=mark, unmark=unmark, is_waiting=True)
    return ScalePlan(unmark=unmark, replicas=wanted)


def choose_victims(
    pool: EnginePool,
    workload: Workload,
    pods: Iterable[PodView],
    *,
    reports: Mapping[str, EngineReport],
    snapshot: PolicySnapshot,
    is_quiet: Callable[[PodView], bool],
) -> tuple[Victim, ...]:
    """Return the engines that leave when the workload gets the pool's replicas.

    Whoever was told to drain stays a victim as long as any is needed: figures move, and a drain
    costs. Pods that aren't ready come next, as the ReplicaSet takes them first whatever is said of
    the others; of a StatefulSet it is always the highest ordinals.

    Args:
        pool: Says which go first.
        workload: Whose pods are meant.
        pods: Of the pool.
        reports: By pod.
        snapshot: Tells the tiers.
        is_quiet: Whether a pod that was told to drain needn't be waited for.
    """
    own = [pod for pod in pods if not pod.is_terminating and workload.selector.matches(pod.labels)]
    wanted = workload.replicas if pool.spec.replicas is None else pool.spec.replicas
    # Replicas that have no pod yet go first, and nobody notices. Pods beyond the replicas are about
    # to be deleted, but for those of a rollout; who was told to drain stays told until then.
    surplus = max(0, min(workload.replicas, len(own)) - wanted)
    leaving = max(0, len(own) - wanted)
    if workload.kind is WorkloadKind.STATEFUL_SET:
        ranked = sorted(own, key=lambda pod: -_ordinal(pod.name))
    else:
        losses = {pod.name: _loss(reports.get(pod.name), snapshot) for pod in own}
        if pool.spec.drain.victim is DrainVictim.OLDEST:
            ranked = sorted(own, key=lambda pod: (pod.created, pod.name))
        else:
            ranked = sorted(own, key=lambda pod: (losses[pod.name], pod.name))
        ranked.sort(key=lambda pod: (not pod.draining, pod.is_ready))
    return tuple(
        Victim(name=pod.name, is_marked=pod.draining == SCALE_DOWN, is_quiet=is_quiet(pod))
        for number, pod in enumerate(ranked[:leaving])
        if number < surplus or pod.draining == SCALE_DOWN
    )


def _loss(report: EngineReport | None, snapshot: PolicySnapshot) -> int:
    """Return what is lost with an engine: its KV blocks, each twice for every tier below its own.

    Source: none; that a tier outweighs twice the tokens of the one below is a choice.
    """
    if report is None:
        return 0
    values = sorted(set(snapshot.tier_values.values()))
    weights = {tier.name: 1 << values.index(tier.value) for tier in snapshot.tiers}
    rules = snapshot.tenant_rules
    unknown = weights.get(snapshot.unknown_tenants.tier or "", 1)
    named = sum(counters.kv_used_blocks for counters in report.tenants)
    return max(0, report.kv_used_blocks - named) + sum(
        counters.kv_used_blocks
        * (weights[rules[counters.tenant].tier] if counters.tenant in rules else unknown)
        for counters in report.tenants
    )


def _ordinal(name: str) -> int:
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _is_lasting(entry: Mapping[str, Any], metadata: Mapping[str, Any]) -> bool:
    """Tell whether a manager sets the replicas again and again."""
    manager = entry["manager"]
    if entry["operation"] == "Apply":
        return True
    if manager == _CLIENT_SIDE_APPLY:
        applied = json.loads((metadata.get("annotations") or {}).get(_LAST_APPLIED, "{}"))
        return "replicas" in applied.get("spec", {})
    # An autoscaler; people use kubectl.
    return entry.get("subresource") == "scale" and not manager.startswith("kubectl")


def _foreign_owners(workload: Workload, wanted: int | None) -> tuple[str, ...]:
    """Return the managers against which replicas would have to be written.

    A touch is settled once both sides agreed: from then on the operator owns the replicas, too,
    until the next touch takes them from it.
    """
    if workload.claims or workload.is_owned or wanted in (None, workload.replicas):
        return workload.claims
    return workload.touches


def _conflict(workload: Workload, owners: Sequence[str]) -> Flaw:
    kind = workload.kind.lower()
    return Flaw(
        Reason.REPLICAS_CONFLICT,
        f"spec.workloadRef: the replicas of {kind} {workload.name!r} ({workload.replicas}) are set"
        f" by {', '.join(owners)}, so they aren't written: leave them out of its manifest and"
        " remove its other autoscalers, or set spec.replicas to the same number",
    )
