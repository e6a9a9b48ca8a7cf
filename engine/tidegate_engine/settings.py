"""What can be set about an engine: environment variables, read once at the start."""

import base64
import binascii
import os
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from tidegate_engine.executor.hardware import GPUS, MODELS

_PREFIX = "TIDEGATE_"
_KEY_BYTES = 32
_MIN_TOKEN_CHARS = 16


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


def _one_of(allowed: Collection[str], *, is_optional: bool = False) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in allowed and not (is_optional and text == ""):
            raise ValueError(f"must be one of {', '.join(allowed)}, got {text!r}")
        return text

    return check


def _home(variable: str, default: str) -> Path:
    """Return a directory of the XDG base directory specification."""
    configured = os.environ.get(variable)
    return (Path(configured) if configured else Path.home() / default) / "tidegate"


PoolName = Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[a-z0-9.-]+$")]
Positive = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Key = Annotated[str, AfterValidator(_check_key)]


class Settings(BaseSettings):
    """The settings of one engine; each is `TIDEGATE_` and its name in capitals.

    Attributes:
        pool: `namespace/name` of the EnginePool whose policy is obeyed.
        pod_name: The engine's identity in its pool, unique there. The host name by default, which
            is the pod's name in Kubernetes.
        redis_url: Where policies come from and reports go to, as `redis://` or `rediss://`.
        redis_timeout_seconds: For connecting and for each command: longer silence counts as an
            outage, so that a black-holed connection can't hang the engine's reports.
        verify_key: The operator's Ed25519 public key, 32 raw bytes as base64. Policies that it
            didn't sign are refused.
        state_dir: Where the last good policy is kept; must be this engine's own and outlive its
            process. A directory of the pod's name under `$XDG_STATE_HOME/tidegate` by default.
        executor: `torch` computes; `simulated` needs no weights and draws its tokens by hashing.
        model: `smollm2`, the path of a GGUF file, or that of a Hugging Face directory. Simulated
            engines need none: without it their tokens are bytes.
        served_model_name: The model's name in the API. By default the last part of `model`.
        dtype: Number format of weights and KV cache. bfloat16 is emulated, and slower, on CPUs
            without it.
        device: Where PyTorch computes, as it names devices.
        kv_blocks: KV blocks in the pool. On a CPU memory is taken as blocks are first used; with
            SmolLM2 and 16 tokens in float32 a block is 0.7 MiB. By default 1024, or, with
            `simulated_gpu`, as many as fit there beside the weights.
        host_kv_blocks: KV blocks in host memory, for requests that are swapped out; 0 = computed
            anew instead. By default half as many as in the pool.
        block_size: Tokens in a KV block: small ones waste less at the end of each sequence, large
            ones make shorter tables.
        batching: `continuous`; or, to compare it with, `static` (a batch is collected and runs
            until all of it has finished) or `bucketed` (the same with prompts of like length).
            Those know neither tenants nor tiers.
        max_num_seqs: Most requests in one step, unless the policy sets it.
        max_batched_tokens: Most tokens in one step, unless the policy sets it. Smaller steps keep
            the time between two tokens short while prompts are read.
        max_waiting: Most queued requests of all tenants; further ones are answered with 503.
        threads: CPU threads of a step. More than one only helps with cores of its own: threads that
            wait for a core spin.
        host: Address to listen on.
        port: Port to listen on; 0 = any free one, which the log names.
        admin_port: Port of the admin API, on the same address; 0 = any free one. Nothing listens
            there without a token.
        admin_token: What callers of the admin API present, at least 16 characters.
        admin_token_file: The same in a file, as a mounted Secret has it; read once, at the start.
        cache_dir: Where converted weights are kept between starts; engines may share it.
        drain_seconds: How long running requests may go on after SIGTERM; shorter than the pod's
            `terminationGracePeriodSeconds`, or they are killed instead of told.
        simulated_gpu: Simulated steps take as long as on this GPU. Without it they take what the
            three settings below say.
        simulated_model: And with this model; has no effect without `simulated_gpu`.
        simulated_step_seconds: Fixed cost of a simulated step.
        simulated_prefill_token_seconds: Further cost of each prompt token in it.
        simulated_decode_seconds: Further cost of each running request in it.
        log_level: Of the log on standard error.
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, extra="ignore")

    pool: PoolName
    pod_name: str = Field(default_factory=socket.gethostname, min_length=1)
    redis_url: Annotated[str, Field(pattern="^(rediss?|unix)://")]
    redis_timeout_seconds: Annotated[float, Field(gt=0)] = 2.0
    verify_key: Key
    state_dir: Path | None = None
    executor: Literal["torch", "simulated"] = "torch"
    model: str = ""
    served_model_name: str = ""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    kv_blocks: Positive = 1024
    host_kv_blocks: Annotated[int, Field(ge=0)] | None = None
    block_size: Positive = 16
    batching: Literal["continuous", "static", "bucketed"] = "continuous"
    max_num_seqs: Positive = 32
    max_batched_tokens: Positive = 256
    max_waiting: Positive = 10_000
    threads: Positive = 1
    host: str = "0.0.0.0"
    port: Port = 8000
    admin_port: Port = 8001
    admin_token: SecretStr | None = None
    admin_token_file: Path | None = None
    cache_dir: Path = Field(default_factory=lambda: _home("XDG_CACHE_HOME", ".cache") / "models")
    drain_seconds: Annotated[float, Field(ge=0)] = 20.0
    simulated_gpu: Annotated[str, AfterValidator(_one_of(GPUS, is_optional=True))] = ""
    simulated_model: Annotated[str, AfterValidator(_one_of(MODELS))] = "Llama-3.1-8B"
    simulated_step_seconds: Annotated[float, Field(ge=0)] = 0.010
    simulated_prefill_token_seconds: Annotated[float, Field(ge=0)] = 0.0001
    simulated_decode_seconds: Annotated[float, Field(ge=0)] = 0.0005
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    @classmethod
    def from_environment(cls) -> "Settings":
        """Read the environment.

        Raises:
            SettingsError: The first variable that is missing or wrong.
        """
        try:
            return cls()
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            variable = _PREFIX + str(first["loc"][0]).upper()
            raise SettingsError(variable, _problem(first["type"], first["msg"])) from error

    def read_admin_token(self) -> str | None:
        """Return what callers of the admin API present; None = there is no admin API.

        Raises:
            SettingsError: It is given twice, can't be read, or is no token.
        """
        if self.admin_token_file is None:
            if self.admin_token is None:
                return None
            return _checked_token("ADMIN_TOKEN", self.admin_token.get_secret_value())
        if self.admin_token is not None:
            raise SettingsError(
                f"{_PREFIX}ADMIN_TOKEN_FILE", f"contradicts {_PREFIX}ADMIN_TOKEN: give one of them"
            )
        try:
            text = self.admin_token_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{_PREFIX}ADMIN_TOKEN_FILE", f"can't be read: {error}") from error
        return _checked_token("ADMIN_TOKEN_FILE", text)

    @property
    def model_source(self) -> str:
        """What to load; empty = nothing, as simulated engines may."""
        return self.model or ("smollm2" if self.executor == "torch" else "")

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or Path(self.model_source).name or "simulated"

    @property
    def policy_file(self) -> Path:
        """Where the last good policy is kept."""
        own = _home("XDG_STATE_HOME", ".local/state") / self.pod_name
        return (self.state_dir or own) / f"{self.pool.replace('/', '.')}.policy.json"


def _checked_token(name: str, text: str) -> str:
    token = text.strip()
    if len(token) < _MIN_TOKEN_CHARS or not (token.isascii() and token.isprintable()):
        raise SettingsError(
            f"{_PREFIX}{name}",
            f"must be at least {_MIN_TOKEN_CHARS} printable ASCII characters",
        )
    return token


def _problem(kind: str, message: str) -> str:
    return "is not set" if kind == "missing" else message.removeprefix("Value error, ")
