"""What the charts render: of every set of values, taken by a real API server."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidegate_devcluster.kubectl import Kubectl
from tidegate_testing.helm import CHART, CRD_CHART, Helm, Manifest, Values, listed, only, pod_specs

pytestmark = pytest.mark.cluster

# As variants of tests/charts/conftest.py; the oldest that the chart takes, and the newest.
KUBE_VERSIONS = ("1.30.0", "1.34.3", "1.37.2")
MONITORING = "--api-versions=monitoring.coreos.com/v1"


def test_lint_finds_nothing(helm: Helm, values: Values) -> None:
    helm("lint", "--strict", str(CHART), values=values)
    helm("lint", "--strict", str(CRD_CHART))


@pytest.mark.parametrize("version", KUBE_VERSIONS)
def test_every_supported_kubernetes_is_rendered_the_same(
    helm: Helm, values: Values, version: str
) -> None:
    newest = helm.render(values=values, options=[MONITORING])
    assert helm.render(values=values, options=[MONITORING, f"--kube-version={version}"]) == newest


def test_kubernetes_that_is_too_old_is_refused(helm: Helm) -> None:
    refused = helm("template", "x", str(CHART), "--kube-version=1.29.9", check=False)
    assert refused.returncode != 0
    assert "kubeVersion: >=1.30.0-0" in refused.stderr


@pytest.mark.usefixtures("crds_installed")
def test_api_server_takes_every_object(
    helm: Helm, kubectl: Kubectl, values: Values, namespace: str
) -> None:
    for name in ("team-a", "team-b"):
        kubectl("create", "namespace", name)
    objects = helm.render(values=values, namespace=namespace)
    done = kubectl(
        *("apply", "--server-side", "--dry-run=server", "-f", "-"),
        input=listed(objects),
        check=True,
    )
    assert done.stdout.count("serverside-applied") == len(objects)
    assert "Warning" not in done.stderr


def test_namespaces_under_restricted_pod_security_take_every_pod(
    helm: Helm, kubectl: Kubectl, values: Values, namespace: str
) -> None:
    label = "pod-security.kubernetes.io/enforce=restricted"
    kubectl("label", "namespace", namespace, label, check=True)
    specs = pod_specs(helm.render(values=values, namespace=namespace))
    assert specs
    pods: list[Manifest] = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name.lower().replace("/", "-")},
            # The runtime class doesn't exist here, which is no matter of pod security.
            "spec": {key: value for key, value in spec.items() if key != "runtimeClassName"},
        }
        for name, spec in specs.items()
    ]
    as_is = ("create", "--dry-run=server", "-n", namespace, "-f", "-")
    kubectl(*as_is, input=listed(pods), check=True)
    pods[0]["spec"] = {**pods[0]["spec"], "securityContext": {}}
    assert "violates PodSecurity" in kubectl(*as_is, input=listed(pods)).stderr


def test_containers_run_without_any_privilege(helm: Helm, values: Values) -> None:
    for spec in pod_specs(helm.render(values=values)).values():
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_only_operator_and_credentials_job_get_a_token(helm: Helm, values: Values) -> None:
    specs = pod_specs(helm.render(values=values))
    with_token = {
        name for name, spec in specs.items() if spec.get("automountServiceAccountToken", True)
    }
    assert {name.rpartition("-")[2] for name in with_token} <= {"operator", "credentials"}


def test_engines_are_given_the_time_that_they_drain_for(helm: Helm) -> None:
    values = {"enginePools": [{"name": "chat", "drainSeconds": 90, "preStopSeconds": 7}]}
    (spec,) = (s for n, s in pod_specs(helm.render(values=values)).items() if "engine" in n)
    (container,) = spec["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert env["TIDEGATE_DRAIN_SECONDS"] == "90"
    assert container["lifecycle"] == {"preStop": {"sleep": {"seconds": 7}}}
    assert spec["terminationGracePeriodSeconds"] > 90 + 7


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("http://collector:4318", 4318), ("https://a.b/v", 443), ("http://a.b", 80)],
)
def test_engines_send_traces_where_they_are_told_and_the_network_lets_them(
    helm: Helm, endpoint: str, port: int
) -> None:
    values = {"enginePools": [{"name": "chat"}], "tracing": {"endpoint": endpoint}}
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" not in str(helm.render(values={**values, "tracing": {}}))
    objects = helm.render(values={**values, "networkPolicy": {"enabled": True}})
    engine = only(objects, "Deployment", "tidegate-engine-chat")["spec"]["template"]["spec"]
    env = {entry["name"]: entry.get("value") for entry in engine["containers"][0]["env"]}
    assert env["OTEL_EXPORTER_OTLP_ENDPOINT"] == endpoint
    egress = only(objects, "NetworkPolicy", "tidegate-engine")["spec"]["egress"]
    assert {"ports": [{"port": port}]} in egress


def test_pods_are_replaced_one_after_the_other_and_leave_their_service_before_they_end(
    helm: Helm,
) -> None:
    objects = helm.render(values={"enginePools": [{"name": "chat"}]})
    for name in ("tidegate-operator", "tidegate-engine-chat"):
        deployment = only(objects, "Deployment", name)["spec"]
        assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        spec = deployment["template"]["spec"]
        (container,) = spec["containers"]
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
        pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert 0 < pause < spec["terminationGracePeriodSeconds"] - 10
        budget = only(objects, "PodDisruptionBudget", name)["spec"]
        assert budget["maxUnavailable"] == 1
        assert budget["selector"] == deployment["selector"]


def test_pool_differs_from_what_holds_for_all_only_where_it_says_so(helm: Helm) -> None:
    values = {
        "engine": {"preStopSeconds": 9, "replicas": 4, "env": {"TIDEGATE_DTYPE": "float16"}},
        "enginePools": [
            {"name": "a", "preStopSeconds": 0, "replicas": None, "env": {"TIDEGATE_THREADS": 2}},
            {"name": "b"},
        ],
    }
    objects = helm.render(values=values)
    a = only(objects, "Deployment", "tidegate-engine-a")["spec"]
    b = only(objects, "Deployment", "tidegate-engine-b")["spec"]
    assert "replicas" not in a
    assert b["replicas"] == 4
    assert "lifecycle" not in a["template"]["spec"]["containers"][0]
    assert {"name": "TIDEGATE_THREADS", "value": "2"} in _env(a)
    for spec in (a, b):
        assert {"name": "TIDEGATE_DTYPE", "value": "float16"} in _env(spec)
    assert a["selector"] != b["selector"]
    pools = [only(objects, "EnginePool", name)["spec"] for name in ("a", "b")]
    assert pools[0]["selector"] == a["selector"]
    # Only what the chart doesn't set itself may be scaled.
    assert pools[0]["workloadRef"]["name"] == "tidegate-engine-a"
    assert "workloadRef" not in pools[1]


def _env(deployment: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = deployment["template"]["spec"]["containers"][0]["env"]
    return found


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"operater": {}}, "additional properties 'operater' not allowed"),
        ({"operator": {"replica": 2}}, "at '/operator': additional properties 'replica'"),
        ({"operator": {"replicas": "two"}}, "'/operator/replicas': got string, want integer"),
        ({"operator": {"namespaces": ["Team"]}}, "'Team' does not match pattern"),
        ({"operator": {"image": {"digest": "abc"}}}, "'/operator/image/digest'"),
        ({"enginePools": [{}]}, "'/enginePools/0': missing property 'name'"),
        ({"enginePools": [{"name": "A"}]}, "'/enginePools/0/name': 'A' does not match"),
        ({"enginePools": [{"name": "a", "spec": {"selector": {}}}]}, "'/enginePools/0/spec'"),
        ({"engine": {"env": {"TIDEGATE_POOL": "x"}}}, "invalid propertyName 'TIDEGATE_POOL'"),
        ({"engine": {"env": {"TIDEGATE_ADMIN_TOKEN_FILE": "x"}}}, "invalid propertyName"),
        ({"engine": {"env": {"TIDEGATE_TRUSTED_GATEWAY_TOKEN": "x"}}}, "invalid propertyName"),
        ({"engine": {"trustedGatewayToken": {"name": "x"}}}, "'/engine/trustedGatewayToken'"),
        ({"operator": {"explain": {"on": True}}}, "'/operator/explain': additional properties"),
        (
            {"operator": {"externalMetrics": {"enabled": True}}},
            "'/operator/externalMetrics/tlsSecretName': minLength",
        ),
        (
            {"operator": {"externalMetrics": {"enabled": True, "tlsSecretName": "x"}}},
            "'/operator/externalMetrics/ca': minLength",
        ),
        ({"operator": {"externalMetrics": {"ca": "x"}}}, "'/operator/externalMetrics/ca'"),
        ({"operator": {"externalMetrics": {"port": 1}}}, "additional properties 'port'"),
        ({"operator": {"sweepSeconds": 0}}, "'/operator/sweepSeconds': exclusiveMinimum"),
        ({"engine": {"drainSeconds": -1}}, "'/engine/drainSeconds': minimum"),
        ({"redis": {"enabled": False}}, "'/externalRedis/operatorUrl/secretName': minLength"),
        ({"redis": {"maxMemory": "lots"}}, "'/redis/maxMemory'"),
        ({"networkPolicy": {"apiServerPorts": [0]}}, "'/networkPolicy/apiServerPorts/0'"),
        (
            {"admissionPolicy": {"tiers": [{"name": "gold"}]}},
            "'/admissionPolicy/tiers/0': missing property 'namespaceLabels'",
        ),
        (
            {"admissionPolicy": {"tiers": [{"name": "g", "namespaceLabels": {}}]}},
            "namespaceLabels",
        ),
        ({"monitoring": {"rules": {"enabled": "yes"}}}, "'/monitoring/rules/enabled'"),
        ({"monitoring": {"rules": {"runbooks": "https://a/"}}}, "'/monitoring/rules/runbooks'"),
    ],
)
def test_wrong_value_is_refused_by_its_name(helm: Helm, values: Values, message: str) -> None:
    refused = helm("template", "x", str(CHART), values=values, check=False)
    assert refused.returncode != 0
    assert message in refused.stderr


def test_monitoring_is_rendered_only_where_asked_for_and_known(helm: Helm) -> None:
    asked = {
        "enginePools": [{"name": "chat"}],
        "monitoring": {name: {"enabled": True} for name in ("monitors", "rules", "dashboards")},
    }

    def kinds(values: Values, *options: str) -> set[str]:
        return {one["kind"] for one in helm.render(values=values, options=options)}

    operators = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    assert kinds(asked, MONITORING) >= operators
    assert not kinds(asked) & operators
    assert not kinds({}, MONITORING) & {*operators, "ConfigMap"}
    dashboards = list((CHART / "files" / "dashboards").glob("*.json"))
    rendered = [one for one in helm.render(values=asked) if one["kind"] == "ConfigMap"]
    assert sorted(next(iter(one["data"].values())) for one in rendered) == sorted(
        path.read_text() for path in dashboards
    )
    for one in rendered:
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_alerts_link_to_their_pages_and_keep_their_own_templates(helm: Helm) -> None:
    values = {"monitoring": {"rules": {"enabled": True, "runbooks": "https://wiki/tidegate"}}}
    (found,) = (
        one
        for one in helm.render(values=values, options=(MONITORING,))
        if one["kind"] == "PrometheusRule"
    )
    alerts = [r for group in found["spec"]["groups"] for r in group["rules"] if "alert" in r]
    assert alerts
    for alert in alerts:
        assert alert["annotations"]["runbook_url"].startswith("https://wiki/tidegate/tidegate-")
    assert "$RUNBOOKS" not in str(found)
    assert "{{ $labels.pool }}" in str(found)


def test_tenants_dashboards_bring_the_right_to_write_them_and_what_limits_it(helm: Helm) -> None:
    def granted(values: Values) -> list[dict[str, object]]:
        return [
            rule
            for one in helm.render(values=values)
            if one["kind"] in {"Role", "ClusterRole"}
            for rule in one.get("rules", ())
            if "configmaps" in rule["resources"]
        ]

    assert granted({}) == []
    asked = {"monitoring": {"tenantDashboards": {"enabled": True}}}
    (rule,) = granted(asked)
    assert rule["verbs"] == ["list", "create", "patch"]
    policies = [o for o in helm.render(values=asked) if o["kind"] == "ValidatingAdmissionPolicy"]
    assert "tidegate-dashboard-" in str(policies)


@pytest.mark.parametrize("is_asked", [True, False])
def test_questions_are_answered_where_all_that_this_takes_is_there_and_only_there(
    helm: Helm, *, is_asked: bool
) -> None:
    values = {
        "operator": {"explain": {"enabled": is_asked}},
        "networkPolicy": {"explainFrom": [{"podSelector": {}}]},
    }
    objects = helm.render(values=values)
    name = "tidegate-operator"
    spec = only(objects, "Deployment", name)["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    service = {port["name"]: port for port in only(objects, "Service", name)["spec"]["ports"]}
    ingress = only(objects, "NetworkPolicy", name)["spec"]["ingress"]
    roles = [one for one in objects if one["kind"] == "ClusterRole"]
    reviews = [r["verbs"] for o in roles for r in o["rules"] if "tokenreviews" in r["resources"]]
    assert ("explain" in service) is is_asked
    assert reviews == [["create"]] * is_asked
    assert ({"ports": [{"port": "explain"}], "from": [{"podSelector": {}}]} in ingress) is is_asked
    assert ("TIDEGATE_OPERATOR_ENGINE_TOKEN_FILE" in env) is is_asked
    if is_asked:
        assert service["explain"]["targetPort"] == "explain"
        assert env["TIDEGATE_OPERATOR_EXPLAIN_PORT"] == str(ports["explain"])
        assert _secret_of(spec, env["TIDEGATE_OPERATOR_ENGINE_TOKEN_FILE"]) == (
            "tidegate-engine",
            "admin-token",
        )


@pytest.mark.parametrize("is_asked", [True, False])
def test_the_console_runs_beside_the_operator_behind_a_token_where_it_is_asked_for(
    helm: Helm, *, is_asked: bool
) -> None:
    values = {
        "operator": {
            "console": {"enabled": is_asked},
            "explain": {"enabled": False},
            "namespaces": ["a", "b"],
        },
        "networkPolicy": {"consoleFrom": [{"podSelector": {}}]},
    }
    objects = helm.render(values=values)
    spec = only(objects, "Deployment", "tidegate-operator")["spec"]["template"]["spec"]
    ingress = only(objects, "NetworkPolicy", "tidegate-operator")["spec"]["ingress"]
    services = [one for one in objects if one["metadata"]["name"] == "tidegate-console"]
    containers = {container["name"]: container for container in spec["containers"]}
    assert ("console" in containers) is is_asked
    assert len(services) == is_asked
    assert ({"ports": [{"port": "console"}], "from": [{"podSelector": {}}]} in ingress) is is_asked
    if is_asked:
        console = containers["console"]
        assert console["image"] == containers["operator"]["image"]
        assert console["args"][:2] == ["tidegate_cli", "console"]
        assert {"--host=0.0.0.0", "--namespace=a", "--namespace=b"} <= {*console["args"]}
        env = {entry["name"]: entry for entry in console["env"]}
        assert env["TIDEGATE_CONSOLE_TOKEN"]["valueFrom"]["secretKeyRef"] == {
            "name": "tidegate-operator",
            "key": "console-token",
        }
        assert env["TIDEGATE_REDIS_URL"]["value"].startswith("redis://operator:$(REDIS_PASSWORD)@")
        mounted = {mount["name"] for mount in console["volumeMounts"]}
        assert mounted == {"engine-token"} <= {volume["name"] for volume in spec["volumes"]}
        assert services[0]["spec"]["sessionAffinity"] == "ClientIP"
        assert services[0]["spec"]["ports"][0]["targetPort"] == "console"


@pytest.mark.parametrize("is_asked", [True, False])
def test_external_metrics_are_served_where_all_that_this_takes_is_there_and_only_there(
    helm: Helm, *, is_asked: bool
) -> None:
    ca = "-----BEGIN CERTIFICATE-----\nMII=\n-----END CERTIFICATE-----\n"
    values = {
        "operator": {"externalMetrics": {"enabled": is_asked, "tlsSecretName": "tls", "ca": ca}},
        "networkPolicy": {"externalMetricsFrom": [{"podSelector": {}}]},
    }
    objects, name = helm.render(values=values), "tidegate-operator"
    spec = only(objects, "Deployment", name)["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    service = {port["name"]: port for port in only(objects, "Service", name)["spec"]["ports"]}
    policy = {"ports": [{"port": "metrics-api"}], "from": [{"podSelector": {}}]}
    apis = [one["spec"] for one in objects if one["kind"] == "APIService"]
    readers = [o for o in objects if o["metadata"].get("namespace") == "kube-system"]
    assert (policy in only(objects, "NetworkPolicy", name)["spec"]["ingress"]) is is_asked
    assert ("metrics-api" in service, len(apis), len(readers)) == (is_asked,) * 3
    assert ("TIDEGATE_OPERATOR_EXTERNAL_METRICS_PORT" in env) is is_asked
    if is_asked:
        (api,) = apis
        port = service["metrics-api"]
        assert api["service"] == {"name": name, "namespace": "tidegate", "port": port["port"]}
        assert base64.b64decode(api["caBundle"]).decode() == ca
        number = str(ports[port["targetPort"]])
        assert env["TIDEGATE_OPERATOR_EXTERNAL_METRICS_PORT"] == number
        folder = env["TIDEGATE_OPERATOR_EXTERNAL_METRICS_CERTIFICATES"]
        for file in ("tls.crt", "tls.key"):
            assert _secret_of(spec, f"{folder}/{file}") == ("tls", file)


def test_engines_trust_a_gateway_by_the_token_of_a_secret_if_their_pool_says_so(
    helm: Helm,
) -> None:
    token = {"secretName": "gateway"}
    values = {"enginePools": [{"name": "a", "trustedGatewayToken": token}, {"name": "b"}]}
    objects = helm.render(values=values)
    a, b = (only(objects, "Deployment", f"tidegate-engine-{name}")["spec"] for name in "ab")
    found = {entry["name"]: entry.get("value") for entry in _env(a)}
    variable = "TIDEGATE_TRUSTED_GATEWAY_TOKEN_FILE"
    assert _secret_of(a, str(found[variable])) == ("gateway", "token")
    assert variable not in {entry["name"] for entry in _env(b)}


def _secret_of(deployment: dict[str, Any], path: str) -> tuple[str, str]:
    """Return name and key of the Secret that a file of the first container comes from."""
    pod = deployment["template"]["spec"]
    folder, _, file = path.rpartition("/")
    mounts = {m["mountPath"]: m["name"] for m in pod["containers"][0]["volumeMounts"]}
    (volume,) = (one for one in pod["volumes"] if one["name"] == mounts[folder])
    (item,) = (one for one in volume["secret"]["items"] if one["path"] == file)
    return volume["secret"]["secretName"], item["key"]


def test_definitions_are_those_of_the_repository_and_survive_their_chart(helm: Helm) -> None:
    rendered = {one["metadata"]["name"]: one for one in helm.render(CRD_CHART)}
    files = [yaml.safe_load(path.read_text()) for path in Path(CHART.parents[1] / "crds").glob("*")]
    assert set(rendered) == {one["metadata"]["name"] for one in files}
    for expected in files:
        found = rendered[expected["metadata"]["name"]]
        assert found["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        assert found == expected
