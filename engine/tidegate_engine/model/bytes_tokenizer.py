"""A tokenizer without a vocabulary: every byte is a token. For simulated engines."""

import codecs
from collections.abc import Mapping, Sequence

_FIRST_PRINTABLE = 0x20
_NUM_BYTES = 256
END_TOKEN_ID = _NUM_BYTES
"""Ends an answer; has no text."""

NUM_PRINTABLE = 0x7F - _FIRST_PRINTABLE
"""Ids below this are printable ASCII: what draws from them makes text that people can read."""


class BytesTokenizer:
    """UTF-8 bytes, turned so that the printable ones come first: a blank is 0, `~` is 94."""

    eos_token_ids = frozenset({END_TOKEN_ID})
    vocab_size = _NUM_BYTES + 1
    max_token_chars = 1.0

    def encode(self, text: str) -> list[int]:
        """Return the ids of the bytes of `text`."""
        return [(byte - _FIRST_PRINTABLE) % _NUM_BYTES for byte in text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`; bytes that aren't UTF-8 become U+FFFD."""
        return b"".join(map(_spell, token_ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the byte of one token; of the end none."""
        return _spell(token_id)

    def token_name(self, token_id: int) -> str:  # noqa: ARG002 (there is one)
        """Return what the end is called."""
        return "<|end|>"

    def detokenizer(self) -> "BytesDetokenizer":
        """Start decoding one stream of tokens."""
        return BytesDetokenizer()

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the messages as lines of `role: content`, then what asks for the next one."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant: ")


class BytesDetokenizer:
    """Turns a stream of bytes into pieces of text that are valid on their own."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the text that this byte completes; empty while a character lacks bytes."""
        return self._decoder.decode(_spell(token_id))

    def finish(self) -> str:
        """Return what is held back, as U+FFFD: the stream ended inside a character."""
        return self._decoder.decode(b"", final=True)


def _spell(token_id: int) -> bytes:
    if token_id == END_TOKEN_ID:
        return b""
    return bytes(((token_id + _FIRST_PRINTABLE) % _NUM_BYTES,))
