"""The operator's settings, read from the environment once."""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from tidegate_operator.leader import LeaseName


def _parsed_lease(value: object) -> object:
    return LeaseName.parse(value) if isinstance(value, str) else value


class Settings(BaseSettings):
    """How one operator process runs; every field is `TIDEGATE_OPERATOR_<FIELD>`.

    Attributes:
        redis_url: Where policies go and reports come from, `redis://[user:password@]host:port/db`,
            or `rediss://` for TLS.
        redis_ca_file: Certificates that Redis' own is checked against; None = the system's.
        signing_key_file: Ed25519 private key, PEM or base64 of the raw 32 bytes.
        kubeconfig: None = the service account of the pod.
        namespaces: The only ones to serve, separated by commas; empty = all.
        secret_namespaces: The only ones whose Secrets are read, separated by commas; empty = none.
            Not set: those that are served.
        lease: `namespace/name` of the Lease by which one of several operators leads; None = this
            is the only one.
        metrics_port: Serves `/metrics`, `/healthz` and `/readyz` there; None = not at all.
        metrics_host: The address to serve them on.
        explain_port: Tells people there why requests wait; None = not at all.
        explain_host: The address to do so on.
        engine_token_file: Holds the admin token of the engines, which are asked for it.
        external_metrics_port: Serves pools' load to HorizontalPodAutoscalers there, as an extension
            of the API server; None = not at all.
        external_metrics_host: The address to do so on.
        external_metrics_certificates: Folder with `tls.crt` and `tls.key` for it.
        sweep_seconds: How often all objects are listed, to find deletions that no watch told of.
        usage_seconds: How often usage in status may change.
        status_writes_per_second: The most writes to the API server.
        tenant_dashboards: Whether each TenantPolicy gets a ConfigMap with a Grafana dashboard.
        prometheus_url: Where KEDA finds the operator's metrics; None = no ScaledObject is written.
        log_level: Name of a level of the standard library.
    """

    model_config = SettingsConfigDict(env_prefix="TIDEGATE_OPERATOR_", frozen=True)

    redis_url: Annotated[str, Field(pattern="^(rediss?|unix)://")] = "redis://127.0.0.1:6379/0"
    redis_ca_file: Path | None = None
    signing_key_file: Path
    kubeconfig: Path | None = None
    namespaces: Annotated[tuple[str, ...], NoDecode] = ()
    secret_namespaces: Annotated[tuple[str, ...] | None, NoDecode] = None
    lease: Annotated[LeaseName, BeforeValidator(_parsed_lease), NoDecode] | None = None
    metrics_port: Annotated[int | None, Field(ge=0, le=65535)] = None
    metrics_host: str = "0.0.0.0"
    # What a port needs comes before it, as its check looks at that.
    engine_token_file: Path | None = None
    explain_port: Annotated[int | None, Field(ge=0, le=65535)] = None
    explain_host: str = "0.0.0.0"
    external_metrics_certificates: Path | None = None
    external_metrics_port: Annotated[int | None, Field(ge=0, le=65535)] = None
    external_metrics_host: str = "0.0.0.0"
    sweep_seconds: Annotated[float, Field(gt=0)] = 60.0
    usage_seconds: Annotated[float, Field(gt=0)] = 10.0
    status_writes_per_second: Annotated[float, Field(gt=0)] = 50.0
    tenant_dashboards: bool = False
    prometheus_url: Annotated[str, Field(pattern="^https?://")] | None = None
    log_level: str = "INFO"

    @field_validator("namespaces", "secret_namespaces", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Take `a,b` as well as a list."""
        if isinstance(value, str):
            return tuple(name.strip() for name in value.split(",") if name.strip())
        return value

    @field_validator("redis_ca_file")
    @classmethod
    def _check_tls(cls, value: Path | None, known: ValidationInfo) -> Path | None:
        if value is not None and not known.data.get("redis_url", "").startswith("rediss://"):
            raise ValueError("has no meaning without TLS: REDIS_URL must begin with rediss://")
        return value

    @field_validator("explain_port")
    @classmethod
    def _check_explain(cls, value: int | None, known: ValidationInfo) -> int | None:
        if value is not None and known.data.get("engine_token_file") is None:
            raise ValueError("needs ENGINE_TOKEN_FILE, to ask the engines with")
        return value

    @field_validator("external_metrics_port")
    @classmethod
    def _check_external_metrics(cls, value: int | None, known: ValidationInfo) -> int | None:
        if value is not None and known.data.get("external_metrics_certificates") is None:
            raise ValueError("needs EXTERNAL_METRICS_CERTIFICATES, to be known by")
        return value

    @property
    def secret_scopes(self) -> tuple[str | None, ...]:
        """The namespaces whose Secrets are read; None = all of them."""
        if self.secret_namespaces is None:
            return self.namespaces or (None,)
        return self.secret_namespaces
