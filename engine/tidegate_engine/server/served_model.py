"""What the API needs to know about the model, whichever executor runs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tidegate_engine.server.encoding import Encoders


class Detokenizer(Protocol):
    """Turns one stream of tokens into pieces of text."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes."""
        ...

    def finish(self) -> str:
        """Return what was held back."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        ...

    @property
    def max_token_chars(self) -> float:
        """Characters of the longest token; infinite where tokens don't spell the text itself."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, maybe a part of a character; of special ones none."""
        ...

    def token_name(self, token_id: int) -> str:
        """Return what a token without bytes is called."""
        ...

    def detokenizer(self) -> Detokenizer:
        """Start decoding one stream of tokens."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the prompt that asks for the assistant's next message.

        Raises:
            ValueError: These messages can't be turned into a prompt.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The one model of an engine.

    Attributes:
        name: As clients name it in `model`.
        max_context_tokens: Prompt and output together.
        created: Seconds since the epoch; of the process' start.
        encoders: Where its tokenizer works on long texts.
    """

    name: str
    tokenizer: Tokenizer
    max_context_tokens: int
    created: int
    encoders: Encoders = field(default_factory=Encoders)
