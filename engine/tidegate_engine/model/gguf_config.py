"""The metadata of a GGUF file: which models of the Llama family it may describe.

What would change the outputs and isn't implemented is refused by the name of its key.
"""

from collections.abc import Sequence

from tidegate_engine.model.config import LlamaConfig, ModelConfigError
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.gguf_metadata import GgufMetadata
from tidegate_engine.model.rope_scaling import RopeScaling, RopeScalingError, linear, yarn

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_TOKENS = "tokenizer.ggml.tokens"
# llama.cpp's numbers for YaRN that converters leave at these values.
_YARN_CONSTANTS = {
    "attn_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
    "yarn_log_multiplier": 0.0,
}


def read_config(
    metadata: GgufMetadata, *, has_output: bool, rope_divisors: Sequence[float] | None
) -> LlamaConfig:
    """Read a model's shape.

    `has_output` says whether the file holds an output projection of its own, `rope_divisors` are
    the values of its tensor `rope_freqs.weight`, if it has one.

    Raises:
        ModelLoadError: A key is missing or broken, or asks for what isn't implemented.
    """
    arch = metadata.value("general.architecture", str)
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        problem = f"architecture {arch!r} isn't supported, only {known}"
        raise ModelLoadError(metadata.path, problem)
    _refuse_what_differs(metadata, arch)
    hidden = metadata.value(f"{arch}.embedding_length", int)
    heads = metadata.value(f"{arch}.attention.head_count", int)
    head_size = _head_size(metadata, arch, hidden, heads)
    context = metadata.value(f"{arch}.context_length", int)
    window = metadata.value(f"{arch}.attention.sliding_window", int, default=0)
    theta = metadata.value(f"{arch}.rope.freq_base", float, default=10_000.0)
    try:
        scaling = _rope_scaling(
            metadata, arch, theta=theta, head_size=head_size, divisors=rope_divisors
        )
        return LlamaConfig(
            num_layers=metadata.value(f"{arch}.block_count", int),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=metadata.value(f"{arch}.attention.head_count_kv", int, default=heads),
            head_size=head_size,
            intermediate_size=metadata.value(f"{arch}.feed_forward_length", int),
            vocab_size=metadata.value(f"{arch}.vocab_size", int, default=metadata.length(_TOKENS)),
            # Up to the window's length a window hides nothing: attention is the plain one.
            max_context_tokens=min(context, window or context),
            rope_theta=theta,
            rms_norm_epsilon=metadata.value(f"{arch}.attention.layer_norm_rms_epsilon", float),
            has_tied_embeddings=not has_output,
            has_qkv_bias=arch == "qwen2",
            has_qk_norm=arch == "qwen3",
            rope_scaling=scaling,
        )
    except (ModelConfigError, RopeScalingError) as error:
        raise ModelLoadError(metadata.path, f"{error}") from error


def _refuse_what_differs(metadata: GgufMetadata, arch: str) -> None:
    if metadata.value("split.count", int, default=0) > 1:
        raise metadata.refuse("split.count", "files split into several aren't supported")
    if metadata.value(f"{arch}.expert_count", int, default=0) > 0:
        raise metadata.refuse(f"{arch}.expert_count", "mixtures of experts aren't supported")


def _head_size(metadata: GgufMetadata, arch: str, hidden: int, heads: int) -> int:
    head_size = metadata.value(f"{arch}.attention.key_length", int, default=hidden // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        found = metadata.value(f"{arch}.{key}", int, default=head_size)
        if found != head_size:
            raise metadata.refuse(f"{arch}.{key}", f"must be the head size {head_size}, is {found}")
    return head_size


def _rope_scaling(
    metadata: GgufMetadata,
    arch: str,
    *,
    theta: float,
    head_size: int,
    divisors: Sequence[float] | None,
) -> RopeScaling | None:
    prefix = f"{arch}.rope.scaling"
    # As llama.cpp reads it: a factor without a type is linear; the last is the key's old name.
    kind = metadata.value(f"{prefix}.type", str, default="linear")
    factor = metadata.value(
        f"{prefix}.factor",
        float,
        default=metadata.value(f"{arch}.rope.scale_linear", float, default=0.0),
    )
    if kind not in ("none", "linear", "yarn"):
        raise metadata.refuse(f"{prefix}.type", f"{kind!r} isn't supported")
    is_stretched = kind != "none" and factor not in (0.0, 1.0)
    if not is_stretched:
        return None if divisors is None else RopeScaling(tuple(divisors))
    if divisors is not None:
        raise metadata.refuse(f"{prefix}.type", "rope_freqs.weight scales already")
    if kind == "linear":
        return linear(factor, head_size=head_size)
    for key, usual in _YARN_CONSTANTS.items():
        found = metadata.value(f"{prefix}.{key}", float, default=usual)
        if found != usual:
            raise metadata.refuse(f"{prefix}.{key}", f"only {usual} is supported, not {found}")
    return yarn(
        factor,
        original_context_tokens=metadata.value(
            f"{prefix}.original_context_length",
            int,
            default=metadata.value(f"{arch}.context_length", int),
        ),
        rope_theta=theta,
        head_size=head_size,
        beta_fast=metadata.value(f"{prefix}.yarn_beta_fast", float, default=32.0),
        beta_slow=metadata.value(f"{prefix}.yarn_beta_slow", float, default=1.0),
    )
