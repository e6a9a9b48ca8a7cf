import itertools

from hypothesis import given
from hypothesis import strategies as st

from tidegate_engine.core.plan import SampledToken
from tidegate_engine.core.request import FinishReason, TokenOutput
from tidegate_engine.model.bytes_tokenizer import END_TOKEN_ID, BytesTokenizer
from tidegate_engine.server.text import AnswerText, SpelledToken, StopStrings, TextDelta

TOKENIZER = BytesTokenizer()
SHORT = st.text("abc", min_size=1, max_size=4)


def cut(text: str, borders: list[int]) -> list[str]:
    """Cut `text` at the borders that lie in it."""
    at = sorted({0, len(text), *(b for b in borders if b < len(text))})
    return [text[a:b] for a, b in itertools.pairwise(at)]


def until_stop(stops: list[str], pieces: list[str], *, counts_from: int = 0) -> str:
    found = StopStrings(stops)
    shown = ""
    for number, piece in enumerate(pieces):
        text, has_stopped = found.push(piece, may_stop=number >= counts_from)
        shown += text
        if has_stopped:
            return shown
    return shown + found.finish()


def outputs(text: str, *, reason: FinishReason = FinishReason.LENGTH) -> list[TokenOutput]:
    ids = TOKENIZER.encode(text)
    return [
        TokenOutput(
            request_id="r",
            token=SampledToken(token_id=token_id, logprob=-1.0, top_logprobs=((token_id, -1.0),)),
            finish_reason=reason if number == len(ids) else None,
        )
        for number, token_id in enumerate(ids, start=1)
    ]


def an_answer(*stops: str, stop_token_ids: tuple[int, ...] = ()) -> AnswerText:
    return AnswerText(TOKENIZER, stops=stops, stop_token_ids=stop_token_ids)


def push_all(answer: AnswerText, tokens: list[TokenOutput]) -> list[TextDelta]:
    deltas: list[TextDelta] = []
    for token in tokens:
        deltas.append(answer.push(token))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


@given(
    st.text("abc", max_size=12),
    st.lists(SHORT, max_size=3),
    st.lists(st.integers(1, 12), max_size=6),
)
def test_the_text_ends_before_the_stop_string_that_is_complete_first(
    text: str, stops: list[str], borders: list[int]
) -> None:
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    expected = text[: min(ends)[1]] if ends else text
    assert until_stop(stops, cut(text, borders)) == expected


@given(
    st.text("abc", max_size=12),
    st.lists(SHORT, max_size=3),
    st.lists(st.integers(1, 12), max_size=6),
    st.integers(0, 6),
)
def test_stop_strings_that_are_complete_too_early_are_text(
    text: str, stops: list[str], borders: list[int], counts_from: int
) -> None:
    pieces = cut(text, borders)
    early = sum(map(len, pieces[:counts_from]))
    ends = [
        (at + len(stop), at)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > early
    ]
    expected = text[: min(ends)[1]] if ends else text
    # What was shown before stays shown, though a stop string began in it.
    assert until_stop(stops, pieces, counts_from=counts_from) == expected


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["END"])
    assert [stops.push(piece)[0] for piece in ("xE", "N", "x", "EN")] == ["x", "", "ENx", ""]
    assert stops.finish() == "EN"


def test_a_stop_string_across_token_borders_ends_the_answer_before_it() -> None:
    answer = an_answer("llo")
    deltas = push_all(answer, outputs("hello world"))
    assert "".join(delta.text for delta in deltas) == "he"
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert answer.num_tokens == len("hello")


def test_held_back_text_comes_when_the_answer_ends_without_the_stop_string() -> None:
    deltas = push_all(an_answer("llo"), outputs("hell"))
    assert "".join(delta.text for delta in deltas) == "hell"
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_the_token_that_ends_the_answer_counts_and_has_no_text() -> None:
    answer = an_answer(stop_token_ids=(END_TOKEN_ID,))
    end = TokenOutput(
        request_id="r", token=SampledToken(token_id=END_TOKEN_ID), finish_reason=FinishReason.STOP
    )
    deltas = push_all(answer, [*outputs("hi")[:1], end])
    assert [delta.text for delta in deltas] == ["h", ""]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert answer.num_tokens == 2


