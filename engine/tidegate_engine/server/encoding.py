"""Long texts become tokens beside the event loop, the tenants in turn."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

NUM_THREADS = 2
"""One more than a tenant can occupy."""


class Encoders:
    """Threads that encode, each tenant's texts one after the other.

    So a tenant with many long texts waits for itself: to the others it is at most one text that is
    being encoded. All of this but the work itself is in the event loop.
    """

    def __init__(self) -> None:
        # Of their own: in asyncio's threads policies are stored, and would queue behind prompts.
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="encoder")
        self._num_free = NUM_THREADS
        self._busy: set[str] = set()
        self._turns: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, tenant: str, encode: Callable[[], T]) -> T:
        """Return what `encode` does, called in a thread when it is the tenant's turn.

        Who is cancelled meanwhile gives the turn back, as soon as the thread is free.
        """
        await self._turn_of(tenant)
        event_loop = asyncio.get_running_loop()
        working = event_loop.run_in_executor(self._threads, encode)
        working.add_done_callback(lambda _: self._give_back(tenant))
        # Shielded, as a thread can't be interrupted: it is free once it is.
        return await asyncio.shield(working)

    async def _turn_of(self, tenant: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.setdefault(tenant, deque()).append(turn)
        self._give_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was this one's turn just now
                self._give_back(tenant)
            raise

    def _give_back(self, tenant: str) -> None:
        self._busy.discard(tenant)
        self._num_free += 1
        if tenant in self._turns:
            self._turns.move_to_end(tenant)
        self._give_turns()

    def _give_turns(self) -> None:
        while self._num_free:
            tenant = next((name for name in self._turns if name not in self._busy), None)
            if tenant is None:
                return
            turns = self._turns.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._turns[tenant] = turns
            if not turn.cancelled():
                self._num_free -= 1
                self._busy.add(tenant)
                turn.set_result(None)
