"""The kopf edge: events go into the cache, nothing else; no decision is made here.

Only `on.event` is used, which writes nothing to objects: no annotation, no finalizer.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import kopf

from tidegate_operator.kube import SECRETS, WATCHED, Login, Watched

OnEvent = Callable[[Watched, str | None, Any], None]
"""Takes the kind, the event's type (None while a watch lists) and the object."""


class _NothingRemembered(kopf.DiffBaseStorage):
    """Knows no earlier state of an object.

    Only handlers of changes need one. Copying all of every object for them would be most of what
    kopf takes for an event.
    """

    def build(self, **_: Any) -> kopf.BodyEssence:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return


def build_registry(on_event: OnEvent, login: Callable[[], Awaitable[Login]]) -> Any:  # noqa: ANN401
    """Return a kopf registry that passes every event of the kinds but Secrets to `on_event`."""
    registry = kopf.OperatorRegistry()
    for watched in WATCHED:
        # Secrets are watched apart: kopf can't watch them in fewer namespaces than the rest.
        if watched is not SECRETS:
            _subscribe(registry, watched, on_event)

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.ConnectionInfo:
        found = await login()
        return kopf.ConnectionInfo(
            server=found.server,
            ca_path=found.ca_path,
            certificate_path=found.certificate_path,
            private_key_path=found.private_key_path,
            token=found.token,
            insecure=found.is_insecure,
        )

    return registry


def build_settings() -> kopf.OperatorSettings:
    """Return the settings of kopf; each deviates from the default for the reason given."""
    settings = kopf.OperatorSettings()
    # A foreign ClusterKopfPeering named "default" would pause the operator.
    settings.peering.standalone = True
    # Needs no rights on CustomResourceDefinitions; the kinds exist before the start.
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = [0.5, 1, 2, 4, 8, 15]
    # An integer: it goes into the URL as it is.
    settings.watching.server_timeout = 290
    settings.watching.connect_timeout = 5
    settings.watching.chunk_size = 500
    settings.queueing.worker_limit = None
    settings.queueing.exit_timeout = 1.0
    settings.execution.max_workers = 4
    settings.persistence.finalizer = "tidegate.io/operator"
    settings.persistence.diffbase_storage = _NothingRemembered()
    # One line per event and object otherwise.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    return settings


def _subscribe(registry: kopf.OperatorRegistry, watched: Watched, on_event: OnEvent) -> None:
    # kopf takes a returned value for a result to store in the object: nothing is returned.
    @kopf.on.event(watched.group, watched.version, watched.plural, registry=registry)
    async def observe(event: kopf.RawEvent, **_: Any) -> None:
        on_event(watched, event["type"], event["object"])
