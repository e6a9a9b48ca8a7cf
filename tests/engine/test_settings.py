import base64
import re
from pathlib import Path

import pytest
from pydantic import WrapValidator
from pydantic.fields import FieldInfo

from tidegate_engine.settings import Settings, SettingsError, variable_of

KEY = base64.b64encode(bytes(32)).decode()
MINIMAL = {
    "TIDEGATE_POOL": "serving/main",
    "TIDEGATE_REDIS_URL": "redis://127.0.0.1:6379",
    "TIDEGATE_VERIFY_KEY": KEY,
}


@pytest.fixture(autouse=True)
def minimal_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in MINIMAL.items():
        monkeypatch.setenv(name, value)


def test_three_variables_are_enough() -> None:
    settings = Settings.from_environment()
    assert (settings.executor, settings.model_source) == ("torch", "smollm2")
    assert (settings.dtype, settings.quantization, settings.device) == ("float32", "none", "cpu")
    assert settings.block_size == 16
    assert settings.pod_name


@pytest.mark.parametrize("name", MINIMAL)
def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(name)
    with pytest.raises(SettingsError, match=f"^{name}: is not set$"):
        Settings.from_environment()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TIDEGATE_POOL", "main"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "grpc://collector:4317"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://:4318"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://collector:many"),
        ("TIDEGATE_REDIS_URL", "http://redis"),
        ("TIDEGATE_VERIFY_KEY", "not base64!"),
        ("TIDEGATE_VERIFY_KEY", base64.b64encode(bytes(31)).decode()),
        ("TIDEGATE_EXECUTOR", "cuda"),
        ("TIDEGATE_KV_BLOCKS", "0"),
        ("TIDEGATE_KV_BLOCKS", "many"),
        ("TIDEGATE_HOST_KV_BLOCKS", "-1"),
        ("TIDEGATE_SIMULATED_GPU", "H100"),
        ("TIDEGATE_SIMULATED_MODEL", ""),
        ("TIDEGATE_DTYPE", "int8"),
        ("TIDEGATE_QUANTIZATION", "int4"),
        ("TIDEGATE_DEVICE", "gpu"),
        ("TIDEGATE_BLOCK_SIZE", "0"),
        ("TIDEGATE_BLOCK_SIZE", "257"),
        ("TIDEGATE_THREADS", "0"),
        ("TIDEGATE_THREADS", "all"),
        ("TIDEGATE_PORT", "65536"),
        ("TIDEGATE_DRAIN_SECONDS", "-1"),
        ("TIDEGATE_LOG_LEVEL", "loud"),
    ],
)
def test_a_wrong_value_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        Settings.from_environment()
    assert caught.value.variable == name
    assert str(caught.value).startswith(f"{name}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "least"),
    [("TIDEGATE_THREADS", 1), ("TIDEGATE_KV_BLOCKS", 1), ("TIDEGATE_HOST_KV_BLOCKS", 0)],
)
def test_a_number_may_be_left_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, name: str, least: int
) -> None:
    field = name.removeprefix("TIDEGATE_").lower()
    assert getattr(Settings.from_environment(), field) is None
    for text, value in (("auto", None), ("7", 7), (f"{least}", least)):
        monkeypatch.setenv(name, text)
        assert getattr(Settings.from_environment(), field) == value
    monkeypatch.setenv(name, f"{least - 1}")
    message = f"^{name}: must be auto or a whole number from {least} on, got '{least - 1}'$"
    with pytest.raises(SettingsError, match=message):
        Settings.from_environment()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"MAX_BATCHED_TOKENS": "15", "MAX_NUM_SEQS": "16"},
            r"^TIDEGATE_MAX_BATCHED_TOKENS: must be at least TIDEGATE_MAX_NUM_SEQS \(16\)",
        ),
        ({"MAX_NUM_SEQS": "257"}, r"^TIDEGATE_MAX_BATCHED_TOKENS: .* \(257\), .* got 256$"),
        (
            {"REDIS_CA_FILE": "/ca.crt"},
            r"^TIDEGATE_REDIS_CA_FILE: .* TIDEGATE_REDIS_URL must begin with rediss://$",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], message: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(f"TIDEGATE_{name}", value)
    with pytest.raises(SettingsError, match=message) as caught:
        Settings.from_environment()
    assert "\n" not in str(caught.value)


def test_the_documentation_lists_every_variable_with_its_default() -> None:
    text = (Path(__file__).parents[2] / "docs/engine-settings.md").read_text()
    listed = re.findall(r"^\| `([A-Z_]+)` \| (\S+)[^|]* \| \S.* \|$", text, re.MULTILINE)
    assert listed == [
        (variable_of(name), described_default(field))
        for name, field in Settings.model_fields.items()
    ]


