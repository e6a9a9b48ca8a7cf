import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFWriter
from tokenizers import pre_tokenizers

from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.gguf_metadata import GgufMetadata
from tidegate_engine.model.gguf_tokenizer import read_tokenizer
from tidegate_engine.model.tokenizer import Tokenizer
from tidegate_testing.model_files import finish, write_tiny_tokenizer
from tidegate_testing.models import SPECIAL_TOKENS, tiny_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
CHAT = [{"role": "user", "content": "hello"}]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def metadata(tmp_path: Path, *steps: Callable[[GGUFWriter], None]) -> GgufMetadata:
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    for step in steps:
        step(writer)
    finish(writer)
    return GgufMetadata(path, GGUFReader(path))


def byte_level(
    pre_tokenizer: str, *merges: str, more: Sequence[tuple[str, int]] = ()
) -> Callable[[GGUFWriter], None]:
    """A vocabulary of all bytes, `ab`, what the merges make, and more tokens with their types.

    Token 0 begins, 1 ends.
    """
    merges = ("a b", *merges)
    words = [*ALPHABET, *(merge.replace(" ", "") for merge in merges)]

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_tokenizer)
        writer.add_token_list(["<s>", "</s>", *words, *(token for token, _ in more)])
        types = [CONTROL, CONTROL, *[NORMAL] * len(words), *(kind for _, kind in more)]
        writer.add_token_types(types)
        writer.add_token_merges([*merges])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)

    return write


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([i]) for i in tokenizer.encode(text)]


def joined(text: str) -> list[str]:
    """Merges that make one token of `text`, and of all that it begins with, letter by letter."""
    spelled = text.replace(" ", "Ġ").replace("\n", "Ċ")
    return [f"{spelled[:i]} {spelled[i]}" for i in range(1, len(spelled))]


def test_smollm_cuts_every_digit_off(tmp_path: Path) -> None:
    source = metadata(tmp_path, byte_level("smollm", *joined("123"), *joined(" a")))
    assert pieces(read_tokenizer(source), "123 a") == ["1", "2", "3", " a"]


def test_gpt_2_keeps_digits_together(tmp_path: Path) -> None:
    source = metadata(tmp_path, byte_level("gpt-2", *joined("1234")))
    assert pieces(read_tokenizer(source), "1234") == ["1234"]


@pytest.mark.parametrize("name", ["llama-bpe", "llama3", "llama-v3"])
def test_llama_3_keeps_up_to_three_digits_together(name: str, tmp_path: Path) -> None:
    source = metadata(tmp_path, byte_level(name, *joined("1234"), *joined("56")))
    tokenizer = read_tokenizer(source)
    assert pieces(tokenizer, "1234") == ["", "123", "4"]
    assert pieces(tokenizer, "12356") == ["", "123", "56"]


@pytest.mark.parametrize("name", ["qwen2", "deepseek-r1-qwen"])
def test_qwen_cuts_every_digit_off_and_composes_characters(name: str, tmp_path: Path) -> None:
    source = metadata(tmp_path, byte_level(name, *joined("12"), "Ã ©"))
    tokenizer = read_tokenizer(source)
    assert pieces(tokenizer, "12") == ["1", "2"]
    assert pieces(tokenizer, "e\u0301") == ["\u00e9"]


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I'LL go", ["I", "'LL", " go"]),
        ("one  two", ["one", " ", " two"]),
        ("x!\n\ny", ["x", "!\n\n", "y"]),
        ("a \n b", ["a", " \n", " b"]),
        ("(word", ["(word"]),
        ("tail  ", ["tail", "  "]),
    ],
)
def test_llama_3_and_qwen_cut_words_alike(
    name: str, text: str, expected: list[str], tmp_path: Path
) -> None:
    # All that could be joined is, also over the cuts.
    merges = dict.fromkeys(merge for part in [text, *expected] for merge in joined(part))
    tokenizer = read_tokenizer(metadata(tmp_path, byte_level(name, *merges)))
    assert [piece for piece in pieces(tokenizer, text) if piece] == expected


