from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from tidegate_engine.core.request import FinishReason
from tidegate_engine.server.answers import ChatAnswer, CompletionAnswer
from tidegate_engine.server.render import (
    ChatFormat,
    CompletionFormat,
    FinishedChoice,
    ResponseFormat,
    ResponseHead,
    usage_of,
)
from tidegate_engine.server.text import SpelledToken, TextDelta, TokenLogprob

HEAD = ResponseHead(generation_id="g", model="m", created=0)
USAGE = usage_of(prompt_tokens=1, cached_tokens=0, output_tokens=1)
CHAT = ChatFormat(HEAD, wants_logprobs=True, includes_usage=False)
COMPLETION = CompletionFormat(HEAD, wants_logprobs=True, includes_usage=False)
LOGPROB = TokenLogprob(
    SpelledToken(b"a", -0.5), 0, tuple(SpelledToken(bytes((98 + i,)), -1.0 - i) for i in range(20))
)


def parts_of(content: object) -> int:
    """How many values `orjson` has to look at."""
    if isinstance(content, Mapping):
        return 1 + sum(map(parts_of, content.values()))
    if isinstance(content, list | tuple):
        return 1 + sum(map(parts_of, content))
    return 1


@pytest.mark.parametrize("answer_format", [CHAT, COMPLETION])
def test_alternatives_are_written_as_they_come_and_only_joined_at_the_end(
    answer_format: ResponseFormat,
) -> None:
    written = answer_format.write(LOGPROB)
    choice = FinishedChoice("a" * 1000, (written,) * 1000, FinishReason.LENGTH)
    whole = answer_format.whole([choice], USAGE)
    assert parts_of(whole) < 5 * 1000
    shape = ChatAnswer if answer_format is CHAT else CompletionAnswer
    answer = shape.model_validate_json(orjson.dumps(whole))
    assert orjson.dumps(whole).count(b"-20.0") == 1000
    assert answer.choices[0].logprobs is not None


@pytest.mark.parametrize("answer_format", [CHAT, COMPLETION])
def test_a_stream_says_of_a_token_what_a_whole_answer_does(answer_format: ResponseFormat) -> None:
    chunk: Any = orjson.loads(orjson.dumps(answer_format.chunk(0, TextDelta("a", (LOGPROB,)))))
    choice = FinishedChoice("a", (answer_format.write(LOGPROB),), FinishReason.LENGTH)
    whole: Any = orjson.loads(orjson.dumps(answer_format.whole([choice], USAGE)))
    assert chunk["choices"][0]["logprobs"] == whole["choices"][0]["logprobs"]


def test_of_alternatives_spelled_alike_the_likeliest_stands() -> None:
    top = (SpelledToken(b"a", -0.1), SpelledToken(b"", -3.0), SpelledToken(b"", -9.0))
    _, _, written, _ = COMPLETION.write(TokenLogprob(top[0], 0, top))
    assert orjson.loads(orjson.dumps(written)) == {"a": -0.1, "": -3.0}
