"""What the commands do that look at a cluster: ask it, and print."""

import asyncio
import json
from collections.abc import Mapping

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from tidegate_cli.cluster_access import Cluster, ClusterError, opened
from tidegate_cli.fleet_view import FleetView, by_load, fleet_tables, read_fleet
from tidegate_cli.place import Place
from tidegate_cli.request_view import (
    decisions_table,
    explain_request,
    explanation,
    newest_decisions,
    pools_seen_from,
)


async def show_status(place: Place, *, everywhere: bool, as_json: bool) -> None:
    """Print pools and tenants by their names."""
    async with opened(place) as cluster:
        view = await read_fleet(cluster, everywhere=everywhere)
    _show(view.to_json() if as_json else fleet_tables(view))


async def show_busiest(place: Place, *, everywhere: bool, as_json: bool) -> None:
    """Print pools and tenants by their load."""
    async with opened(place) as cluster:
        view = by_load(await read_fleet(cluster, everywhere=everywhere))
    _show(view.to_json() if as_json else fleet_tables(view))


async def keep_showing(place: Place, *, everywhere: bool, interval: float, as_json: bool) -> None:
    """Show pools and tenants by their load every `interval` seconds, until it is cancelled."""
    async with opened(place) as cluster:
        if not as_json:
            await _keep_on_screen(cluster, everywhere=everywhere, interval=interval)
        while True:
            view = by_load(await read_fleet(cluster, everywhere=everywhere))
            typer.echo(json.dumps(view.to_json()))
            await asyncio.sleep(interval)


async def show_explanation(place: Place, request: str, *, pool: str | None, as_json: bool) -> None:
    """Print why a request waits."""
    async with opened(place) as cluster:
        answer = await explain_request(cluster, request, pools=await _pools(cluster, pool))
    _show(answer if as_json else explanation(answer))


async def show_decisions(
    place: Place, query: Mapping[str, str], *, pool: str | None, as_json: bool
) -> None:
    """Print what was decided about requests."""
    async with opened(place) as cluster:
        found = await newest_decisions(cluster, query, pools=await _pools(cluster, pool))
    _show({"decisions": found} if as_json else decisions_table(found))


async def _pools(cluster: Cluster, pool: str | None) -> list[str]:
    if pool is None:
        return await pools_seen_from(cluster)
    namespace, _, name = pool.rpartition("/")
    return [f"{namespace or cluster.namespace}/{name}"]


async def _keep_on_screen(cluster: Cluster, *, everywhere: bool, interval: float) -> None:
    """Show each look in the place of the one before; one that fails says so and is tried again."""

    async def read() -> FleetView:
        return by_load(await read_fleet(cluster, everywhere=everywhere))

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


def _console() -> Console:
    console = Console()
    # Where nobody looks at a screen, nothing is to be cut off for its sake.
    if not console.is_terminal:
        console.width = 240
    return console