def test_llama_3_takes_a_word_that_is_a_token_though_no_merge_makes_it(tmp_path: Path) -> None:
    source = metadata(tmp_path, byte_level("llama-bpe", more=[("word", NORMAL)]))
    assert pieces(read_tokenizer(source), "word") == ["", "word"]
    other = metadata(tmp_path, byte_level("qwen2", more=[("word", NORMAL)]))
    assert pieces(read_tokenizer(other), "word") == ["w", "o", "r", "d"]


@pytest.mark.parametrize(
    ("name", "stated", "num_tokens"),
    [
        ("llama-bpe", {}, 2),
        ("llama-bpe", {"add_bos_token": False}, 1),
        ("qwen2", {}, 1),
        ("smollm", {"add_bos_token": True}, 2),
        ("smollm", {"add_eos_token": True}, 2),
    ],
)
def test_prompts_get_a_token_around_them_where_the_file_or_its_scheme_says_so(
    name: str, stated: dict[str, bool], num_tokens: int, tmp_path: Path
) -> None:
    def add(writer: GGUFWriter) -> None:
        for key, value in stated.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)

    tokenizer = read_tokenizer(metadata(tmp_path, byte_level(name), add))
    assert len(tokenizer.encode("x")) == num_tokens


def test_a_chat_template_writes_its_own_first_token(tmp_path: Path) -> None:
    source = metadata(tmp_path, lambda writer: write_tiny_tokenizer(writer, adds_bos=True))
    tokenizer = read_tokenizer(source)
    assert tokenizer.encode("hello")[0] == SPECIAL_TOKENS.index("<|im_start|>")
    assert tokenizer.apply_chat_template(CHAT) == tiny_tokenizer().apply_chat_template(CHAT)


def test_every_kind_of_end_ends_an_answer(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_eot_token_id(5)
        writer.add_eom_token_id(6)

    tokenizer = read_tokenizer(metadata(tmp_path, byte_level("smollm"), add))
    assert tokenizer.eos_token_ids == {1, 5, 6}


def test_tokens_that_a_user_added_are_text_and_unused_ones_are_nothing(tmp_path: Path) -> None:
    more = [("<think>", USER_DEFINED), ("[PAD1]", UNUSED)]
    tokenizer = read_tokenizer(metadata(tmp_path, byte_level("qwen2", more=more)))
    thinking = tokenizer.encode("<think>x")[0]
    assert tokenizer.decode([thinking, 1, thinking + 1]) == "<think>"
    assert len(tokenizer.encode("[PAD1]")) == 6


SENTENCE_TOKENS: Sequence[tuple[str, float, int]] = (
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
    ("▁h", -1.0, NORMAL),
    ("el", -2.0, NORMAL),
    ("lo", -3.0, NORMAL),
    ("▁hel", -4.0, NORMAL),
    ("▁hello", -5.0, NORMAL),
    *((letter, -9.0 - i, NORMAL) for i, letter in enumerate("▁hello"[:4] + "o")),
)


def sentencepiece(writer: GGUFWriter) -> None:
    tokens, scores, types = zip(*SENTENCE_TOKENS, strict=True)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*tokens])
    writer.add_token_scores([*scores])
    writer.add_token_types([*types])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def spelled(tokenizer: Tokenizer, text: str) -> list[str]:
    return [SENTENCE_TOKENS[i][0] for i in tokenizer.encode(text)]


