"""What can be set about an engine: environment variables, read once at the start."""

import base64
import binascii
import os
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Field,
    SecretStr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from tidegate_engine.executor.hardware import GPUS, MODELS

_PREFIX = "TIDEGATE_"
_OTHER_NAMES = {
    "otlp_endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT",
    "otlp_traces_endpoint": "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "otlp_protocol": "OTEL_EXPORTER_OTLP_PROTOCOL",
    "otlp_traces_protocol": "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
}
_OTLP_PROTOCOL = "http/protobuf"
_GRPC_PORT = 4317
_KEY_BYTES = 32
_MIN_TOKEN_CHARS = 16
_MAX_BLOCK_SIZE = 256

AUTO = "auto"
"""The value of a variable that leaves the choice to the engine."""


class SettingsError(ValueError):
    """An environment variable is missing or wrong; the message is one line that names it.

    Attributes:
        variable: The environment variable.
    """

    def __init__(self, variable: str, problem: str) -> None:
        super().__init__(f"{variable}: {problem}")
        self.variable = variable


def _check_key(text: str) -> str:
    try:
        size = len(base64.b64decode(text, validate=True))
    except binascii.Error as error:
        raise ValueError("must be base64") from error
    if size != _KEY_BYTES:
        raise ValueError(f"must hold {_KEY_BYTES} bytes, has {size}")
    return text


def _check_collector(url: str) -> str:
    if url:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.port == 0:
            raise ValueError("must be the http:// or https:// URL at which a collector takes OTLP")
    return url


def _one_of(allowed: Collection[str], *, is_optional: bool = False) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in allowed and not (is_optional and text == ""):
            raise ValueError(f"must be one of {', '.join(allowed)}, got {text!r}")
        return text

    return check


def _none_if_auto(least: int) -> WrapValidator:
    def check(value: object, check_number: ValidatorFunctionWrapHandler) -> object:
        if value == AUTO:
            return None
        try:
            return check_number(value)
        except ValidationError as error:
            raise ValueError(
                f"must be {AUTO} or a whole number from {least} on, got {value!r}"
            ) from error

    return WrapValidator(check)


def _home(variable: str, default: str) -> Path:
    """Return a directory of the XDG base directory specification."""
    configured = os.environ.get(variable)
    return (Path(configured) if configured else Path.home() / default) / "tidegate"


PoolName = Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[a-z0-9.-]+$")]
Positive = Annotated[int, Field(ge=1)]
PositiveOrAuto = Annotated[Positive | None, _none_if_auto(1)]
NumberOrAuto = Annotated[Annotated[int, Field(ge=0)] | None, _none_if_auto(0)]
Port = Annotated[int, Field(ge=0, le=65535)]
Key = Annotated[str, AfterValidator(_check_key)]
Collector = Annotated[str, AfterValidator(_check_collector)]


