"""Tokenizers from the metadata of GGUF files."""

from collections.abc import Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from tokenizers import Tokenizer as Backend

from tidegate_engine.model.chat_template import ChatTemplateError
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.gguf_metadata import GgufMetadata
from tidegate_engine.model.spelling import UnsupportedTokenizerError
from tidegate_engine.model.tokenizer import Tokenizer, add_around_prompts

_PREFIX = "tokenizer.ggml"
_BLANK = "\u2581"
# Token types; those of bytes, 6, need nothing of their own.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
# Llama 3 and Qwen 2 differ only in how many digits stay together. Both as published in their
# tokenizer.json.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SCHEMES = {
    "llama-bpe": "llama3",
    "llama-v3": "llama3",
    "llama3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "smollm": "smollm",
    "gpt-2": "gpt2",
}


def read_tokenizer(metadata: GgufMetadata) -> Tokenizer:
    """Build the tokenizer from the vocabulary, merges or scores, and chat template.

    Raises:
        ModelLoadError: It is broken, or of a kind that isn't implemented.
    """
    kind = metadata.value(f"{_PREFIX}.model", str)
    tokens = metadata.values(f"{_PREFIX}.tokens", str)
    types = _token_types(metadata, len(tokens))
    # Rows of the embedding table that stand for nothing have made-up names.
    ids = {t: i for i, t in enumerate(tokens) if types[i] != _UNUSED}
    if kind == "gpt2":
        backend, adds_bos = _byte_level(metadata, ids)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(metadata, ids, types), True
    else:
        problem = f"{kind!r} isn't supported, only gpt2 (byte-level BPE) and llama (SentencePiece)"
        raise metadata.refuse(f"{_PREFIX}.model", problem)
    backend.add_special_tokens(_added(tokens, types, (_CONTROL, _UNKNOWN), special=True))
    backend.add_tokens(_added(tokens, types, (_USER_DEFINED,), special=False))
    ends = [_token_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom")]
    bos = _token_id(metadata, "bos", len(tokens))
    bos_token, eos_token = ("" if i is None else tokens[i] for i in (bos, ends[0]))
    adds_bos = metadata.value(f"{_PREFIX}.add_bos_token", bool, default=adds_bos)
    adds_eos = metadata.value(f"{_PREFIX}.add_eos_token", bool, default=False)
    try:
        add_around_prompts(backend, bos_token if adds_bos else "", eos_token if adds_eos else "")
        return Tokenizer(
            backend,
            chat_template=metadata.optional("tokenizer.chat_template", str),
            eos_token_ids=frozenset(i for i in ends if i is not None),
            bos_token=bos_token,
            eos_token=eos_token,
        )
    except UnsupportedTokenizerError as error:
        raise ModelLoadError(metadata.path, f"{error}") from error
    except ChatTemplateError as error:
        raise metadata.refuse("tokenizer.chat_template", f"{error}") from error


def _byte_level(metadata: GgufMetadata, ids: dict[str, int]) -> tuple[Backend, bool]:
    """Return byte-level BPE, and whether prompts begin with a token unless the file says else."""
    name = metadata.value(f"{_PREFIX}.pre", str)
    scheme = _SCHEMES.get(name)
    if scheme is None:
        known = ", ".join(_SCHEMES)
        raise metadata.refuse(f"{_PREFIX}.pre", f"{name!r} isn't supported, only {known}")
    merges = [_pair(metadata, merge) for merge in metadata.values(f"{_PREFIX}.merges", str)]
    # Llama 3 takes a word that is a token as it is, though no merges lead to it.
    backend = _bpe(metadata, ids, merges, ignore_merges=scheme == "llama3")
    backend.pre_tokenizer = _pre_tokenizer(scheme)
    if scheme == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, scheme == "llama3"


def _pre_tokenizer(scheme: str) -> pre_tokenizers.PreTokenizer:
    if scheme == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if scheme == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    words = Regex(_WORDS.format(digits="{1,3}" if scheme == "llama3" else ""))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(metadata: GgufMetadata, ids: dict[str, int], types: Sequence[int]) -> Backend:
    """BPE over whole texts with blanks made visible, as SentencePiece does it."""
    scores = metadata.values(f"{_PREFIX}.scores", float)
    if len(scores) != len(types):
        problem = f"has {len(scores)} values, the vocabulary {len(types)} tokens"
        raise metadata.refuse(f"{_PREFIX}.scores", problem)
    unknown = next((token for token, i in ids.items() if types[i] == _UNKNOWN), None)
    words = {token: i for token, i in ids.items() if types[i] == _NORMAL}
    merges = _merges_of_scores(words, scores)
    backend = _bpe(metadata, ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _BLANK)]
    if metadata.value(f"{_PREFIX}.add_space_prefix", bool, default=True):
        steps.insert(0, normalizers.Prepend(_BLANK))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _merges_of_scores(ids: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's rule amounts to: join what makes the best-scored token."""
    merges = [
        (-scores[i], i, ids[left], ids[right], left, right)
        for token, i in ids.items()
        for cut in range(1, len(token))
        if (left := token[:cut]) in ids and (right := token[cut:]) in ids
    ]
    return [(left, right) for *_, left, right in sorted(merges)]


def _bpe(
    metadata: GgufMetadata, ids: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> Backend:
    try:
        return Backend(models.BPE(ids, merges, **options))
    except Exception as error:  # tokenizers raises no narrower type
        raise metadata.refuse(f"{_PREFIX}.merges", f"{error}") from error


def _pair(metadata: GgufMetadata, merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not separator:
        raise metadata.refuse(f"{_PREFIX}.merges", f"{merge!r} isn't a pair")
    return left, right


def _added(
    tokens: Sequence[str], types: Sequence[int], kinds: tuple[int, ...], *, special: bool
) -> list[AddedToken]:
    return [
        AddedToken(token, special=special, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in kinds
    ]


def _token_types(metadata: GgufMetadata, num_tokens: int) -> list[int]:
    types = metadata.values(f"{_PREFIX}.token_type", int)
    if len(types) != num_tokens:
        problem = f"has {len(types)} values, the vocabulary {num_tokens} tokens"
        raise metadata.refuse(f"{_PREFIX}.token_type", problem)
    return types


def _token_id(metadata: GgufMetadata, name: str, num_tokens: int) -> int | None:
    key = f"{_PREFIX}.{name}_token_id"
    found = metadata.optional(key, int)
    if found is not None and not 0 <= found < num_tokens:
        raise metadata.refuse(key, f"{found} isn't below the vocabulary's {num_tokens}")
    return found
