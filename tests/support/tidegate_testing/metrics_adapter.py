"""An adapter of external metrics, as prometheus-adapter is: it serves what an operator exposes."""

from __future__ import annotations

import json
import ssl
import threading
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client.parser import text_string_to_metric_families

from tidegate_devcluster.kubectl import Kubectl
from tidegate_devcluster.pki import Pki

GROUP_VERSION = "external.metrics.k8s.io/v1beta1"


def _values(metrics_url: str, metric: str, labels: dict[str, str]) -> Iterator[float]:
    with urllib.request.urlopen(metrics_url, timeout=5) as answer:
        text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == metric and labels.items() <= sample.labels.items():
                yield sample.value


class _Adapter(BaseHTTPRequestHandler):
    metrics_url = ""

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if "/namespaces/" not in asked.path:
            self._answer("APIResourceList", "v1", groupVersion=GROUP_VERSION, resources=[])
            return
        metric = asked.path.rpartition("/")[2]
        (selector,) = parse_qs(asked.query)["labelSelector"]
        labels = dict(term.split("=") for term in selector.split(","))
        items = [
            {
                "metricName": metric,
                "metricLabels": labels,
                "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "value": f"{value:g}",
            }
            for value in _values(self.metrics_url, metric, labels)
        ]
        self._answer("ExternalMetricValueList", GROUP_VERSION, metadata={}, items=items)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - overridden
        """Stays silent."""

    def _answer(self, kind: str, version: str, **fields: Any) -> None:
        content = json.dumps({"kind": kind, "apiVersion": version, **fields}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def metrics_adapter(
    kubectl: Kubectl, namespace: str, metrics_url: str, folder: Path
) -> Iterator[None]:
    """Serve the external metrics API of a cluster for the length of the block."""
    pki = Pki(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pki.server("adapter", [f"adapter.{namespace}.svc"]))
    handler = type("Adapter", (_Adapter,), {"metrics_url": metrics_url})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    port = server.server_port
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "adapter", "namespace": namespace},
        "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]},
    }
    api = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": "v1beta1.external.metrics.k8s.io"},
        "spec": {
            "group": "external.metrics.k8s.io",
            "version": "v1beta1",
            "service": {"name": "adapter", "namespace": namespace, "port": port},
            "caBundle": b64encode(pki.ca.read_bytes()).decode(),
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
        },
    }
    try:
        for manifest in (service, api):
            kubectl("apply", "-f", "-", input=json.dumps(manifest), check=True)
        yield
    finally:
        # While it is registered and absent, no namespace ends.
        kubectl("delete", "apiservice", "v1beta1.external.metrics.k8s.io", "--ignore-not-found")
        server.shutdown()
        server.server_close()
        thread.join()
