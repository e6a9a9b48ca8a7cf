"""The bytes that a token stands for."""

import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer as Backend

# SentencePiece writes it for a blank.
_BLANK = "\u2581"
# And this for a byte of a character that no token covers.
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class UnsupportedTokenizerError(ValueError):
    """The tokenizer is of a kind whose tokens can't be turned into bytes one by one."""


def spelling_of(backend: Backend) -> Callable[[str], bytes]:
    """Choose by the backend's decoder how its tokens are spelled.

    Raises:
        UnsupportedTokenizerError: By neither of the known ways.
    """
    steps = _decoder_steps(backend)
    kinds = {step["type"] for step in steps}
    if not steps or kinds == {"ByteLevel"}:
        alphabet = {char: byte for byte, char in enumerate(_byte_alphabet())}
        return lambda token: _spell_byte_level(token, alphabet)
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and any(
        step.get("replacement") == _BLANK or step.get("pattern") == {"String": _BLANK}
        for step in steps
    ):
        has_bytes = "ByteFallback" in kinds
        return lambda token: _spell_piece(token, has_bytes=has_bytes)
    found = ", ".join(sorted(kinds))
    raise UnsupportedTokenizerError(
        f"tokens decoded by {found} aren't supported, only byte-level ones and SentencePiece's"
    )


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    # The one way to ask a decoder what it does that doesn't write out the whole vocabulary.
    decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return steps


def _byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each byte.

    Printable Latin-1 stands for itself; the others are moved, in order, to 256 and above, so that
    no token holds a blank or a control character.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    moved = {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [moved.get(byte, chr(byte)) for byte in range(256)]


def _spell_byte_level(token: str, alphabet: dict[str, int]) -> bytes:
    # Tokens added to the vocabulary may be plain text instead.
    if all(char in alphabet for char in token):
        return bytes(alphabet[char] for char in token)
    return token.encode()


def _spell_piece(token: str, *, has_bytes: bool) -> bytes:
    if has_bytes and (byte := _BYTE_TOKEN.fullmatch(token)):
        return bytes.fromhex(byte[1])
    return token.replace(_BLANK, " ").encode()
