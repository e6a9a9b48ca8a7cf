"""Why a request waits, and what was decided: asked of the operator, for people to read."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tidegate_cli.cluster_access import Cluster, ClusterError
from tidegate_operator.resources import EnginePool, TenantPolicy

_WAITS = {
    "slot": "a place in the batch",
    "kv": "KV memory",
    "quota": "its tenant's own limit",
    "tier": "higher tiers to be served",
    "turn": "its turn in its tier",
    "hold": "the end of its tenant's hold",
    "rate": "its tenant's rate limit",
}

Answer = dict[str, Any]


async def pools_seen_from(cluster: Cluster) -> list[str]:
    """Return the pools, `namespace/name`, that stand in the namespace or that its policies name.

    Raises:
        ClusterError: There are none.
    """
    own = await cluster.objects(EnginePool, everywhere=False)
    policies = await cluster.objects(TenantPolicy, everywhere=False)
    found = [f"{one['metadata']['namespace']}/{one['metadata']['name']}" for one in own]
    for policy in policies:
        verdicts = (policy.get("status") or {}).get("pools") or ()
        found += [f"{one['namespace']}/{one['name']}" for one in verdicts]
    if not found:
        message = (
            f"namespace {cluster.namespace!r} has no EnginePool, and no TenantPolicy that the"
            " operator has seen; name one by --namespace, or a pool by --pool NAMESPACE/NAME"
        )
        raise ClusterError(message)
    return sorted(set(found))


async def explain_request(cluster: Cluster, request: str, *, pools: Sequence[str]) -> Answer:
    """Return what the operator knows of a request, in the first of the pools that knows it.

    Raises:
        ClusterError: None does; the message says what each said.
    """
    problems = []
    for pool in pools:
        try:
            return await cluster.ask_operator(f"/explain/{pool}/{request}", {})
        except ClusterError as error:
            problems.append(str(error))
    raise ClusterError("; ".join(dict.fromkeys(problems)))


async def newest_decisions(
    cluster: Cluster, query: Mapping[str, str], *, pools: Sequence[str]
) -> list[Answer]:
    """Return the decisions of all these pools, the oldest first, each with its pool.

    Raises:
        ClusterError: A pool can't be asked.
    """
    found = []
    for pool in pools:
        answer = await cluster.ask_operator(f"/decisions/{pool}", query)
        if answer["unreachable"]:
            missing = "; ".join(f"{pod}: {why}" for pod, why in answer["unreachable"].items())
            raise ClusterError(f"engines of {pool} don't answer: {missing}")
        found += [{"pool": pool, **one} for one in answer["decisions"]]
    return sorted(found, key=lambda one: (one["time"], one["pool"], one["engine"]))


def explanation(answer: Answer) -> RenderableType:
    """Show an explanation."""
    parts: list[RenderableType] = []
    for one in answer["requests"]:
        parts += [_request(answer["pool"], one), decisions_table(one["decisions"])]
    for pod, why in answer["unreachable"].items():
        parts.append(Text(f"engine {pod} doesn't answer: {why}", style="yellow"))
    return Group(*parts)


def decisions_table(decisions: Sequence[Answer]) -> Table:
    """Show decisions, one a line."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    named = [name for name in ("pool", "engine", "tenant") if decisions and name in decisions[0]]
    for heading in ("time", *named, "request", "step", "revision", "watermark", "verdict", "why"):
        is_number = heading in {"step", "revision"}
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    for one in decisions:
        table.add_row(
            one["time"],
            *(one[name] for name in named),
            one["request_id"],
            str(one["step"]),
            str(one["revision"]),
            one["watermark"],
            one["verdict"],
            one["reason"] + _for_whom(one["beneficiary"], one["beneficiary_tier"]),
        )
    return table


def _request(pool: str, one: Answer) -> RenderableType:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("request", one["id"])
    table.add_row("tenant", one["tenant"] + (f" in tier {one['tier']}" if one["tier"] else ""))
    table.add_row("where", f"pool {pool}, engine {one['engine']}")
    table.add_row("state", one["state"])
    if one["queued_since"]:
        table.add_row("queued since", one["queued_since"])
    if one["position"]:
        table.add_row("position", f"{one['position']} among its tenant's in the tier")
    if one["waits_for"]:
        reason = f" ({one['reason']})" if one["reason"] else ""
        table.add_row("waits for", _WAITS[one["waits_for"]] + reason)
    elif one["reason"]:
        table.add_row("because", one["reason"])
    if one["predicted_ttft_seconds"] is not None:
        ahead, total = one["first_token_in_seconds"], one["predicted_ttft_seconds"]
        table.add_row("first token", f"in about {ahead:.2f} s: {total:.2f} s after its arrival")
    for cut in one["preempted"]:
        whom = _for_whom(cut["request_id"], cut["tier"])
        table.add_row("preempted", f"{cut['time']}, {cut['cause']}{whom}")
    return table


def _for_whom(request: str | None, tier: str | None) -> str:
    if request:
        return f", for {request}" + (f" of tier {tier}" if tier else "")
    return f", for another tenant of tier {tier}" if tier else ""
