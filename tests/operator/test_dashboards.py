import json

from tidegate_operator.dashboards import config_map, load_template, tenant_dashboard
from tidegate_operator.resources import TenantPolicy
from tidegate_testing.objects import a_metadata


def a_tenant_policy(name: str = "gold", **spec: object) -> TenantPolicy:
    metadata = a_metadata(name, namespace="team")
    return TenantPolicy.model_validate(
        {"metadata": metadata, "spec": {"poolRefs": [{"name": "chat"}], **spec}}
    )


def test_a_tenants_dashboard_shows_that_tenant_alone() -> None:
    template = load_template()
    dashboard = tenant_dashboard(template, "team/gold")
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["tenant"]["type"] == "constant"
    assert variables["tenant"]["query"] == "team/gold"
    assert set(variables) == {"datasource", "tenant", "pool"}
    assert "team/gold" in dashboard["title"]
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    assert queries
    assert all("$tenant" in query or "scalar" in query for query in queries)
    assert template == load_template()


def test_dashboards_of_two_tenants_are_two_dashboards() -> None:
    template = load_template()
    uids = {tenant_dashboard(template, tenant)["uid"] for tenant in ("team/gold", "team/silver")}
    assert len(uids) == 2
    assert all(len(uid) <= 40 for uid in uids)
    assert template["uid"] not in uids


def test_a_config_map_belongs_to_its_policy_and_lies_in_its_namespace() -> None:
    policy = a_tenant_policy()
    manifest = config_map(load_template(), policy)
    metadata = manifest["metadata"]
    assert (metadata["namespace"], metadata["name"]) == ("team", "tidegate-dashboard-gold")
    assert metadata["labels"]["grafana_dashboard"] == "1"
    assert metadata["annotations"]["grafana_folder"] == "team"
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == (
        "TenantPolicy",
        "gold",
        policy.metadata.uid,
    )
    (text,) = manifest["data"].values()
    assert json.loads(text)["title"] == "Tidegate / team/gold"


def test_the_digest_changes_with_what_is_shown_and_with_nothing_else() -> None:
    def digest(policy: TenantPolicy) -> str:
        found: str = config_map(load_template(), policy)["metadata"]["annotations"][
            "tidegate.io/digest"
        ]
        return found

    assert digest(a_tenant_policy()) == digest(a_tenant_policy(weight=7))
    assert digest(a_tenant_policy()) != digest(a_tenant_policy(tenant="acme"))


def test_a_name_that_would_be_too_long_is_another() -> None:
    manifest = config_map(load_template(), a_tenant_policy("x" * 250))
    assert len(manifest["metadata"]["name"]) <= 253
    assert manifest["metadata"]["name"].startswith("tidegate-dashboard-")
