"""From tokens to the text a client gets: incremental decoding, stop strings, log-probabilities."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tidegate_engine.core.plan import SampledToken
from tidegate_engine.core.request import FinishReason, TokenOutput
from tidegate_engine.server.served_model import Tokenizer


class SpelledToken(NamedTuple):
    """A token with its log-probability.

    Attributes:
        spelling: Its bytes, maybe those of a part of a character only; of special ones none.
        name: What it is called if it has none.
    """

    spelling: bytes
    logprob: float
    name: str = ""

    @property
    def text(self) -> str:
        r"""Its text; spelled `bytes:\xe2\x82`, as by the OpenAI API, where it is no UTF-8."""
        try:
            return self.spelling.decode() or self.name
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.spelling)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One output token with its log-probability.

    Attributes:
        offset: Position in the output text at which the token's text begins.
        top: The likeliest tokens, best first.
    """

    token: SpelledToken
    offset: int
    top: tuple[SpelledToken, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one step adds to an answer.

    Attributes:
        text: May be empty: characters and possible stop strings are held back until complete.
        logprobs: Of the tokens whose text is now out.
        finish_reason: Set with the last one.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


class StopStrings:
    """Looks for the first stop string in a text that comes in pieces.

    Of several, the one that is complete first counts; the answer ends before it. How the text is
    cut into pieces makes no difference.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Add a piece.

        Args:
            text: May be empty.
            may_stop: Whether a stop string that is complete with this piece counts.

        Returns:
            The text that can't be part of a stop string any more, and whether one was found.
        """
        if not self._stops:
            return text, False
        pending = self._held + text
        # One that is complete in what was held back alone came when it didn't count.
        after = len(self._held) + 1
        found = [
            (at + len(stop), at)
            for stop in self._stops
            if (at := pending.find(stop, max(0, after - len(stop)))) >= 0
        ]
        if found and may_stop:
            self._held = ""
            return pending[: min(found)[1]], True
        keep = max(_overlap(pending, stop) for stop in self._stops)
        cut = len(pending) - keep
        self._held = pending[cut:]
        return pending[:cut], False

    def finish(self) -> str:
        """Return what was held back: no stop string will complete it."""
        held, self._held = self._held, ""
        return held


class AnswerText:
    """The text of one choice, as its tokens come.

    Attributes:
        num_tokens: Output tokens so far, with the one that ended the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str],
        stop_token_ids: Sequence[int],
        min_tokens: int = 0,
    ) -> None:
        """Start without a token.

        Args:
            tokenizer: Of the model.
            stops: The answer ends before the first of these strings.
            stop_token_ids: Tokens that end it and have no text in it.
            min_tokens: Stop strings that are complete with an earlier token don't count.
        """
        self.num_tokens = 0
        self._min_tokens = min_tokens
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopStrings(stops)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._decoded = 0
        self._shown = 0
        self._logprobs: list[TokenLogprob] = []

    def push(self, output: TokenOutput) -> TextDelta:
        """Add what a step gave."""
        text = ""
        if output.token is not None:
            self.num_tokens += 1
            if output.token.token_id not in self._stop_token_ids:
                text = self._decode(output.token)
        reason = output.finish_reason
        if reason is not None:
            text += self._detokenizer.finish()
        self._decoded += len(text)
        may_stop = self.num_tokens >= self._min_tokens
        shown, has_stopped = self._stops.push(text, may_stop=may_stop)
        if has_stopped:
            reason = FinishReason.STOP
        elif reason is not None:
            shown += self._stops.finish()
        self._shown += len(shown)
        return TextDelta(shown, self._release_logprobs(may_touch=not has_stopped), reason)

    def _decode(self, token: SampledToken) -> str:
        if token.logprob is not None:
            top = tuple(self._spell(i, logprob) for i, logprob in token.top_logprobs)
            own = self._spell(token.token_id, token.logprob)
            self._logprobs.append(TokenLogprob(own, self._decoded, top))
        return self._detokenizer.push(token.token_id)

    def _spell(self, token_id: int, logprob: float) -> SpelledToken:
        spelling = self._tokenizer.token_bytes(token_id)
        name = "" if spelling else self._tokenizer.token_name(token_id)
        return SpelledToken(spelling, logprob, name)

    def _release_logprobs(self, *, may_touch: bool) -> tuple[TokenLogprob, ...]:
        """Give out the tokens whose text begins in what is shown.

        A part of a character waits for the rest: that may complete a stop string.

        Args:
            may_touch: Also those without any text that stand where the shown text ends, when
                nothing is held back behind it.
        """
        may_touch = may_touch and self._shown == self._decoded
        ready = tuple(
            itertools.takewhile(
                lambda one: one.offset < self._shown or (may_touch and not one.token.spelling),
                self._logprobs,
            )
        )
        del self._logprobs[: len(ready)]
        return ready


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop` without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