def described_default(field: FieldInfo) -> str:
    """How the documentation tells a default; one that depends on something is told in words."""
    if field.is_required():
        return "required"
    if field.default_factory is not None or field.default in {None, ""}:
        may_be_auto = any(isinstance(rule, WrapValidator) for rule in field.metadata)
        return "auto" if may_be_auto else "-"
    return f"`{field.default:g}`" if isinstance(field.default, float) else f"`{field.default}`"


def test_the_names_that_may_be_simulated_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_SIMULATED_GPU", "B200")
    with pytest.raises(SettingsError, match="one of A100-80G, H100-80G, H200, CPU-2-cores, got"):
        Settings.from_environment()
    monkeypatch.setenv("TIDEGATE_SIMULATED_GPU", "H200")
    monkeypatch.setenv("TIDEGATE_SIMULATED_MODEL", "llama")
    with pytest.raises(SettingsError, match=r"one of Llama-3\.1-8B, .*SmolLM2-135M, got 'llama'"):
        Settings.from_environment()
    monkeypatch.setenv("TIDEGATE_SIMULATED_MODEL", "Qwen3-0.6B")
    assert Settings.from_environment().simulated_model == "Qwen3-0.6B"


OTLP = "OTEL_EXPORTER_OTLP_"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"ENDPOINT": "http://c:4318", "PROTOCOL": "grpc"}, "PROTOCOL"),
        ({"ENDPOINT": "http://c:4318", "PROTOCOL": "http/json"}, "PROTOCOL"),
        ({"ENDPOINT": "https://c:4317"}, "ENDPOINT"),
        ({"TRACES_ENDPOINT": "http://c:4317/v1/traces"}, "TRACES_ENDPOINT"),
        (
            {
                "ENDPOINT": "http://c:4318",
                "PROTOCOL": "http/protobuf",
                "TRACES_PROTOCOL": "grpc",
            },
            "TRACES_PROTOCOL",
        ),
    ],
    ids=str,
)
def test_traces_that_are_asked_for_by_another_protocol_are_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], named: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(OTLP + name, value)
    with pytest.raises(SettingsError, match=r"http/protobuf alone.*, by convention 4318") as caught:
        Settings.from_environment()
    assert caught.value.variable == OTLP + named
    assert str(caught.value).startswith(f"{OTLP}{named}: ")


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ({}, ""),
        ({"PROTOCOL": "grpc"}, ""),
        ({"ENDPOINT": "http://c:4318/"}, "http://c:4318/v1/traces"),
        ({"ENDPOINT": "https://c/otlp", "PROTOCOL": ""}, "https://c/otlp/v1/traces"),
        ({"ENDPOINT": "http://c:4317", "PROTOCOL": "http/protobuf"}, "http://c:4317/v1/traces"),
        ({"ENDPOINT": "http://c:4317", "TRACES_ENDPOINT": "http://d/spans"}, "http://d/spans"),
        (
            {
                "TRACES_ENDPOINT": "http://d:4318/spans",
                "PROTOCOL": "grpc",
                "TRACES_PROTOCOL": "http/protobuf",
            },
            "http://d:4318/spans",
        ),
    ],
    ids=str,
)
def test_traces_go_where_opentelemetrys_variables_say(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], url: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(OTLP + name, value)
    assert Settings.from_environment().traces_url == url


def test_settings_are_frozen() -> None:
    settings = Settings.from_environment()
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1  # type: ignore[misc]


def test_the_model_is_named_after_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.from_environment().model_name == "smollm2"
    monkeypatch.setenv("TIDEGATE_MODEL", "/models/Qwen3")
    assert Settings.from_environment().model_name == "Qwen3"
    monkeypatch.setenv("TIDEGATE_SERVED_MODEL_NAME", "chat")
    assert Settings.from_environment().model_name == "chat"


def test_simulated_engines_need_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_EXECUTOR", "simulated")
    settings = Settings.from_environment()
    assert (settings.model_source, settings.model_name) == ("", "simulated")


def test_engines_on_one_machine_keep_their_policies_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    files = set()
    for pod in ("engine-0", "engine-1"):
        monkeypatch.setenv("TIDEGATE_POD_NAME", pod)
        files.add(Settings.from_environment().policy_file)
        files.add(Settings.from_environment().engines_file)
    assert files == {
        tmp_path / "tidegate" / pod / f"serving.main.{kind}"
        for pod in ("engine-0", "engine-1")
        for kind in ("policy.json", "engines")
    }
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path / "own"))
    assert Settings.from_environment().policy_file.parent == tmp_path / "own"
