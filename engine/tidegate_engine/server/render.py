"""Response bodies in the shapes of the OpenAI API."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import orjson

from tidegate_engine.core.request import FinishReason
from tidegate_engine.server.text import SpelledToken, TextDelta, TokenLogprob

Json = dict[str, object]

Written = tuple[object, ...]
"""One token's log-probabilities as an endpoint writes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """What all bodies of one response share.

    Attributes:
        created: Seconds since the epoch.
    """

    generation_id: str
    model: str
    created: int


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """One choice, complete."""

    text: str
    logprobs: tuple[Written, ...]
    finish_reason: FinishReason


class ResponseFormat(Protocol):
    """How one endpoint writes its answers."""

    def opening(self, index: int) -> Json | None:
        """Return what a stream says of a choice before its first text; None = nothing."""
        ...

    def chunk(self, index: int, delta: TextDelta) -> Json:
        """Return what a stream says of a choice when a step adds to it."""
        ...

    def usage_chunk(self, usage: Json) -> Json:
        """Return what a stream says at its end."""
        ...

    def write(self, logprob: TokenLogprob) -> Written:
        """Write one token's log-probabilities.

        As they come: those of a whole answer would take the event loop seconds in one piece, and
        several times the memory until then.
        """
        ...

    def whole(self, choices: Sequence[FinishedChoice], usage: Json) -> Json:
        """Return the answer in one piece, for `orjson` to join."""
        ...


def usage_of(*, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> Json:
    """Return the token counts of a response.

    Args:
        prompt_tokens: All of them.
        cached_tokens: Those that were found in the prefix cache.
        output_tokens: Of all choices.
    """
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class CompletionFormat:
    """`/v1/completions`."""

    def __init__(self, head: ResponseHead, *, wants_logprobs: bool, includes_usage: bool) -> None:
        self._head = _head(head, "text_completion")
        self._wants_logprobs = wants_logprobs
        self._tail: Json = {"usage": None} if includes_usage else {}

    def opening(self, index: int) -> Json | None:  # noqa: ARG002
        """Return None: a completion begins with its text."""
        return None

    def chunk(self, index: int, delta: TextDelta) -> Json:
        """Return a piece of text."""
        written = tuple(map(self.write, delta.logprobs))
        choice = self._choice(index, delta.text, written, delta.finish_reason)
        return {**self._head, "choices": [choice], **self._tail}

    def usage_chunk(self, usage: Json) -> Json:
        """Return the token counts."""
        return {**self._head, "choices": [], "usage": usage}

    def whole(self, choices: Sequence[FinishedChoice], usage: Json) -> Json:
        """Return the answer in one piece."""
        listed = [
            self._choice(index, choice.text, choice.logprobs, choice.finish_reason)
            for index, choice in enumerate(choices)
        ]
        return {**self._head, "choices": listed, "usage": usage}

    def write(self, logprob: TokenLogprob) -> Written:
        """Write text, log-probability, alternatives and offset; the token itself is among these.

        Of alternatives that are spelled alike the likeliest stands, unless one of them was chosen.
        """
        top: dict[str, float] = {}
        for token in logprob.top:
            top.setdefault(token.text, token.logprob)
        top[logprob.token.text] = logprob.token.logprob
        return (logprob.token.text, logprob.token.logprob, _joined(top), logprob.offset)

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: Sequence[Written],
        finish_reason: FinishReason | None,
    ) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": _columns(logprobs) if self._wants_logprobs else None,
            "finish_reason": finish_reason,
        }


class ChatFormat:
    """`/v1/chat/completions`."""

    def __init__(self, head: ResponseHead, *, wants_logprobs: bool, includes_usage: bool) -> None:
        self._whole_head = _head(head, "chat.completion")
        self._head = _head(head, "chat.completion.chunk")
        self._wants_logprobs = wants_logprobs
        self._tail: Json = {"usage": None} if includes_usage else {}

    def opening(self, index: int) -> Json | None:
        """Return who speaks."""
        delta: Json = {"role": "assistant", "content": ""}
        choice: Json = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head, "choices": [choice], **self._tail}

    def chunk(self, index: int, delta: TextDelta) -> Json:
        """Return a piece of the message."""
        choice: Json = {
            "index": index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(tuple(map(self.write, delta.logprobs))),
            "finish_reason": delta.finish_reason,
        }
        return {**self._head, "choices": [choice], **self._tail}

    def usage_chunk(self, usage: Json) -> Json:
        """Return the token counts."""
        return {**self._head, "choices": [], "usage": usage}

    def whole(self, choices: Sequence[FinishedChoice], usage: Json) -> Json:
        """Return the answer in one piece."""
        listed: list[Json] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._whole_head, "choices": listed, "usage": usage}

    def write(self, logprob: TokenLogprob) -> Written:
        """Write the token with its alternatives."""
        top = [_spelled(token) for token in logprob.top]
        return (_joined({**_spelled(logprob.token), "top_logprobs": top}),)

    def _logprobs(self, logprobs: Sequence[Written]) -> Json | None:
        if not self._wants_logprobs:
            return None
        return {"content": [token for (token,) in logprobs], "refusal": None}


def _head(head: ResponseHead, kind: str) -> Json:
    return {
        "id": head.generation_id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": None,
    }


def _columns(logprobs: Sequence[Written]) -> Json:
    """Completions list each property of all tokens."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [written[i] for written in logprobs] for i, name in enumerate(names)}


def _joined(content: object) -> orjson.Fragment:
    return orjson.Fragment(orjson.dumps(content))


def _spelled(token: SpelledToken) -> Json:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.spelling)}