def test_sentencepiece_joins_what_scores_best(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(metadata(tmp_path, sentencepiece))
    assert spelled(tokenizer, "hello") == ["<s>", "▁hello"]
    assert spelled(tokenizer, "lohell") == ["<s>", "▁", "lo", "h", "el", "l"]


def test_sentencepiece_writes_what_it_has_no_token_for_in_bytes(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(metadata(tmp_path, sentencepiece))
    assert spelled(tokenizer, "€") == ["<s>", "▁", "<0xE2>", "<0x82>", "<0xAC>"]
    assert tokenizer.decode(tokenizer.encode("hello €\nhello")) == " hello €\nhello"
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(i) for i in tokenizer.encode("€")] == ["", " ", "", "", "€"]


def test_sentencepiece_puts_no_blank_first_where_the_file_says_so(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_add_space_prefix(value=False)

    source = metadata(tmp_path, sentencepiece, add)
    assert spelled(read_tokenizer(source), "hello") == ["<s>", "h", "el", "lo"]


def bad_kind(writer: GGUFWriter) -> None:
    byte_level("smollm")(writer)
    writer.kv_data[0]["tokenizer.ggml.model"].value = "t5"


def bad_scheme(writer: GGUFWriter) -> None:
    byte_level("klingon")(writer)


def bad_types(writer: GGUFWriter) -> None:
    byte_level("smollm")(writer)
    writer.kv_data[0]["tokenizer.ggml.token_type"].value = [1, 1]


def bad_scores(writer: GGUFWriter) -> None:
    sentencepiece(writer)
    writer.kv_data[0]["tokenizer.ggml.scores"].value = [1.0]


def bad_merge(writer: GGUFWriter) -> None:
    byte_level("smollm", "ab")(writer)


def unknown_merge(writer: GGUFWriter) -> None:
    byte_level("smollm")(writer)
    writer.kv_data[0]["tokenizer.ggml.merges"].value = ["a nowhere"]


def bad_end(writer: GGUFWriter) -> None:
    byte_level("smollm")(writer)
    writer.add_eot_token_id(9999)


def bad_template(writer: GGUFWriter) -> None:
    byte_level("smollm")(writer)
    writer.add_chat_template("{% for %}")


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (bad_kind, "metadata tokenizer.ggml.model: 't5' isn't supported"),
        (bad_scheme, "metadata tokenizer.ggml.pre: 'klingon' isn't supported"),
        (bad_types, "metadata tokenizer.ggml.token_type: has 2 values, the vocabulary"),
        (bad_scores, "metadata tokenizer.ggml.scores: has 1 values, the vocabulary"),
        (bad_merge, "metadata tokenizer.ggml.merges: 'ab' isn't a pair"),
        (unknown_merge, "metadata tokenizer.ggml.merges: "),
        (bad_end, "metadata tokenizer.ggml.eot_token_id: 9999 isn't below"),
        (bad_template, "metadata tokenizer.chat_template: the chat template isn't valid"),
        (lambda _: None, "metadata tokenizer.ggml.model is missing"),
    ],
)
def test_what_cannot_be_used_is_named_by_its_key(
    write: Callable[[GGUFWriter], None], problem: str, tmp_path: Path
) -> None:
    source = metadata(tmp_path, write)
    with pytest.raises(ModelLoadError) as caught:
        read_tokenizer(source)
    assert f"{caught.value}".startswith(f"{source.path}: {problem}")


@pytest.mark.reference
def test_qwen_cuts_texts_as_the_reference_does(tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    texts = [
        "Hello, world! It's 2026; we'LL see 1,234.5 €",
        "def f(x):\n\treturn x ** 2  # square\n\n\n",
        "naïve cafe\u0301 你好世界 שלום мир",
        "  leading, trailing  \r\n mixed\t tabs ",
        "<|endoftext|>a<|endoftext|>",
        "👩‍👩‍👧 emoji ¼ ² ₃ Ⅷ",
    ]
    merges = [*dict.fromkeys(merge for text in texts for merge in joined_bytes(text))]
    source = metadata(tmp_path, byte_level("qwen2", *merges, more=[("<|endoftext|>", CONTROL)]))
    ours = read_tokenizer(source)
    tokens = source.values("tokenizer.ggml.tokens", str)
    # Its annotation says text, its code takes pairs.
    pairs: Any = [tuple(m.split(" ")) for m in source.values("tokenizer.ggml.merges", str)]
    theirs = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs)
    for text in texts:
        assert ours.encode(text) == theirs.encode(text)


def joined_bytes(text: str) -> list[str]:
    """Merges of all neighbours in `text`, and then of pairs of pairs."""
    ((spelled, _),) = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    ).pre_tokenize_str(text)
    pairs = [f"{a} {b}" for a, b in itertools.pairwise(spelled)]
    longer = [
        f"{spelled[i : i + 2]} {spelled[i + 2 : i + 4]}" for i in range(0, len(spelled) - 3, 2)
    ]
    return pairs + longer
