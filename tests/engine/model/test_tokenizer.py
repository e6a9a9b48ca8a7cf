import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from tidegate_engine.model.chat_template import ChatTemplateError
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.loader import LoadedModel
from tidegate_engine.model.tokenizer import Tokenizer
from tidegate_testing.models import VOCABULARY, tiny_tokenizer

TINY = tiny_tokenizer()
CHAT = [{"role": "user", "content": "hello"}]


def spelled(text: str) -> list[str]:
    return [VOCABULARY[i] for i in TINY.encode(text)]


def test_merges_make_the_longest_tokens_they_can() -> None:
    assert spelled("hello hell") == ["hello", "Ġ", "hell"]
    assert spelled(" hello") == ["Ġhello"]


def test_every_digit_is_a_token() -> None:
    assert spelled("422") == ["4", "2", "2"]


def test_names_of_special_tokens_become_those_tokens() -> None:
    assert spelled("<|im_start|>hello<|im_end|>") == ["<|im_start|>", "hello", "<|im_end|>"]


def test_special_tokens_have_no_text() -> None:
    assert TINY.decode(TINY.encode("<|im_start|>hello<|im_end|>")) == "hello"


@given(st.text())
def test_text_survives_a_round_trip(text: str) -> None:
    if "<|" not in text:
        assert TINY.decode(TINY.encode(text)) == text


@given(st.lists(st.integers(0, len(VOCABULARY) + 3)))
def test_pieces_add_up_to_the_text_of_all_tokens(token_ids: list[int]) -> None:
    detokenizer = TINY.detokenizer()
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    assert "".join(pieces) + detokenizer.finish() == TINY.decode(token_ids)


def test_a_character_comes_out_with_its_last_byte() -> None:
    token_ids = TINY.encode("a€🙂")
    assert len(token_ids) == 1 + 3 + 4
    detokenizer = TINY.detokenizer()
    assert [detokenizer.push(i) for i in token_ids] == ["a", "", "", "€", "", "", "", "🙂"]
    assert detokenizer.finish() == ""


def test_a_stream_that_ends_inside_a_character_says_so() -> None:
    detokenizer = TINY.detokenizer()
    assert detokenizer.push(TINY.encode("€")[0]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_a_chat_becomes_a_prompt_for_the_assistant() -> None:
    text = TINY.render_chat([*CHAT, {"role": "assistant", "content": "hi"}])
    assert text == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert TINY.apply_chat_template(CHAT) == TINY.encode(TINY.render_chat(CHAT))


def test_what_a_template_refuses_is_an_error_with_its_words() -> None:
    with pytest.raises(ChatTemplateError, match="no fools"):
        TINY.render_chat([{"role": "fool", "content": ""}])


def test_a_model_without_a_template_cannot_chat() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tiny_tokenizer(chat_template=None).apply_chat_template(CHAT)


def test_a_template_cannot_reach_python() -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ChatTemplateError):
        tiny_tokenizer(chat_template=escape).render_chat(CHAT)


def test_a_saved_tokenizer_is_the_same_when_loaded(tmp_path: Path) -> None:
    TINY.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode("hello 42 €<|im_end|>") == TINY.encode("hello 42 €<|im_end|>")
    assert loaded.render_chat(CHAT) == TINY.render_chat(CHAT)
    assert loaded.eos_token_ids == TINY.eos_token_ids
    assert loaded.vocab_size == len(VOCABULARY)


def test_ids_that_stand_for_nothing_count_where_larger_ones_do() -> None:
    sparse = Backend(models.BPE({"a": 0, "b": 7}, []))
    tokenizer = Tokenizer(sparse, chat_template=None, eos_token_ids=frozenset())
    assert tokenizer.vocab_size == 8
    assert tokenizer.decode([0, 3, 7]) == "ab"


PIECES = ("<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "<0xZZ>")
PREPENDED = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)


@pytest.mark.parametrize("decoder", [PREPENDED, decoders.Metaspace()], ids=["steps", "metaspace"])
def test_sentencepiece_tokens_are_spelled_with_blanks(decoder: decoders.Decoder) -> None:
    ids = {piece: i for i, piece in enumerate(PIECES)}
    backend = Backend(models.BPE(ids, [("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoder
    tokenizer = Tokenizer(backend, chat_template=None, eos_token_ids=frozenset())
    # A token may follow others: its blank stays.
    assert tokenizer.decode([ids["▁a"], ids["▁a"], ids["<0xZZ>"]]) == " a a<0xZZ>"
    assert tokenizer.encode("a a") == [ids["a"], ids["▁a"]]


def test_bytes_that_no_piece_covers_are_put_together() -> None:
    ids = {piece: i for i, piece in enumerate(PIECES)}
    backend = Backend(models.BPE(ids, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = PREPENDED
    tokenizer = Tokenizer(backend, chat_template=None, eos_token_ids=frozenset())
    token_ids = tokenizer.encode("a€")
    assert [PIECES[i] for i in token_ids] == ["a", "<0xE2>", "<0x82>", "<0xAC>"]
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(i) for i in token_ids] == ["a", "", "", "€"]


@pytest.mark.parametrize("name", ["tokenizer.json", "chat.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    TINY.save(tmp_path)
    (tmp_path / name).write_text(json.dumps({"half": "a file"}))
    with pytest.raises(ModelLoadError, match=name):
        Tokenizer.load(tmp_path)


@pytest.mark.model
def test_smollm2_tokenizes_as_published(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == frozenset({2})
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert tokenizer.encode("Hello, world!") == [19556, 28, 905, 17]
    assert [tokenizer.decode([i]) for i in tokenizer.encode("in 2026")] == [
        "in", " ", "2", "0", "2", "6",
    ]  # fmt: skip


@pytest.mark.model
def test_smollm2_chats_in_its_own_words(smollm2: LoadedModel) -> None:
    assert smollm2.tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.model
@pytest.mark.parametrize("text", ["naïve café", "你好世界", "👩‍👩‍👧 и мир", "tab\there\n\n  two"])
def test_smollm2_round_trips_unicode_in_a_stream(smollm2: LoadedModel, text: str) -> None:
    detokenizer = smollm2.tokenizer.detokenizer()
    pieces = [detokenizer.push(i) for i in smollm2.tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
