"""A real Kubernetes control plane on loopback, from binaries alone."""

from __future__ import annotations

import http.client
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.pki import Pki
from tidegate_devcluster.processes import Child, Lifeline, free_port

START_SECONDS = 60.0
# Each of these needs a cloud, a volume or a bootstrap token, of which there are none here.
UNUSED_CONTROLLERS = (
    "node-ipam-controller",
    "persistentvolume-attach-detach-controller",
    "persistentvolume-binder-controller",
    "persistentvolume-expander-controller",
    "ephemeral-volume-controller",
    "bootstrap-signer-controller",
    "token-cleaner-controller",
    "selinux-warning-controller",
)


class ControlPlane:
    """etcd and kube-apiserver, with controllers also kube-controller-manager and kube-scheduler.

    A context manager; ready when entered. Data goes with the context: etcd does not sync to disk.

    Attributes:
        server: URL of the API server.
        ca: Certificate that signs its certificate.
        kubeconfig: Of a user who may do everything.
        etcd_url: etcd speaks its gRPC here, and the JSON of its gateway.
    """

    server: str
    ca: Path
    kubeconfig: Path
    etcd_url: str

    def __init__(
        self,
        root: Path,
        assets: Assets,
        *,
        controllers: bool,
        hosts: Sequence[str] = (),
        lifeline: Lifeline | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            root: Folder of data, keys and logs.
            assets: Gives the binaries.
            controllers: Without, no Pod runs, no Deployment is expanded and no namespace ends;
                enough for custom resources, and less to start.
            hosts: Further addresses by which the API server may be called, if somebody forwards
                them: its certificate holds for them.
            lifeline: Removes all when this process is killed; one of its own without.
        """
        self._root = root
        self._assets = assets
        self._controllers = controllers
        self._hosts = ("127.0.0.1", "localhost", "kubernetes", *hosts)
        self._given_lifeline = lifeline
        self._exits = ExitStack()
        self.children: list[Child] = []

    def __enter__(self) -> ControlPlane:
        with ExitStack() as exits:
            self._lifeline = self._given_lifeline or exits.enter_context(Lifeline())
            exits.callback(self._stop)
            self._start()
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.close()

    @property
    def port(self) -> int:
        """The API server's port."""
        return int(self.server.rpartition(":")[2])

    def user_kubeconfig(
        self, name: str, groups: Sequence[str] = (), *, host: str | None = None
    ) -> Path:
        """Writes the kubeconfig of another user, who may do what RBAC grants.

        Args:
            name: The user's name.
            groups: Its groups.
            host: One of the further addresses; loopback without.
        """
        server = self.server if host is None else f"https://{host}:{self.port}"
        return self._pki.kubeconfig(server, name, groups)

    def stop_api_server(self) -> None:
        """Kills it alone; everything that was stored stays in etcd."""
        self._api_server.stop()

    def restart_api_server(self) -> None:
        """Starts it anew on the same port, after killing it if it still runs."""
        self.stop_api_server()
        self.children.remove(self._api_server)
        self._start_api_server()

    def back_up(self, copy: Path) -> None:
        """Copies all that is stored into a new folder; etcd and API server are away meanwhile."""
        self._stop_etcd()
        shutil.copytree(self._etcd_data, copy)
        self._start_etcd()
        self.restart_api_server()

    def restore(self, copy: Path) -> None:
        """Makes what was stored then all that is stored: versions of objects go back as well."""
        self._stop_etcd()
        shutil.rmtree(self._etcd_data)
        shutil.copytree(copy, self._etcd_data)
        self._start_etcd()
        self.restart_api_server()

    def _start(self) -> None:
        self._pki = Pki(self._root / "pki")
        self.ca = self._pki.ca
        self.server = f"https://127.0.0.1:{free_port()}"
        self.kubeconfig = self.user_kubeconfig("admin", ["system:masters"])
        self.etcd_url, self._etcd_peer_url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._etcd_data = self._root / "etcd"
        self._start_etcd()
        self._start_api_server()
        if self._controllers:
            self._start_controllers()

    def _stop(self) -> None:
        # Nothing is worth a graceful end (about 8 s), and the watchers would only log errors.
        for child in reversed(self.children):
            child.stop()
        self.children.clear()

    def _child(self, name: str, arguments: Sequence[str]) -> Child:
        tool = self._assets.tool(name)
        child = Child(
            name,
            [str(tool.path), *arguments],
            log=self._root / "logs" / f"{name}.log",
            lifeline=self._lifeline,
            environment=tool.environment,
        )
        self.children.append(child)
        return child

    def _stop_etcd(self) -> None:
        self.stop_api_server()
        self._etcd.stop()
        self.children.remove(self._etcd)

    def _start_etcd(self) -> None:
        client, peer = self.etcd_url, self._etcd_peer_url
        self._etcd = self._child(
            "etcd",
            [
                "--name=devcluster",
                f"--data-dir={self._etcd_data}",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=devcluster={peer}",
                "--unsafe-no-fsync=true",
            ],
        )
        # An API server that finds no etcd backs off for whole seconds.
        self._etcd.wait_until(
            lambda: _answers_ok(f"{client}/health"), timeout_seconds=START_SECONDS
        )

    def _start_api_server(self) -> None:
        self._api_server = self._child("kube-apiserver", self._api_server_arguments())
        tls = self._admin_tls()
        self._api_server.wait_until(
            lambda: _answers_ok(f"{self.server}/readyz", tls), timeout_seconds=START_SECONDS
        )

    def _api_server_arguments(self) -> list[str]:
        pki = self._pki
        certificate, key = pki.server("kube-apiserver", self._hosts)
        proxy_certificate, proxy_key = pki.user("front-proxy-client")
        arguments = [
            f"--etcd-servers={self.etcd_url}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--client-ca-file={pki.ca}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki.service_account_public_key}",
            f"--service-account-signing-key-file={pki.service_account_key}",
            "--authorization-mode=Node,RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--endpoint-reconciler-type=none",
            "--allow-privileged=true",
            # Aggregated API servers (external metrics) trust these.
            f"--requestheader-client-ca-file={pki.ca}",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={proxy_certificate}",
            f"--proxy-client-key-file={proxy_key}",
        ]
        if not self._controllers:
            # Nobody makes the default service account, without which no Pod would be admitted.
            arguments.append("--disable-admission-plugins=ServiceAccount")
        return arguments

    def _start_controllers(self) -> None:
        started = [
            self._start_controller(
                "kube-controller-manager",
                [
                    "--use-service-account-credentials=true",
                    f"--service-account-private-key-file={self._pki.service_account_key}",
                    f"--root-ca-file={self._pki.ca}",
                    "--controllers="
                    + ",".join(["*", *(f"-{name}" for name in UNUSED_CONTROLLERS)]),
                    # Development wants to see a change soon, production wants it calm.
                    "--horizontal-pod-autoscaler-sync-period=5s",
                    "--horizontal-pod-autoscaler-downscale-stabilization=10s",
                ],
            ),
            self._start_controller("kube-scheduler", []),
        ]
        # Their own certificates are self-signed, and only health is asked.
        tls = ssl.create_default_context()
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
        for child, health in started:
            child.wait_until(
                lambda url=health: _answers_ok(url, tls),  # type: ignore[misc]
                timeout_seconds=START_SECONDS,
            )

    def _start_controller(self, name: str, arguments: Sequence[str]) -> tuple[Child, str]:
        kubeconfig = self.user_kubeconfig(f"system:{name}")
        port = free_port()
        common = [
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            "--leader-elect=false",
            # The defaults spare a busy server; here they would only delay the first pods.
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
        ]
        child = self._child(name, [*common, *arguments])
        return child, f"https://127.0.0.1:{port}/healthz"

    def _admin_tls(self) -> ssl.SSLContext:
        tls = ssl.create_default_context(cafile=str(self.ca))
        tls.load_cert_chain(
            self.kubeconfig.with_suffix(".crt"), self.kubeconfig.with_suffix(".key")
        )
        return tls


def _answers_ok(url: str, tls: ssl.SSLContext | None = None) -> bool:
    # No proxy of the environment: the address is this machine's.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)
    )
    try:
        with opener.open(url, timeout=2.0) as answer:
            return bool(answer.status == http.client.OK)
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return False
