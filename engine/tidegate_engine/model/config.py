"""The shape of a Llama-family model, as a value."""

from dataclasses import dataclass

from tidegate_engine.model.rope_scaling import RopeScaling


class ModelConfigError(ValueError):
    """The sizes don't fit together.

    Attributes:
        field: Name of the field of `LlamaConfig`.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes and constants of a decoder of the Llama family.

    Attributes:
        num_heads: Query heads (H in shapes).
        num_kv_heads: Key and value heads (K in shapes); divides `num_heads`.
        head_size: Elements of one head (D in shapes); even, since RoPE turns pairs.
        intermediate_size: Width of the feed-forward part.
        max_context_tokens: Positions that the model was trained for.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: None leaves them as they are.
        has_tied_embeddings: The output projection is the embedding table.
        has_qkv_bias: Query, key and value projections add a bias.
        has_qk_norm: Every query and key head is normalised before it is rotated.

    Raises:
        ModelConfigError: The sizes don't fit together.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    max_context_tokens: int
    rope_theta: float
    rms_norm_epsilon: float
    has_tied_embeddings: bool
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        for field in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_size",
            "intermediate_size",
            "vocab_size",
            "max_context_tokens",
            "rope_theta",
            "rms_norm_epsilon",
        ):
            value = getattr(self, field)
            if not value > 0:
                raise ModelConfigError(field, f"must be above 0, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(
                "num_kv_heads", f"must divide num_heads {self.num_heads}, got {self.num_kv_heads}"
            )
        if self.head_size % 2:
            raise ModelConfigError("head_size", f"must be even, got {self.head_size}")
        scaling = self.rope_scaling
        if scaling is not None and len(scaling.divisors) != self.head_size // 2:
            raise ModelConfigError(
                "rope_scaling",
                f"must have {self.head_size // 2} divisors, half of head_size,"
                f" got {len(scaling.divisors)}",
            )

    @property
    def query_size(self) -> int:
        """Elements of all query heads of a token, H*D."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Elements of all key heads of a token, K*D; the values have as many."""
        return self.num_kv_heads * self.head_size
