"""`config.json` of a Hugging Face directory: which models of the Llama family it may describe.

What would change the outputs and isn't implemented is refused by the name of its field.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from tidegate_engine.model.config import LlamaConfig, ModelConfigError
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.json_file import read_json
from tidegate_engine.model.rope_scaling import (
    RopeScaling,
    RopeScalingError,
    linear,
    llama3,
    yarn,
)

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_DEFAULT_ROPE_THETA = 10_000.0

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Whole = Annotated[float, Field(ge=1, le=1)]
_EosTokenId = int | list[int] | None
_Model = TypeVar("_Model", bound=BaseModel)


class _Rope(BaseModel):
    """Rotary embedding as trained. What no subclass names is refused."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    rope_theta: _Positive | None = None
    partial_rotary_factor: _Whole = 1.0
    original_max_position_embeddings: PositiveInt | None = None


class _Linear(_Rope):
    factor: _Positive


class _Llama3(_Rope):
    factor: _Positive
    low_freq_factor: _Positive
    high_freq_factor: _Positive


class _Yarn(_Rope):
    factor: _Positive
    attention_factor: _Positive | None = None
    beta_fast: _Positive = 32.0
    beta_slow: _Positive = 1.0
    truncate: Literal[True] = True


_ROPE_TYPES: dict[str, type[_Rope]] = {
    "default": _Rope,
    "linear": _Linear,
    "llama3": _Llama3,
    "yarn": _Yarn,
}


class _Fields(BaseModel):
    """The fields that decide what is computed, under Hugging Face's names and with its defaults."""

    model_config = ConfigDict(strict=True, frozen=True)

    model_type: str
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    intermediate_size: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    original_max_position_embeddings: PositiveInt | None = None
    rms_norm_eps: _Positive
    rope_theta: _Positive | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    sliding_window: PositiveInt | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    hidden_act: Literal["silu", "swish"] = "silu"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    partial_rotary_factor: _Whole = 1.0
    quantization_config: None = None
    eos_token_id: _EosTokenId = None

    @property
    def binding_window(self) -> int | None:
        """Tokens that a position sees at most; None where layers see everything before it."""
        if self.model_type == "mistral":
            return self.sliding_window
        if not self.model_type.startswith("qwen") or not self.use_sliding_window:
            return None
        if self.layer_types is not None:
            slides = "sliding_attention" in self.layer_types
        else:
            slides = self.max_window_layers < self.num_hidden_layers
        return self.sliding_window if slides else None

    def llama_config(self, path: Path) -> LlamaConfig:
        """Put them into our own words.

        Raises:
            ModelLoadError: RoPE scaling isn't one that is implemented; `path` is for the message.
            ModelConfigError: The sizes don't fit together.
            RopeScalingError: The numbers of the scaling don't make sense.
        """
        head_size = self.head_dim or self.hidden_size // self.num_attention_heads
        rope = _parse_rope(self.rope_scaling or self.rope_parameters or {}, path)
        theta = rope.rope_theta or self.rope_theta or _DEFAULT_ROPE_THETA
        original = (
            self.original_max_position_embeddings
            or rope.original_max_position_embeddings
            or self.max_position_embeddings
        )
        context = self.max_position_embeddings
        if isinstance(rope, _Yarn):
            # Models that only this entry stretches state the length before it.
            context = max(context, int(original * rope.factor))
        return LlamaConfig(
            num_layers=self.num_hidden_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_size=head_size,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            # Up to the window's length a window hides nothing: attention is the plain one.
            max_context_tokens=min(context, self.binding_window or context),
            rope_theta=theta,
            rms_norm_epsilon=self.rms_norm_eps,
            has_tied_embeddings=self.tie_word_embeddings,
            has_qkv_bias=self.model_type == "qwen2",
            has_qk_norm=self.model_type == "qwen3",
            rope_scaling=_scaling(rope, theta, head_size, original),
        )


class _Generation(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    eos_token_id: _EosTokenId = None


def read_config(path: Path) -> tuple[LlamaConfig, frozenset[int]]:
    """Read `config.json`, and end tokens from `generation_config.json` beside it where it has any.

    Raises:
        ModelLoadError: A file is missing or broken, or describes what isn't implemented.
    """
    raw = read_json(path)
    if raw.get("model_type") not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        problem = f"architecture {raw.get('model_type')!r} isn't supported, only {known}"
        raise ModelLoadError(path, problem)
    fields = _validated(_Fields, raw, path)
    beside = path.with_name("generation_config.json")
    generation = _validated(_Generation, read_json(beside, optional=True), beside)
    ends = fields.eos_token_id if generation.eos_token_id is None else generation.eos_token_id
    try:
        config = fields.llama_config(path)
    except (ModelConfigError, RopeScalingError) as error:
        raise ModelLoadError(path, f"{error}") from error
    if ends is None:
        return config, frozenset()
    return config, frozenset([ends] if isinstance(ends, int) else ends)


def _parse_rope(raw: dict[str, Any], path: Path) -> _Rope:
    rope_type = raw.get("rope_type", raw.get("type", "default"))
    if rope_type not in _ROPE_TYPES:
        known = ", ".join(_ROPE_TYPES)
        raise ModelLoadError(path, f"RoPE scaling {rope_type!r} isn't supported, only {known}")
    numbers = {name: value for name, value in raw.items() if name not in ("rope_type", "type")}
    return _validated(_ROPE_TYPES[rope_type], numbers, path, prefix="RoPE scaling: ")


def _scaling(rope: _Rope, theta: float, head_size: int, original: int) -> RopeScaling | None:
    match rope:
        case _Linear():
            return linear(rope.factor, head_size=head_size)
        case _Llama3():
            return llama3(
                rope.factor,
                low_freq_factor=rope.low_freq_factor,
                high_freq_factor=rope.high_freq_factor,
                original_context_tokens=original,
                rope_theta=theta,
                head_size=head_size,
            )
        case _Yarn():
            return yarn(
                rope.factor,
                original_context_tokens=original,
                rope_theta=theta,
                head_size=head_size,
                beta_fast=rope.beta_fast,
                beta_slow=rope.beta_slow,
                attention_factor=rope.attention_factor,
            )
        case _:
            return None


def _validated(model: type[_Model], raw: dict[str, Any], path: Path, *, prefix: str = "") -> _Model:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            problem = f"{prefix}{field} is missing"
        elif first["type"] == "extra_forbidden":
            problem = f"{prefix}{field} isn't supported"
        else:
            problem = f"{prefix}{field}: {first['msg']}, got {first['input']!r}"
        raise ModelLoadError(path, problem) from error
