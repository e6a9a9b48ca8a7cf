"""Pools and tenants as they stand in the API server: read once, shown as tables or as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tidegate_cli.cluster_access import Cluster
from tidegate_operator.resources import EnginePool, TenantPolicy

_NONE = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition of an object, if it is about the object as it is now."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLine:
    """One pool; None is what nobody has said yet.

    Attributes:
        engines: Ready engines of all, `2/2`.
        programmed: Ready engines that run the newest revision.
        laggards: Pods that don't.
    """

    namespace: str
    name: str
    engines: str | None
    programmed: int | None
    revision: int | None
    laggards: tuple[str, ...]
    running: int | None
    waiting: int | None
    swapped: int | None
    kv_percent: int | None
    queue_time_p99: str | None
    batch_size_mean: int | None
    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLine:
    """One tenant, over all of its pools.

    Attributes:
        revisions: First revision of each pool that holds the policy.
    """

    namespace: str
    name: str
    tenant: str | None
    tier: str | None
    weight: int | None
    revisions: Mapping[str, int | None]
    running: int | None
    waiting: int | None
    swapped: int | None
    kv_percent: int | None
    nominal_percent: int | None
    share_percent: int | None
    output_tokens_per_second: int | None
    ttft: str | None
    itl: str | None
    attainment_percent: int | None
    preempted: int | None
    shed: int | None
    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """What `status` and `top` show.

    Attributes:
        where: The namespace looked at; empty = all.
    """

    where: str
    pools: tuple[PoolLine, ...]
    tenants: tuple[TenantLine, ...]

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        return {
            "pools": [asdict(one) for one in self.pools],
            "tenants": [asdict(one) for one in self.tenants],
        }


async def read_fleet(cluster: Cluster, *, everywhere: bool) -> FleetView:
    """Look at the pools and policies of the cluster's namespace, or of all.

    Raises:
        ClusterError: They can't be listed.
    """
    pools = await cluster.objects(EnginePool, everywhere=everywhere)
    policies = await cluster.objects(TenantPolicy, everywhere=everywhere)
    return FleetView(
        where="" if everywhere else cluster.namespace,
        pools=tuple(map(_pool_line, pools)),
        tenants=tuple(map(_tenant_line, policies)),
    )


def by_load(view: FleetView) -> FleetView:
    """Put those first that have most to do."""

    def load(one: PoolLine | TenantLine) -> tuple[int, str, str]:
        work = sum(count or 0 for count in (one.running, one.waiting, one.swapped))
        return -work, one.namespace, one.name

    return FleetView(
        where=view.where,
        pools=tuple(sorted(view.pools, key=load)),
        tenants=tuple(sorted(view.tenants, key=load)),
    )


def fleet_tables(view: FleetView) -> RenderableType:
    """Show pools and tenants."""
    if not view.pools and not view.tenants:
        where = f"in namespace {view.where}" if view.where else "in any namespace"
        return Text(f"There is no EnginePool and no TenantPolicy {where}.")
    parts: list[RenderableType] = []
    if view.pools:
        parts.append(_pools_table(view))
    if view.tenants:
        parts.append(_tenants_table(view))
    return Group(*parts)


def _pools_table(view: FleetView) -> Table:
    table = _table("Pools", view, ("engines", "revision", "KV", "running", "waiting", "swapped"))
    table.add_column("queue\np99", justify="right", no_wrap=True)
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("state")
    for one in view.pools:
        table.add_row(
            _name(view, one.namespace, one.name),
            one.engines or _NONE,
            _number(one.revision),
            _bar(one.kv_percent),
            *map(_number, (one.running, one.waiting, one.swapped)),
            one.queue_time_p99 or _NONE,
            _number(one.batch_size_mean),
            _state(one.conditions, one.laggards),
        )
    return table


def _tenants_table(view: FleetView) -> Table:
    headings = ("weight", "share", "KV of\nnominal", "running", "waiting", "swapped", "tokens/s")
    table = _table("Tenants", view, ("tier", *headings))
    for heading in ("TTFT", "ITL", "SLO\nmet", "pre-\nempted", "shed"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("state")
    for one in view.tenants:
        nominal = "" if one.nominal_percent is None else f" of {one.nominal_percent}"
        table.add_row(
            _name(view, one.namespace, one.name),
            one.tier or _NONE,
            _number(one.weight),
            _percent(one.share_percent),
            f"{_number(one.kv_percent)}{nominal} %",
            *map(_number, (one.running, one.waiting, one.swapped)),
            _number(one.output_tokens_per_second),
            one.ttft or _NONE,
            one.itl or _NONE,
            _percent(one.attainment_percent),
            *map(_number, (one.preempted, one.shed)),
            _state(one.conditions, ()),
        )
    return table


def _table(title: str, view: FleetView, headings: Iterable[str]) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column("name" if view.where else "namespace/name", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "tier" else "right", no_wrap=True)
    return table


def _state(conditions: Sequence[Condition], laggards: Sequence[str]) -> Text:
    """Say what is wrong, in a word that can be looked up, or that all is well."""
    text = Text()
    for one in conditions:
        is_bad = one.status == ("True" if one.type == "Degraded" else "False")
        # Ready sums up the others: the one that it is about says more.
        if is_bad and (one.type != "Ready" or len(conditions) == 1):
            text.append(f"{one.type}: {one.reason} ", style="red" if one.type != "Ready" else "")
    if laggards:
        text.append(f"lagging: {', '.join(laggards)}", style="yellow")
    if text:
        return text
    ready = next((one for one in conditions if one.type == "Ready"), None)
    if ready is None:
        return Text("not seen by the operator yet", style="yellow")
    return Text("ready", style="green") if ready.status == "True" else Text(ready.reason)


def _pool_line(raw: Mapping[str, Any]) -> PoolLine:
    status = raw.get("status") or {}
    engines, usage = status.get("engines") or {}, status.get("usage") or {}
    return PoolLine(
        namespace=raw["metadata"]["namespace"],
        name=raw["metadata"]["name"],
        engines=engines.get("summary"),
        programmed=engines.get("programmed"),
        revision=(status.get("policy") or {}).get("revision"),
        laggards=tuple(status.get("laggards") or ()),
        running=usage.get("running"),
        waiting=usage.get("waiting"),
        swapped=usage.get("swapped"),
        kv_percent=usage.get("kvPercent"),
        queue_time_p99=usage.get("queueTimeP99"),
        batch_size_mean=usage.get("batchSizeMean"),
        conditions=_conditions(raw),
    )


def _tenant_line(raw: Mapping[str, Any]) -> TenantLine:
    spec, status = raw["spec"], raw.get("status") or {}
    usage, level = status.get("usage") or {}, status.get("serviceLevel") or {}
    return TenantLine(
        namespace=raw["metadata"]["namespace"],
        name=raw["metadata"]["name"],
        tenant=status.get("tenant"),
        tier=status.get("tier"),
        weight=spec.get("weight"),
        revisions={
            f"{one['namespace']}/{one['name']}": one.get("revision")
            for one in status.get("pools") or ()
        },
        running=usage.get("running"),
        waiting=usage.get("waiting"),
        swapped=usage.get("swapped"),
        kv_percent=usage.get("kvPercent"),
        nominal_percent=(spec.get("kv") or {}).get("nominalPercent"),
        share_percent=usage.get("sharePercent"),
        output_tokens_per_second=usage.get("outputTokensPerSecond"),
        ttft=level.get("ttft"),
        itl=level.get("itl"),
        attainment_percent=level.get("attainmentPercent"),
        preempted=usage.get("preempted"),
        shed=usage.get("shed"),
        conditions=_conditions(raw),
    )


def _conditions(raw: Mapping[str, Any]) -> tuple[Condition, ...]:
    generation = raw["metadata"].get("generation")
    return tuple(
        Condition(
            type=one["type"],
            status=one["status"],
            reason=one.get("reason", ""),
            message=one.get("message", ""),
        )
        for one in (raw.get("status") or {}).get("conditions") or ()
        if one.get("observedGeneration", generation) == generation
    )


def _name(view: FleetView, namespace: str, name: str) -> str:
    return name if view.where else f"{namespace}/{name}"


def _number(value: int | None) -> str:
    return _NONE if value is None else str(value)


def _percent(value: int | None) -> str:
    return _NONE if value is None else f"{value} %"


def _bar(percent: int | None) -> str:
    if percent is None:
        return _NONE
    full = round(percent / 10)
    return f"{'█' * full}{'░' * (10 - full)} {percent:3} %"