class Settings(BaseSettings):
    """The settings of one engine; each is `TIDEGATE_` and its name in capitals.

    Attributes:
        pool: `namespace/name` of the EnginePool whose policy is obeyed.
        pod_name: The engine's identity in its pool, unique there. The host name by default, which
            is the pod's name in Kubernetes.
        redis_url: Where policies come from and reports go to, as `redis://` or `rediss://`.
        redis_ca_file: Certificates that Redis' own is checked against, with `rediss://`; None = the
            system's.
        redis_timeout_seconds: For connecting and for each command: longer silence counts as an
            outage, so that a black-holed connection can't hang the engine's reports.
        verify_key: The operator's Ed25519 public key, 32 raw bytes as base64. Policies that it
            didn't sign are refused.
        state_dir: Where the last good policy is kept, and how many engines the pool had; must be
            this engine's own and outlive its process. A directory of the pod's name under
            `$XDG_STATE_HOME/tidegate` by default.
        executor: `torch` computes; `simulated` needs no weights and draws its tokens by hashing.
        model: `smollm2`, the path of a GGUF file, or that of a Hugging Face directory. Simulated
            engines need none: without it their tokens are bytes.
        served_model_name: The model's name in the API. By default the last part of `model`.
        dtype: Number format of weights and KV cache; `auto` = the faster one of float32 and
            bfloat16, measured at the start. With float32 a request gets the same tokens whatever
            shares its steps; bfloat16 is emulated, and slower, on CPUs without it.
        quantization: `int8` holds the weights of all matrices but the embedding in 8 bits, and the
            activations of each token while they are multiplied: faster on CPUs with VNNI, and a
            little less exact.
        device: Where PyTorch computes: `cpu`, `cuda` or `cuda:N`.
        kv_blocks: KV blocks in the pool; None = `auto`: what memory allows beside the weights
            (docs/engine-settings.md), or, with `simulated_gpu`, as many as fit there. On a CPU
            memory is taken as blocks are first used; with SmolLM2 and 16 tokens in float32 a
            block is 0.7 MiB.
        host_kv_blocks: KV blocks in host memory, for requests that are swapped out; 0 = computed
            anew instead. None = `auto`: half as many as in the pool, or what memory allows.
        block_size: Tokens in a KV block, at most 256: small ones waste less at the end of each
            sequence, large ones make shorter tables.
        batching: `continuous`; or, to compare it with, `static` (a batch is collected and runs
            until all of it has finished) or `bucketed` (the same with prompts of like length).
            Those know neither tenants nor tiers.
        max_num_seqs: Most requests in one step, unless the policy sets it.
        max_batched_tokens: Most tokens in one step, unless the policy sets it; at least
            `max_num_seqs`, as each running request computes one. Smaller steps keep the time
            between two tokens short while prompts are read.
        max_waiting: Most queued requests of all tenants; further ones are answered with 503. A
            quarter is divided among the tenants, one place for each at least: what is one's own
            there, others can't fill, and one gets it beyond the limit if they did before.
        threads: CPU threads of a step; None = `auto`: measured at the start, at most the cores that
            the process may use. More than one only helps with cores of its own: threads that wait
            for a core spin. So engines that share cores should be told how many each has.
        host: Address to listen on.
        port: Port to listen on; 0 = any free one, which the log names.
        admin_port: Port of the admin API, on the same address; 0 = any free one. Nothing listens
            there without a token.
        admin_token: What callers of the admin API present, at least 16 characters.
        admin_token_file: The same in a file, as a mounted Secret has it; read once, at the start.
        trusted_gateway_token: What a gateway presents in place of an API key to say itself, in
            `x-tidegate-tenant`, for whom it calls; at least 16 characters. Without one nobody may.
        trusted_gateway_token_file: The same in a file; read once, at the start.
        cache_dir: Where converted weights and compiled kernels are kept between starts; engines may
            share it.
        drain_seconds: How long running requests may go on after SIGTERM; shorter than the pod's
            `terminationGracePeriodSeconds`, or they are killed instead of told.
        simulated_gpu: Simulated steps take as long as on this GPU. Without it they take what the
            three settings below say.
        simulated_model: And with this model; has no effect without `simulated_gpu`.
        simulated_step_seconds: Fixed cost of a simulated step.
        simulated_prefill_token_seconds: Further cost of each prompt token in it.
        simulated_decode_seconds: Further cost of each running request in it.
        log_level: Of the log on standard error.
        otlp_endpoint: Collector to which traces of requests go; by OpenTelemetry's own variables,
            as all that begin with `otlp`.
        otlp_traces_endpoint: The same for traces alone, with the path; comes before the other.
        otlp_protocol: How a collector is spoken to; there is but one that an engine can.
        otlp_traces_protocol: The same for traces alone; comes before the other.
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, extra="ignore")

    pool: PoolName
    pod_name: str = Field(default_factory=socket.gethostname, min_length=1)
    redis_url: Annotated[str, Field(pattern="^(rediss?|unix)://")]
    redis_ca_file: Path | None = None
    redis_timeout_seconds: Annotated[float, Field(gt=0)] = 2.0
    verify_key: Key
    state_dir: Path | None = None
    executor: Literal["torch", "simulated"] = "torch"
    model: str = ""
    served_model_name: str = ""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    quantization: Literal["none", "int8"] = "none"
    device: Annotated[str, Field(pattern="^(cpu|cuda(:[0-9]+)?)$")] = "cpu"
    kv_blocks: PositiveOrAuto = None
    host_kv_blocks: NumberOrAuto = None
    block_size: Annotated[int, Field(ge=1, le=_MAX_BLOCK_SIZE)] = 16
    batching: Literal["continuous", "static", "bucketed"] = "continuous"
    max_num_seqs: Positive = 32
    max_batched_tokens: Positive = 256
    max_waiting: Positive = 10_000
    threads: PositiveOrAuto = None
    host: str = "0.0.0.0"
    port: Port = 8000
    admin_port: Port = 8001
    admin_token: SecretStr | None = None
    admin_token_file: Path | None = None
    trusted_gateway_token: SecretStr | None = None
    trusted_gateway_token_file: Path | None = None
    cache_dir: Path = Field(default_factory=lambda: _home("XDG_CACHE_HOME", ".cache") / "models")
    drain_seconds: Annotated[float, Field(ge=0)] = 20.0
    simulated_gpu: Annotated[str, AfterValidator(_one_of(GPUS, is_optional=True))] = ""
    simulated_model: Annotated[str, AfterValidator(_one_of(MODELS))] = "Llama-3.1-8B"
    simulated_step_seconds: Annotated[float, Field(ge=0)] = 0.010
    simulated_prefill_token_seconds: Annotated[float, Field(ge=0)] = 0.0001
    simulated_decode_seconds: Annotated[float, Field(ge=0)] = 0.0005
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    otlp_endpoint: Collector = Field("", validation_alias=_OTHER_NAMES["otlp_endpoint"])
    otlp_traces_endpoint: Collector = Field(
        "", validation_alias=_OTHER_NAMES["otlp_traces_endpoint"]
    )
    otlp_protocol: str = Field("", validation_alias=_OTHER_NAMES["otlp_protocol"])
    otlp_traces_protocol: str = Field("", validation_alias=_OTHER_NAMES["otlp_traces_protocol"])

    @classmethod
    def from_environment(cls) -> "Settings":
        """Read the environment.

        Raises:
            SettingsError: The first variable that is missing or wrong, or contradicts another.
        """
        try:
            settings = cls()
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise SettingsError(
                variable_of(first["loc"][0]), _problem(first["type"], first["msg"])
            ) from error
        settings._check_contradictions()
        return settings

    def _check_contradictions(self) -> None:
        if self.redis_ca_file is not None and not self.redis_url.startswith("rediss://"):
            raise SettingsError(
                variable_of("redis_ca_file"),
                f"has no meaning without TLS: {variable_of('redis_url')} must begin with rediss://",
            )
        if self.max_batched_tokens < self.max_num_seqs:
            raise SettingsError(
                variable_of("max_batched_tokens"),
                f"must be at least {variable_of('max_num_seqs')} ({self.max_num_seqs}), as every"
                f" running request computes a token in each step, got {self.max_batched_tokens}",
            )
        self._check_that_traces_are_sent_by_http()

    def _check_that_traces_are_sent_by_http(self) -> None:
        if not self.traces_url:
            return
        protocol = "otlp_traces_protocol" if self.otlp_traces_protocol else "otlp_protocol"
        asked = getattr(self, protocol)
        way_out = "name the collector's port for it, by convention 4318"
        if asked not in {"", _OTLP_PROTOCOL}:
            problem = f"engines send traces by {_OTLP_PROTOCOL} alone, not by {asked!r}: {way_out}"
            raise SettingsError(variable_of(protocol), problem)
        if not asked and urlsplit(self.traces_url).port == _GRPC_PORT:
            raise SettingsError(
                variable_of(self.traces_field),
                f"port {_GRPC_PORT} is by convention that of gRPC, and engines send traces by"
                f" {_OTLP_PROTOCOL} alone: {way_out}, or set"
                f" {variable_of(protocol)}={_OTLP_PROTOCOL} if this port takes it",
            )

    def read_admin_token(self) -> str | None:
        """Return what callers of the admin API present; None = there is no admin API.

        Raises:
            SettingsError: It is given twice, can't be read, or is no token.
        """
        return _read_token("admin_token", self.admin_token, self.admin_token_file)

    def read_gateway_token(self) -> str | None:
        """Return what a trusted gateway presents; None = none is trusted.

        Raises:
            SettingsError: It is given twice, can't be read, or is no token.
        """
        name = "trusted_gateway_token"
        return _read_token(name, self.trusted_gateway_token, self.trusted_gateway_token_file)

    @property
    def model_source(self) -> str:
        """What to load; empty = nothing, as simulated engines may."""
        return self.model or ("smollm2" if self.executor == "torch" else "")

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or Path(self.model_source).name or "simulated"

    @property
    def traces_field(self) -> str:
        """The field that says where traces go."""
        return "otlp_traces_endpoint" if self.otlp_traces_endpoint else "otlp_endpoint"

    @property
    def traces_url(self) -> str:
        """Where traces go; empty = nowhere."""
        if self.otlp_traces_endpoint or not self.otlp_endpoint:
            return self.otlp_traces_endpoint
        return f"{self.otlp_endpoint.rstrip('/')}/v1/traces"

    @property
    def policy_file(self) -> Path:
        """Where the last good policy is kept."""
        return self._state_file("policy.json")

    @property
    def engines_file(self) -> Path:
        """Where it is kept how many engines the pool has."""
        return self._state_file("engines")

    def _state_file(self, kind: str) -> Path:
        own = _home("XDG_STATE_HOME", ".local/state") / self.pod_name
        return (self.state_dir or own) / f"{self.pool.replace('/', '.')}.{kind}"


def _read_token(name: str, given: SecretStr | None, file: Path | None) -> str | None:
    if file is None:
        return None if given is None else _checked_token(name, given.get_secret_value())
    in_file = f"{name}_file"
    if given is not None:
        problem = f"contradicts {variable_of(name)}: give one of them"
        raise SettingsError(variable_of(in_file), problem)
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(variable_of(in_file), f"can't be read: {error}") from error
    return _checked_token(in_file, text)


def _checked_token(name: str, text: str) -> str:
    token = text.strip()
    if len(token) < _MIN_TOKEN_CHARS or not (token.isascii() and token.isprintable()):
        raise SettingsError(
            variable_of(name),
            f"must be at least {_MIN_TOKEN_CHARS} printable ASCII characters",
        )
    return token


def variable_of(field: str | int) -> str:
    """Return the environment variable that sets a field of `Settings`."""
    name = str(field)
    # pydantic tells of a field with another name by that name.
    return name if name in _OTHER_NAMES.values() else _OTHER_NAMES.get(name, _PREFIX + name.upper())


def _problem(kind: str, message: str) -> str:
    return "is not set" if kind == "missing" else message.removeprefix("Value error, ")
