"""Every generated file, by its path from the repository's root."""

from collections.abc import Iterator
from pathlib import Path

from tidegate_observability.fleet import FLEET
from tidegate_observability.grafana import page_json
from tidegate_observability.pool import POOL
from tidegate_observability.reference import reference
from tidegate_observability.tenant import TENANT

_DASHBOARDS = Path("charts/tidegate/files/dashboards")
# The operator makes one of it for each tenant.
_PACKAGED = Path("operator/tidegate_operator/tenant_dashboard.json")


def files() -> Iterator[tuple[Path, str]]:
    """Yield path and text of every file."""
    for page in (FLEET, POOL, TENANT):
        yield _DASHBOARDS / f"{page.uid}.json", page_json(page)
    yield _PACKAGED, page_json(TENANT)
    yield Path("docs/metrics.md"), reference()
