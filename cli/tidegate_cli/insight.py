"""The commands that look at a cluster: `status`, `top`, `explain`, `get decisions`."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from tidegate_cli.cluster_access import OPERATOR, Cluster, ClusterError, Place, opened
from tidegate_cli.fleet_view import FleetView, by_load, fleet_tables, read_fleet
from tidegate_cli.request_view import (
    decisions_table,
    explain_request,
    explanation,
    newest_decisions,
    pools_seen_from,
)
from tidegate_cli.running import run_to_end

Kubeconfig = Annotated[
    Path | None, typer.Option(dir_okay=False, help="As kubectl finds it without this.")
]
Context = Annotated[str | None, typer.Option(help="Of the kubeconfig; its current one without.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="That of the context without this.")
]
AllNamespaces = Annotated[bool, typer.Option("--all-namespaces", "-A", help="Look at all of them.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Operator = Annotated[
    str,
    typer.Option(
        envvar="TIDEGATE_OPERATOR",
        help="Whom to ask: NAMESPACE/SERVICE:PORT, or the URL of one outside the cluster.",
    ),
]
Pool = Annotated[
    str | None,
    typer.Option(help="NAMESPACE/NAME; without it the namespace's, and those its policies name."),
]

get = typer.Typer(help="List what the engines keep.", no_args_is_help=True)


def add_insight(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(status)
    app.command()(top)
    app.command()(explain)
    app.add_typer(get, name="get")


def status(  # noqa: PLR0917 - typer passes options by name
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    as_json: AsJson = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Show pools and tenants as they stand: conditions, revisions, KV, queues, shares, SLOs."""
    place = Place(kubeconfig=kubeconfig, context=context, namespace=namespace)

    async def look(cluster: Cluster) -> None:
        view = await read_fleet(cluster, everywhere=all_namespaces)
        _show(view.to_json() if as_json else fleet_tables(view))

    run_to_end(_in_cluster(place, look))


def top(  # noqa: PLR0917 - typer passes options by name
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    as_json: AsJson = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Show the busiest pools and tenants, again and again until Ctrl-C."""
    place = Place(kubeconfig=kubeconfig, context=context, namespace=namespace)

    async def look(cluster: Cluster) -> None:
        async def read() -> FleetView:
            return by_load(await read_fleet(cluster, everywhere=all_namespaces))

        if once:
            view = await read()
            _show(view.to_json() if as_json else fleet_tables(view))
        elif as_json:
            while True:
                _line((await read()).to_json())
                await asyncio.sleep(interval)
        else:
            await _keep_showing(read, interval)

    run_to_end(_in_cluster(place, look), interrupted=0)


def explain(  # noqa: PLR0917 - typer passes options by name
    request: Annotated[str, typer.Argument(help="Its id, or what its client called it.")],
    pool: Pool = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
    operator: Operator = OPERATOR,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Tell why a request waits, for what, for how long, and who was put before it."""
    place = Place(kubeconfig=kubeconfig, context=context, namespace=namespace, operator=operator)

    async def look(cluster: Cluster) -> None:
        pools = await _pools(cluster, pool)
        answer = await explain_request(cluster, request, pools=pools)
        _show(answer if as_json else explanation(answer))

    run_to_end(_in_cluster(place, look))


@get.command()
def decisions(  # noqa: PLR0913, PLR0917 - typer passes options by name
    tenant: Annotated[str | None, typer.Option(help="Only on its requests.")] = None,
    request: Annotated[str | None, typer.Option(help="Only on this one, by id or name.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=16_384, help="Newest of each pool.")] = 100,
    pool: Pool = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
    operator: Operator = OPERATOR,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """List what was decided about requests, and why."""
    place = Place(kubeconfig=kubeconfig, context=context, namespace=namespace, operator=operator)
    asked = {"tenant": tenant, "request_id": request, "limit": str(limit)}
    query = {name: value for name, value in asked.items() if value is not None}

    async def look(cluster: Cluster) -> None:
        pools = await _pools(cluster, pool)
        found = await newest_decisions(cluster, query, pools=pools)
        _show({"decisions": found} if as_json else decisions_table(found))

    run_to_end(_in_cluster(place, look))


async def _in_cluster(place: Place, work: Callable[[Cluster], Awaitable[None]]) -> None:
    async with opened(place) as cluster:
        await work(cluster)


async def _pools(cluster: Cluster, pool: str | None) -> list[str]:
    if pool is None:
        return await pools_seen_from(cluster)
    namespace, _, name = pool.rpartition("/")
    return [f"{namespace or cluster.namespace}/{name}"]


async def _keep_showing(read: Callable[[], Awaitable[FleetView]], interval: float) -> None:
    """Show each look in the place of the one before; one that fails says so and is tried again."""
    view = await read()  # what is wrong from the start ends the command
    with Live(fleet_tables(view), console=_console(), auto_refresh=False, screen=True) as live:
        live.refresh()
        while True:
            await asyncio.sleep(interval)
            try:
                live.update(fleet_tables(await read()), refresh=True)
            except ClusterError as error:
                live.console.bell()
                live.update(str(error), refresh=True)


def _show(content: RenderableType | dict[str, object]) -> None:
    if isinstance(content, dict):
        typer.echo(json.dumps(content, indent=2))
    else:
        _console().print(content)


def _line(content: dict[str, object]) -> None:
    typer.echo(json.dumps(content))


def _console() -> Console:
    console = Console()
    # Where nobody looks at a screen, nothing is to be cut off for its sake.
    if not console.is_terminal:
        console.width = 240
    return console
