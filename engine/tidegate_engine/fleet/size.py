"""How many engines a pool has, as one of them knows it."""

import asyncio
import logging

from tidegate_engine.state_file import StateFile

_log = logging.getLogger(__name__)


class FleetSize:
    """By how many a limit is divided while Redis can't be asked.

    More engines count at once, fewer only once answers have said so for as long as it takes to
    notice that one is gone: a Redis that comes back empty hears of one engine after the other, and
    may go away again before it has heard of all.

    Attributes:
        num_engines: At least 1.
    """

    def __init__(self, file: StateFile | None = None) -> None:
        """Begin with what is known of an earlier run.

        Args:
            file: Keeps the number for a start without Redis; None = nothing does.
        """
        self._file = file
        text = None if file is None else file.read()
        self.num_engines = max(1, int(text)) if text is not None and text.isdecimal() else 1
        self._fewer_since: float | None = None

    async def note(self, num_engines: int, *, now: float, patience_seconds: float) -> None:
        """Take an answer of Redis.

        Args:
            num_engines: That said in time that they live.
            now: Monotonic, in seconds.
            patience_seconds: Fewer count after so long.
        """
        if num_engines >= self.num_engines:
            self._fewer_since = None
        elif self._fewer_since is None:
            self._fewer_since = now
        if self._fewer_since is None or now - self._fewer_since >= patience_seconds:
            self._fewer_since = None
            await self._use(num_engines)

    def note_silence(self) -> None:
        """Redis can't be asked: whether there are fewer is to be seen anew."""
        self._fewer_since = None

    async def _use(self, num_engines: int) -> None:
        if num_engines == self.num_engines:
            return
        self.num_engines = num_engines
        if self._file is None:
            return
        try:
            await asyncio.to_thread(self._file.write, str(num_engines))
        except OSError as error:
            # Only a restart without Redis would miss it.
            _log.warning("the number of engines can't be stored: %s", error)
