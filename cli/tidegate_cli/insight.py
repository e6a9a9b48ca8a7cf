"""The commands that look at a cluster: `status`, `top`, `explain`, `get decisions`."""

from pathlib import Path
from typing import Annotated

import typer

from tidegate_cli.place import OPERATOR, Place
from tidegate_cli.running import run_to_end

# Commands import what they need when they run: help, and completion, need none of it.

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

    from tidegate_cli.looking import show_status

    run_to_end(show_status(place, everywhere=all_namespaces, as_json=as_json))


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

    from tidegate_cli.looking import keep_showing, show_busiest

    if once:
        run_to_end(show_busiest(place, everywhere=all_namespaces, as_json=as_json))
    else:
        showing = keep_showing(place, everywhere=all_namespaces, interval=interval, as_json=as_json)
        run_to_end(showing, interrupted=0)


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

    from tidegate_cli.looking import show_explanation

    run_to_end(show_explanation(place, request, pool=pool, as_json=as_json))


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

    from tidegate_cli.looking import show_decisions

    run_to_end(show_decisions(place, query, pool=pool, as_json=as_json))
