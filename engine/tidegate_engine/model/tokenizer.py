"""Text to token ids and back, and chats to prompts."""

import codecs
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from tidegate_engine.model.chat_template import ChatTemplate, ChatTemplateError
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.spelling import UnsupportedTokenizerError, spelling_of

_BACKEND_FILE = "tokenizer.json"
_CHAT_FILE = "chat.json"


class Tokenizer:
    """A BPE tokenizer, byte-level or as SentencePiece makes it, and the model's chat template.

    Attributes:
        eos_token_ids: Tokens that end an answer.

    Raises:
        UnsupportedTokenizerError: The backend is of another kind.
        ChatTemplateError: The template isn't valid.
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
        self._spell_token = spelling_of(backend)
        self._chat = {
            "chat_template": chat_template,
            "eos_token_ids": sorted(eos_token_ids),
            "bos_token": bos_token,
            "eos_token": eos_token,
        }
        self._template = (
            None
            if chat_template is None
            else ChatTemplate(chat_template, bos_token=bos_token, eos_token=eos_token)
        )

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id, special ones included."""
        return len(self._spellings)

    @cached_property
    def max_token_chars(self) -> float:
        """Characters of the longest token; infinite where the text is changed before it is cut."""
        if self._backend.normalizer is not None:
            return math.inf
        names = (token.content for token in self._backend.get_added_tokens_decoder().values())
        # A token of byte-level BPE may begin inside a character and has no more than its bytes.
        return max(map(len, (*self._spellings, *names)))

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; the names of special tokens in it become those tokens."""
        return self._backend.encode(text).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, special tokens left out.

        Bytes that aren't UTF-8 become U+FFFD. A blank that the model's tokenizer puts before a text
        stays: the tokens may continue another text.
        """
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def detokenizer(self) -> "Detokenizer":
        """Start decoding one stream of tokens."""
        return Detokenizer(self.token_bytes)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the prompt that asks for the next message of the assistant.

        Raises:
            ChatTemplateError: The model has no template, or it refuses these messages.
        """
        # The template writes the special tokens itself.
        return self._backend.encode(self.render_chat(messages), add_special_tokens=False).ids

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the prompt of `apply_chat_template` as text."""
        if self._template is None:
            raise ChatTemplateError("messages: this model has no chat template")
        return self._template.render(messages)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, maybe a part of a character; of special ones none."""
        # Embedding tables are often padded: such ids have no text.
        return self._spellings[token_id] if token_id < len(self._spellings) else b""

    def token_name(self, token_id: int) -> str:
        """Return what a token without bytes is called; padding of the embedding has no name."""
        return self._backend.id_to_token(token_id) or ""

    @cached_property
    def _spellings(self) -> tuple[bytes, ...]:
        """The bytes of every token by id; of special ones none."""
        added = self._backend.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special}
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        spellings = [b""] * (max(vocabulary.values()) + 1)
        for token, i in vocabulary.items():
            if i not in special:
                spellings[i] = self._spell_token(token)
        return tuple(spellings)

    def save(self, directory: Path) -> None:
        """Write the tokenizer as files that `load` reads."""
        self._backend.save(str(directory / _BACKEND_FILE), pretty=False)
        (directory / _CHAT_FILE).write_text(json.dumps(self._chat, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read what `save` wrote.

        Raises:
            ModelLoadError: A file is missing or isn't a tokenizer's.
        """
        path = directory / _CHAT_FILE
        try:
            chat = json.loads(path.read_text(encoding="utf-8"))
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
        backend = Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises no narrower type
        raise ModelLoadError(path, f"can't be read as a tokenizer: {error}") from error
    # Left over from training in some models; prompts would be cut without a word.
    backend.no_truncation()
    backend.no_padding()
    return backend


def add_around_prompts(backend: Backend, first: str, last: str) -> None:
    """Let prompts begin and end with these special tokens; an empty name adds none.

    Raises:
        UnsupportedTokenizerError: The vocabulary hasn't got such a token.
    """
    names = [name for name in (first, last) if name]
    ids = [backend.token_to_id(name) for name in names]
    for name, token_id in zip(names, ids, strict=True):
        if token_id is None:
            raise UnsupportedTokenizerError(f"{name!r} isn't in the vocabulary")
    backend.post_processor = processors.TemplateProcessing(
        single=[*([first] if first else []), "$A", *([last] if last else [])],
        special_tokens=[*zip(names, ids, strict=True)],
    )
