from tidegate_cli.workload import EngineWorkload, key_secret, new_key


def workload() -> EngineWorkload:
    return EngineWorkload(
        namespace="demo",
        image="tidegate/engine",
        replicas=3,
        environment={"TIDEGATE_POOL": "demo/chat"},
    )


def test_a_pod_is_found_by_deployment_and_service_and_asked_whether_it_is_ready() -> None:
    deployment, service = workload().objects()

    labels = deployment["spec"]["template"]["metadata"]["labels"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert deployment["spec"]["replicas"] == 3
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]


def test_an_engine_learns_its_own_name_and_what_it_is_given() -> None:
    (container,) = workload().objects()[0]["spec"]["template"]["spec"]["containers"]

    env = {one["name"]: one for one in container["env"]}
    assert env["TIDEGATE_POD_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert env["TIDEGATE_POOL"]["value"] == "demo/chat"


def test_an_engine_gets_no_credentials_for_kubernetes() -> None:
    pod = workload().objects()[0]["spec"]["template"]["spec"]

    assert pod["automountServiceAccountToken"] is False


def test_a_key_is_fresh_and_its_secret_is_labelled_for_the_operator() -> None:
    key = new_key("gold")

    secret = key_secret("demo", "gold", key)

    assert key != new_key("gold")
    assert secret["metadata"]["labels"] == {"tidegate.io/api-keys": "true"}
    assert secret["stringData"] == {"key": key}
