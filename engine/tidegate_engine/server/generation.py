"""One HTTP request's choices, and the tokens that nobody has read yet."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tidegate_engine.core.request import TokenOutput
from tidegate_engine.server.errors import ApiError
from tidegate_engine.server.request_trace import RequestTrace
from tidegate_engine.service_levels import RequestPace

MAX_UNREAD_EVENTS = 4096
"""Tokens of one generation that its client may leave unread; then it is cancelled."""

LEAST_UNREAD_TOKENS = 64
"""Tokens of every choice that a client may leave unread in any case: with many choices and
alternatives a few steps make thousands of events, and no client reads while we are busy ourselves.
"""

_OUTPUTS_AT_ONCE = 256
"""Most outputs that are rendered together: a stalled reader's many would hold up everybody else."""

_EVENTS_AT_ONCE = 1024
"""Most events of these, but for those of the last one."""


@dataclass(eq=False, slots=True)
class Choice:
    """One request of a generation, while it lives in the engine.

    Attributes:
        last_token_at: Clock of its newest token; None before the first.
        pace: What it has got so far, against its tenant's targets.
    """

    index: int
    request_id: str
    generation: "Generation"
    last_token_at: float | None = None
    pace: RequestPace = field(default_factory=RequestPace)


class Generation:
    """The buffer between the engine and one client.

    Attributes:
        generation_id: The id in the response, too.
        tenant: Whose it is.
        arrived_at: Clock when the HTTP request came.
        live: The choices that haven't ended, by index.
        num_unanswered: Choices of which the engine hasn't said yet whether it takes them.
        max_unread_events: Most tokens in the buffer; each alternative that comes with a token
            counts as one more. Infinite for answers that are sent whole: nobody reads meanwhile.
        cached_tokens: Tokens of its prompt that a choice found in the prefix cache, by index; a
            choice that found none isn't there.
        read_tokens: Tokens at the start of a choice's context that were computed, or found, at the
            furthest; a choice of which no step read anything isn't there.
        num_outputs: Output tokens of each choice that was ever in the batch, read or not.
        num_leaving: Choices that were taken out, for which a step in flight may still compute.
        on_left: Called when all of these have left; None = nobody waits for that.
        error: Why the generation was ended early; None while it wasn't.
        num_read: Outputs that the reader has taken.
        trace: What it goes through, for who follows that; None = nobody does.
    """

    def __init__(
        self,
        generation_id: str,
        *,
        tenant: str,
        arrived_at: float,
        max_unread_events: float,
        trace: RequestTrace | None = None,
    ) -> None:
        self.generation_id = generation_id
        self.tenant = tenant
        self.arrived_at = arrived_at
        self.live: dict[int, Choice] = {}
        self.cached_tokens: dict[int, int] = {}
        self.read_tokens: dict[int, int] = {}
        self.num_outputs: dict[int, int] = {}
        self.num_leaving = 0
        self.on_left: Callable[[], None] | None = None
        self.num_unanswered = 0
        self.max_unread_events = max_unread_events
        self.error: ApiError | None = None
        self.num_read = 0
        self.trace = trace
        self._unread: deque[tuple[int, TokenOutput]] = deque()
        self._num_unread_events = 0
        self._num_holds = 0
        self._woken = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether the client has left as much unread as it may."""
        return self._num_unread_events >= self.max_unread_events

    def count(self, index: int, output: TokenOutput) -> None:
        """Count what a step gave to a choice, whether it will be read or not."""
        if output.token is not None:
            self.num_outputs[index] = self.num_outputs.get(index, 0) + 1

    def put(self, index: int, output: TokenOutput) -> None:
        """Add what a step gave to a choice."""
        self._unread.append((index, output))
        self._num_unread_events += _num_events(output)
        self._woken.set()

    def answered(self) -> None:
        """Note that the engine has taken one more choice."""
        self.num_unanswered -= 1
        self._woken.set()

    def fail(self, error: ApiError) -> None:
        """End early: `outputs` raises `error`, and what is still unread is dropped.

        Among that may be a choice's end, and who got an end and an error would not know what holds.
        """
        self.error = error
        self._unread.clear()
        self._num_unread_events = 0
        self._woken.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep outputs from the reader for the length of the block."""
        self._num_holds += 1
        try:
            yield
        finally:
            self._num_holds -= 1
            self._woken.set()

    async def outputs(self) -> AsyncIterator[list[tuple[int, TokenOutput]]]:
        """Yield (choice, output) pairs as they come, until every choice has ended.

        The first come when the engine has taken all choices: who is refused gets nothing else.

        Raises:
            ApiError: The generation was ended early.
        """
        while True:
            if self.error is not None:
                raise self.error
            is_kept_back = self.num_unanswered > 0 or self._num_holds > 0
            if self._unread and not is_kept_back:
                yield self._take_unread()
                if self._unread:
                    await asyncio.sleep(0)  # the others' turn
            elif self.live or is_kept_back:
                self._woken.clear()
                await self._woken.wait()
            else:
                return

    def _take_unread(self) -> list[tuple[int, TokenOutput]]:
        taken: list[tuple[int, TokenOutput]] = []
        num_events = 0
        while self._unread and len(taken) < _OUTPUTS_AT_ONCE and num_events < _EVENTS_AT_ONCE:
            taken.append(self._unread.popleft())
            num_events += _num_events(taken[-1][1])
        self._num_unread_events -= num_events
        self.num_read += len(taken)
        return taken


def _num_events(output: TokenOutput) -> int:
    return 1 if output.token is None else 1 + len(output.token.top_logprobs)
