"""Text to token ids and back, and chats to prompts."""

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

from tidegate_engine.model.errors import ModelLoadError

_BACKEND_FILE = "tokenizer.json"
_CHAT_FILE = "chat.json"


class ChatTemplateError(ValueError):
    """The messages can't be turned into a prompt: the model has no template, or it refuses them."""


class Tokenizer:
    """A byte-level BPE tokenizer and the model's chat template.

    Attributes:
        eos_token_ids: Tokens that end an answer.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        chat_template: str | None,
        eos_token_ids: frozenset[int],
        bos_token: str = "",
        eos_token: str = "",
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self._backend = backend
        self._chat_template = chat_template
        self._bos_token = bos_token
        self._eos_token = eos_token

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id, special ones included."""
        return len(self._spellings)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; the names of special tokens in it become those tokens."""
        return self._backend.encode(text).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, special tokens left out.

        Bytes that aren't UTF-8 become U+FFFD.
        """
        return b"".join(map(self._spell, token_ids)).decode("utf-8", "replace")

    def detokenizer(self) -> "Detokenizer":
        """Start decoding one stream of tokens."""
        return Detokenizer(self._spell)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the prompt that asks for the next message of the assistant.

        Raises:
            ChatTemplateError: The model has no template, or it refuses these messages.
        """
        # The template writes the special tokens itself.
        return self._backend.encode(self.render_chat(messages), add_special_tokens=False).ids

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the prompt of `apply_chat_template` as text."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                bos_token=self._bos_token,
                eos_token=self._eos_token,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ChatTemplateError(f"messages: {error}") from error

    def _spell(self, token_id: int) -> bytes:
        # Embedding tables are often padded: such ids have no text.
        return self._spellings[token_id] if token_id < len(self._spellings) else b""

    @cached_property
    def _spellings(self) -> tuple[bytes, ...]:
        """The bytes of every token by id; of special ones none."""
        added = self._backend.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special}
        byte_of = {char: byte for byte, char in enumerate(_byte_alphabet())}
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        spellings = [b""] * (max(vocabulary.values()) + 1)
        for token, i in vocabulary.items():
            if i not in special:
                spellings[i] = _to_bytes(token, byte_of)
        return tuple(spellings)

    @cached_property
    def _template(self) -> jinja2.Template:
        if self._chat_template is None:
            raise ChatTemplateError("messages: this model has no chat template")
        # Templates come with the model: they may compute, but not reach Python's objects.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        return environment.from_string(self._chat_template)

    def save(self, directory: Path) -> None:
        """Write the tokenizer as files that `load` reads."""
        self._backend.save(str(directory / _BACKEND_FILE), pretty=False)
        chat = {
            "chat_template": self._chat_template,
            "eos_token_ids": sorted(self.eos_token_ids),
            "bos_token": self._bos_token,
            "eos_token": self._eos_token,
        }
        (directory / _CHAT_FILE).write_text(json.dumps(chat, indent=1))

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read what `save` wrote.

        Raises:
            ModelLoadError: A file is missing or isn't a tokenizer's.
        """
        path = directory / _CHAT_FILE
        try:
            chat = json.loads(path.read_text())
            chat["eos_token_ids"] = frozenset(chat["eos_token_ids"])
            return cls(load_backend(directory / _BACKEND_FILE), **chat)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelLoadError(path, f"can't be read: {error}") from error


class Detokenizer:
    """Turns a stream of tokens into pieces of text that are valid on their own.

    The pieces together, `finish` included, are what `Tokenizer.decode` makes of all tokens.
    """

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        self._spell = spell
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character lacks bytes."""
        return self._decoder.decode(self._spell(token_id))

    def finish(self) -> str:
        """Return what is held back, as U+FFFD: the stream ended inside a character."""
        return self._decoder.decode(b"", final=True)


def load_backend(path: Path) -> Backend:
    """Read a `tokenizer.json`.

    Raises:
        ModelLoadError: It is missing, or no tokenizer.
    """
    if not path.is_file():
        raise ModelLoadError(path, "is missing")
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises no narrower type
        raise ModelLoadError(path, f"can't be read as a tokenizer: {error}") from error


def _byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each byte.

    Printable Latin-1 stands for itself; the others are moved, in order, to 256 and above, so that
    no token holds a blank or a control character.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    moved = {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [moved.get(byte, chr(byte)) for byte in range(256)]


def _to_bytes(token: str, byte_of: Mapping[str, int]) -> bytes:
    # Tokens added to the vocabulary may be plain text instead.
    if all(char in byte_of for char in token):
        return bytes(byte_of[char] for char in token)
    return token.encode()


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
