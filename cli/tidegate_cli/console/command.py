"""The command `tidegate console`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidegate_cli.place import OPERATOR
from tidegate_cli.running import run_to_end

MIN_TOKEN_CHARACTERS = 16


def add_console(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(console)


def console(  # noqa: PLR0913, PLR0917 - typer passes options by name
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any free one.")] = 8090,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="TIDEGATE_CONSOLE_TOKEN",
            help="What visitors present, at least 16 characters. Without it, one is made up and"
            " printed unless only this machine can reach the page.",
        ),
    ] = None,
    redis_url: Annotated[
        str, typer.Option(envvar="TIDEGATE_REDIS_URL", help="Where engines report.")
    ] = "redis://127.0.0.1:6379/0",
    redis_ca_file: Annotated[
        Path | None,
        typer.Option(
            envvar="TIDEGATE_REDIS_CA_FILE",
            dir_okay=False,
            exists=True,
            help="Of a rediss:// URL; the system's without.",
        ),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option("--namespace", "-n", help="Only what is in it; repeatable, all without it."),
    ] = None,
    operator: Annotated[
        str,
        typer.Option(
            envvar="TIDEGATE_OPERATOR",
            help="Whom to ask about requests: NAMESPACE/SERVICE:PORT, or a URL.",
        ),
    ] = OPERATOR,
    engine_token_file: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            exists=True,
            help="With the token of the engines' admin API, to ask them and not the operator.",
        ),
    ] = None,
    kubeconfig: Annotated[
        Path | None,
        typer.Option(envvar="KUBECONFIG", help="That of kubectl, or the pod's own, without it."),
    ] = None,
) -> None:
    """Show pools, tenants and requests on a live web page, until Ctrl-C; changes nothing."""
    if token is not None and len(token) < MIN_TOKEN_CHARACTERS:
        raise typer.BadParameter(
            f"needs at least {MIN_TOKEN_CHARACTERS} characters", param_hint="--token"
        )
    # Here, as loading the user interface takes other commands a second that they don't need.
    from tidegate_cli.console.server import ConsoleSettings, run_console

    settings = ConsoleSettings(
        host=host,
        port=port,
        token=token,
        kubeconfig=kubeconfig,
        redis_url=redis_url,
        redis_ca_file=redis_ca_file,
        namespaces=tuple(namespace or ()),
        operator=operator,
        engine_token_file=engine_token_file,
    )
    run_to_end(run_console(Console(), settings=settings), interrupted=0)
