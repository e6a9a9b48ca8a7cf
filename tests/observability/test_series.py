"""Whose series there are: those of declared tenants, and nothing is lost when policies change."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tidegate_testing.cluster import eventually
from tidegate_testing.operator_process import apply, wait_for_conditions

pytestmark = pytest.mark.cluster

NAMESPACE = "team-gold"
GONE_SECONDS = 60


def test_series_of_a_deleted_tenant_are_gone_within_a_minute_and_no_others(watched: Any) -> None:  # noqa: ANN401
    def series_of(tenant: str) -> list[Any]:
        return list(watched.prometheus.query(f'{{tenant="{NAMESPACE}/{tenant}"}}'))

    guest = {
        "apiVersion": "tidegate.io/v1alpha1",
        "kind": "TenantPolicy",
        "metadata": {"name": "guest"},
        "spec": {"poolRefs": [{"name": "chat"}], "priorityTier": "background"},
    }
    apply(watched.kubectl, NAMESPACE, guest)
    wait_for_conditions(watched.kubectl, "tp", "guest", NAMESPACE, Programmed="Programmed")
    eventually(lambda: series_of("guest"), "series of the new tenant")
    began = time.monotonic()
    watched.kubectl("delete", "tp", "guest", "-n", NAMESPACE, check=True)
    eventually(lambda: not series_of("guest"), "none", timeout_seconds=GONE_SECONDS)
    assert time.monotonic() - began < GONE_SECONDS
    # Two policies came into force meanwhile; a counter that began anew would have been reset.
    own = f'tenant="{NAMESPACE}/gold"'
    resets = watched.prometheus.query(f"sum(resets(tidegate_tokens_total{{{own}}}[1m]))")
    assert [one["value"][1] for one in resets] == ["0"]
    assert watched.prometheus.query(f"min(tidegate_tokens_total{{{own}, kind='output'}}) > 0")


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"x-tidegate-tenant": "stranger"}, 403)],
    ids=["key", "name"],
)
def test_who_is_not_declared_makes_no_series(
    watched: Any,  # noqa: ANN401
    headers: dict[str, str],
    status: int,
) -> None:
    for engine in watched.engines:
        answer = httpx.post(
            f"http://127.0.0.1:{engine.port}/v1/completions",
            headers={"authorization": "Bearer sk-stranger", **headers},
            json={"model": "simulated", "prompt": "x"},
            timeout=30,
            trust_env=False,
        )
        assert answer.status_code == status
    scraped_since = f"min(timestamp(tidegate_policy_revision)) > {time.time()}"
    eventually(lambda: watched.prometheus.query(scraped_since), "a scrape of both engines")
    tenants = set(watched.prometheus.label_values("tenant", "tidegate_tokens_total"))
    assert tenants <= {f"{NAMESPACE}/{name}" for name in ("gold", "batch", "guest")} | {"unknown"}
    assert watched.prometheus.query('{__name__=~".+", tenant=~".*stranger.*"}') == []
