"""A Grafana dashboard for each tenant, in a ConfigMap beside its TenantPolicy.

Grafana's sidecar finds ConfigMaps by their label, and puts each into the folder that an annotation
names: that of the policy's namespace. They belong to the policy, so they go when it goes.
"""

import asyncio
import copy
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import Any

import aiohttp

from tidegate_operator.kube import ApiError, KubeApi, Watched
from tidegate_operator.resources import API_VERSION, TenantPolicy

_LOG = logging.getLogger(__name__)

OWN_LABEL = "tidegate.io/tenant-dashboard"
DIGEST_ANNOTATION = "tidegate.io/digest"
GRAFANA_LABEL = "grafana_dashboard"
FOLDER_ANNOTATION = "grafana_folder"
NAME_PREFIX = "tidegate-dashboard-"
"""Of all names that the operator gives to ConfigMaps: rules of admission can hold it to that."""

CONFIG_MAPS = Watched(
    group="", version="v1", plural="configmaps", label_selector=f"{OWN_LABEL}=true"
)

POLL_SECONDS = 2.0
"""How often it is looked for tenants that have none yet."""

_MAX_NAME_LENGTH = 253
_ERRORS = (ApiError, aiohttp.ClientError, OSError, TimeoutError)


class TenantDashboards:
    """Writes the ConfigMaps that are missing or differ, and nothing else."""

    def __init__(
        self,
        api: KubeApi,
        policies: Callable[[], Iterable[TenantPolicy]],
        *,
        namespaces: Sequence[str],
        interval_seconds: float,
    ) -> None:
        """Prepare; `run` begins.

        Args:
            api: Owned by the caller.
            policies: Those that are in force now.
            namespaces: The only ones that are served; empty = all.
            interval_seconds: How often it is looked for what somebody else changed or deleted.
        """
        self._api = api
        self._policies = policies
        self._namespaces = namespaces
        self._interval_seconds = interval_seconds
        self._template = load_template()
        self._stored: dict[tuple[str, str], str] = {}

    async def run(self) -> None:
        """Write until cancelled."""
        loop = asyncio.get_running_loop()
        listed_at = -self._interval_seconds
        while True:
            try:
                if loop.time() - listed_at >= self._interval_seconds:
                    await self._list()
                    listed_at = loop.time()
                await self._write_missing()
            except _ERRORS as error:
                _LOG.warning("the tenants' dashboards are not written: %s", error)
                await asyncio.sleep(self._interval_seconds)
            await asyncio.sleep(POLL_SECONDS)

    async def _list(self) -> None:
        found = await self._api.list_metadata(CONFIG_MAPS, self._namespaces)
        self._stored = {
            (metadata["namespace"], metadata["name"]): (metadata.get("annotations") or {}).get(
                DIGEST_ANNOTATION, ""
            )
            for metadata in found
        }

    async def _write_missing(self) -> None:
        for policy in self._policies():
            manifest = config_map(self._template, policy)
            metadata = manifest["metadata"]
            key = metadata["namespace"], metadata["name"]
            digest = metadata["annotations"][DIGEST_ANNOTATION]
            if self._stored.get(key) != digest:
                await self._api.apply(CONFIG_MAPS, manifest)
                self._stored[key] = digest


def load_template() -> Any:  # noqa: ANN401
    """Return the dashboard on which people choose a tenant, as JSON."""
    text = resources.files("tidegate_operator").joinpath("tenant_dashboard.json").read_text()
    return json.loads(text)


def tenant_dashboard(template: Any, tenant: str) -> Any:  # noqa: ANN401
    """Return a dashboard of one tenant alone.

    Args:
        template: From `load_template`; is left as it is.
        tenant: As metrics name it.
    """
    dashboard = copy.deepcopy(template)
    dashboard["title"] = f"Tidegate / {tenant}"
    dashboard["uid"] = f"tidegate-{_digest(tenant)[:24]}"
    fixed = {
        "type": "constant",
        "name": "tenant",
        "query": tenant,
        "current": {"selected": True, "text": tenant, "value": tenant},
        "hide": 2,
        "skipUrlSync": True,
    }
    variables = dashboard["templating"]["list"]
    dashboard["templating"]["list"] = [
        fixed if variable["name"] == "tenant" else variable for variable in variables
    ]
    return dashboard


def config_map(template: Any, policy: TenantPolicy) -> Any:  # noqa: ANN401
    """Return the manifest of the ConfigMap that a policy should have."""
    text = json.dumps(tenant_dashboard(template, policy.tenant), separators=(",", ":"))
    owner = policy.metadata
    name = f"{NAME_PREFIX}{owner.name}"
    if len(name) > _MAX_NAME_LENGTH:
        name = f"{NAME_PREFIX}{_digest(owner.name)}"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name,
            "namespace": owner.namespace,
            "labels": {
                GRAFANA_LABEL: "1",
                OWN_LABEL: "true",
                "app.kubernetes.io/managed-by": "tidegate",
            },
            "annotations": {FOLDER_ANNOTATION: owner.namespace, DIGEST_ANNOTATION: _digest(text)},
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": TenantPolicy.definition.kind,
                    "name": owner.name,
                    "uid": owner.uid,
                    "controller": True,
                    # True would need a right on the policy's finalizers.
                    "blockOwnerDeletion": False,
                }
            ],
        },
        # Sidecars keep all files of a folder side by side: the name is the tenant's alone.
        "data": {f"tidegate-{_digest(policy.tenant)[:24]}.json": text},
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
