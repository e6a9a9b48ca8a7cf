"""The metrics as text: not written in the event loop, and not once for each who asks."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from tidegate_engine.metrics import Scrape
from tidegate_engine.server.shared_call import SharedCall

CHEAP_SECONDS = 0.05
"""What takes less to write is written anew for each scrape."""


class Exposition:
    """Writes the metrics in a thread, once for all who ask meanwhile.

    With thousands of tenants that takes most of a second, of the processor that the engine's own
    thread needs: such a text is given to whoever asks within as long again, so that any number of
    scrapers takes half of a core at most.
    """

    def __init__(
        self,
        scrape: Callable[[], Awaitable[Scrape]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Write nothing yet.

        Args:
            scrape: Takes what there is to show.
            clock: Monotonic, in seconds.
        """
        self._scrape = scrape
        self._clock = clock
        self._written = SharedCall(self._write)
        self._text = b""
        self._holds_until = 0.0

    async def __call__(self) -> bytes:
        """Return the text."""
        if self._clock() < self._holds_until:
            return self._text
        return await self._written()

    async def _write(self) -> bytes:
        scrape = await self._scrape()
        began = self._clock()
        # Not in the event loop, where everything else would stand still meanwhile.
        self._text = await asyncio.to_thread(scrape.render)
        ended = self._clock()
        if ended - began >= CHEAP_SECONDS:
            self._holds_until = ended + ended - began
        return self._text
