"""One HTTP request's choices, and the tokens that nobody has read yet."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tidegate_engine.core.request import TokenOutput
from tidegate_engine.server.errors import ApiError

MAX_UNREAD_EVENTS = 4096
"""Tokens of one generation that its client may leave unread; then it is cancelled."""


@dataclass(eq=False, slots=True)
class Choice:
    """One request of a generation, while it lives in the engine.

    Attributes:
        last_token_at: Clock of its newest token; None before the first.
        was_admitted: Whether it has ever been in the batch.
    """

    index: int
    request_id: str
    generation: "Generation"
    last_token_at: float | None = None
    was_admitted: bool = False


class Generation:
    """The buffer between the engine and one client.

    Attributes:
        generation_id: The id in the response, too.
        tenant: Whose it is.
        arrived_at: Clock when the HTTP request came.
        live: The choices that haven't ended, by index.
        max_unread_events: Most outputs in the buffer.
        error: Why the generation was ended early; None while it wasn't.
        overflowed: Set when the client has left too much unread.
    """

    def __init__(
        self,
        generation_id: str,
        *,
        tenant: str,
        arrived_at: float,
        max_unread_events: int,
    ) -> None:
        self.generation_id = generation_id
        self.tenant = tenant
        self.arrived_at = arrived_at
        self.live: dict[int, Choice] = {}
        self.max_unread_events = max_unread_events
        self.error: ApiError | None = None
        self.overflowed = asyncio.Event()
        self._unread: deque[tuple[int, TokenOutput]] = deque()
        self._woken = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether the client has left as much unread as it may."""
        return len(self._unread) >= self.max_unread_events

    def put(self, index: int, output: TokenOutput) -> None:
        """Add what a step gave to a choice."""
        self._unread.append((index, output))
        self._woken.set()

    def fail(self, error: ApiError) -> None:
        """End early: `outputs` raises `error` behind what is still unread."""
        self.error = error
        self._woken.set()

    async def outputs(self) -> AsyncIterator[list[tuple[int, TokenOutput]]]:
        """Yield (choice, output) pairs as they come, until every choice has ended.

        Raises:
            ApiError: The generation was ended early.
        """
        while True:
            if self._unread:
                unread, self._unread = list(self._unread), deque()
                yield unread
            elif self.error is not None:
                raise self.error
            elif self.live:
                self._woken.clear()
                await self._woken.wait()
            else:
                return
