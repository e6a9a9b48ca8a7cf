import pytest

from tidegate_cli.bench.propagation import PolicyWriter
from tidegate_devcluster.control_plane import ControlPlane


@pytest.mark.cluster
@pytest.mark.usefixtures("crds_installed")
async def test_policies_are_written_past_the_proxies_of_the_environment(
    control_plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)

    async with PolicyWriter.connected(control_plane.kubeconfig, namespace) as writer:
        await writer.create("one")

        assert await writer.change("one") == 2
