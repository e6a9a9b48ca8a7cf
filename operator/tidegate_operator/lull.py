"""Waiting for the end of a burst."""

import asyncio
from collections.abc import Callable


class Lull:
    """Lets work wait until nothing has happened for a moment, or for no longer than is bearable."""

    def __init__(self, *, quiet_seconds: float, longest_seconds: Callable[[], float]) -> None:
        """Nothing has happened yet.

        Args:
            quiet_seconds: Without any disturbance it is a lull.
            longest_seconds: How long work may wait for one; asked anew whenever it waits on.
        """
        self._quiet_seconds = quiet_seconds
        self._longest_seconds = longest_seconds
        self._disturbed = asyncio.Event()

    def disturb(self) -> None:
        """Note that something happened."""
        self._disturbed.set()

    async def wait(self) -> None:
        """Wait until something happens, and then for the lull after it."""
        await self._disturbed.wait()
        clock = asyncio.get_running_loop().time
        began = clock()
        while self._disturbed.is_set():
            left = began + self._longest_seconds() - clock()
            if left <= 0:
                break
            self._disturbed.clear()
            await asyncio.sleep(min(self._quiet_seconds, left))
        self._disturbed.clear()
