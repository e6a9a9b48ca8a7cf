from hypothesis import given
from hypothesis import strategies as st

from tidegate_engine.model.bytes_tokenizer import END_TOKEN_ID, NUM_PRINTABLE, BytesTokenizer


@given(st.text())
def test_what_is_encoded_comes_back(text: str) -> None:
    tokenizer = BytesTokenizer()
    ids = tokenizer.encode(text)
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(i) for i in ids]
    assert tokenizer.decode(ids) == "".join(pieces) + detokenizer.finish() == text


def test_low_ids_are_printable_and_the_end_has_no_text() -> None:
    tokenizer = BytesTokenizer()
    assert all(tokenizer.decode([i]).isprintable() for i in range(NUM_PRINTABLE))
    assert tokenizer.decode([END_TOKEN_ID]) == tokenizer.detokenizer().push(END_TOKEN_ID) == ""


def test_a_stream_that_ends_inside_a_character_says_so() -> None:
    tokenizer = BytesTokenizer()
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(tokenizer.encode("é")[0]) == ""
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"


def test_a_chat_ends_with_the_assistants_turn() -> None:
    tokenizer = BytesTokenizer()
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(prompt) == "user: hi\nassistant: "