def test_an_end_without_a_token_releases_what_was_held_back() -> None:
    answer = an_answer("zz")
    assert answer.push(outputs("z.")[0]).text == ""
    end = TokenOutput(request_id="r", token=None, finish_reason=FinishReason.LENGTH)
    delta = answer.push(end)
    assert (delta.text, delta.finish_reason, answer.num_tokens) == ("z", FinishReason.LENGTH, 1)


def test_a_character_of_several_tokens_comes_whole() -> None:
    deltas = push_all(an_answer(), outputs("aé"))
    assert [delta.text for delta in deltas] == ["a", "", "é"]


def test_log_probabilities_come_with_the_text_of_their_tokens() -> None:
    deltas = push_all(an_answer("llo"), outputs("hellx"))
    assert [[one.token.text for one in delta.logprobs] for delta in deltas] == [
        ["h"],
        ["e"],
        [],
        [],
        ["l", "l", "x"],
    ]
    assert [token.offset for delta in deltas for token in delta.logprobs] == [0, 1, 2, 3, 4]


def test_tokens_of_a_stop_string_have_no_log_probabilities() -> None:
    deltas = push_all(an_answer("llo"), outputs("hello"))
    assert [one.token.text for delta in deltas for one in delta.logprobs] == ["h", "e"]


def test_a_stop_string_counts_from_the_least_number_of_tokens_on() -> None:
    answer = AnswerText(TOKENIZER, stops=["lo", "w"], stop_token_ids=(), min_tokens=6)
    deltas = push_all(answer, outputs("hello lo world"))
    assert "".join(delta.text for delta in deltas) == "hello "
    assert answer.num_tokens == len("hello lo")


@given(st.text(max_size=8), st.lists(st.sampled_from(["é", "€x", "🙂", "a"]), max_size=2))
def test_no_piece_of_an_answer_breaks_a_character(text: str, stops: list[str]) -> None:
    tokens = outputs(text) or [TokenOutput("r", None, FinishReason.LENGTH)]
    deltas = push_all(an_answer(*stops), tokens)
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    assert "".join(delta.text for delta in deltas) == (text[: min(ends)[1]] if ends else text)
    spelled = b"".join(one.token.spelling for delta in deltas for one in delta.logprobs)
    assert spelled.decode() == (text[: min(ends)[1]] if ends else text)


def test_nor_has_a_part_of_the_stop_strings_first_character() -> None:
    deltas = push_all(an_answer("é"), outputs("aé"))
    assert "".join(delta.text for delta in deltas) == "a"
    assert [one.token.spelling for delta in deltas for one in delta.logprobs] == [b"a"]


def test_the_parts_of_a_character_come_with_it_or_with_the_end() -> None:
    deltas = push_all(an_answer(), outputs("é"))
    assert [len(delta.logprobs) for delta in deltas] == [0, 2]
    cut = outputs("aé")[:2]
    end = TokenOutput("r", None, FinishReason.LENGTH)
    deltas = push_all(an_answer(), [*cut, end])
    assert [delta.text for delta in deltas] == ["a", "", "\ufffd"]
    assert [one.token.spelling for one in deltas[2].logprobs] == [b"\xc3"]


def test_a_part_of_a_character_is_spelled_by_its_bytes() -> None:
    whole, part = SpelledToken("é".encode(), -1.0), SpelledToken(b"\xe2\x82", -1.0)
    assert (whole.text, part.text) == ("é", r"bytes:\xe2\x82")


def test_a_token_without_text_is_spelled_by_its_name() -> None:
    token = SampledToken(END_TOKEN_ID, -1.0, ((END_TOKEN_ID, -1.0), (0, -2.0)))
    [delta] = push_all(an_answer(), [TokenOutput("r", token, FinishReason.LENGTH)])
    [logprob] = delta.logprobs
    assert (logprob.token.text, logprob.token.spelling) == ("<|end|>", b"")
    assert [one.text for one in logprob.top] == ["<|end|>", " "]
    assert delta.text == ""
