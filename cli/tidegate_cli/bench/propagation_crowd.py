"""The processes of simulated engines, and what they tell of the policies that they obey."""

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from tidegate_cli.bench.propagation_engines import EnginesSettings
from tidegate_cli.errors import NotReadyError
from tidegate_devcluster.processes import Child, Lifeline

ENGINES_PER_PROCESS = 50

_LINE_BYTES = 4 * 1024 * 1024
_TO_JSON = TypeAdapter(EnginesSettings)


class InForce:
    """When which weight was in force in every engine; weights of a tenant only grow."""

    def __init__(self, num_processes: int) -> None:
        """Expect to be told by so many processes, each for its own engines."""
        self._told: dict[str, dict[int, list[tuple[int, float]]]] = defaultdict(dict)
        self._num_processes = num_processes
        self._news = asyncio.Event()

    def note(self, process: int, at: float, weights: Mapping[str, int]) -> None:
        """Take in that all engines of a process obey these weights, by tenant, since `at`."""
        for tenant, weight in weights.items():
            self._told[tenant].setdefault(process, []).append((weight, at))
        self._news.set()

    async def when(self, tenant: str, weight: int, *, limit_seconds: float) -> float:
        """Wait until every engine obeys this weight of the tenant, or a later one.

        Returns:
            The monotonic clock's reading at which the last engine began, whenever this was called.

        Raises:
            NotReadyError: Not all did within the limit.
        """
        try:
            async with asyncio.timeout(limit_seconds):
                while True:
                    self._news.clear()
                    found = self._when(tenant, weight)
                    if found is not None:
                        return found
                    await self._news.wait()
        except TimeoutError:
            raise NotReadyError(
                f"weight {weight} of tenant {tenant} in every engine", limit_seconds=limit_seconds
            ) from None

    def _when(self, tenant: str, weight: int) -> float | None:
        began = [
            at
            for told in self._told[tenant].values()
            for at in [next((at for one, at in told if one >= weight), None)]
            if at is not None
        ]
        return max(began) if len(began) == self._num_processes else None


class Crowd:
    """All engines of the pool.

    Attributes:
        in_force: What they obey.
        children: Their processes.
    """

    def __init__(self, in_force: InForce, children: list[Child]) -> None:
        self.in_force = in_force
        self.children = children

    @classmethod
    @asynccontextmanager
    async def running(
        cls, settings: EnginesSettings, *, root: Path, lifeline: Lifeline
    ) -> AsyncIterator["Crowd"]:
        """Run the engines for the length of the block.

        Args:
            settings: Of all; each process gets some of the pods.
            root: Folder of their logs.
            lifeline: Removes them when this process is killed.
        """
        shares = list(_shares(settings.pods))
        in_force = InForce(len(shares))
        # In the order in which they come; which process is which doesn't matter.
        numbers = iter(range(len(shares)))

        async def listen(told: asyncio.StreamReader, engines: asyncio.StreamWriter) -> None:
            number = next(numbers)
            try:
                async for line in told:
                    news = json.loads(line)
                    in_force.note(number, news["at"], news["weights"])
            except asyncio.CancelledError:
                return
            finally:
                engines.close()

        server = await asyncio.start_unix_server(listen, settings.observer, limit=_LINE_BYTES)
        async with server:
            with ExitStack() as exits:
                children = []
                for number, pods in enumerate(shares):
                    child = Child(
                        f"engines-{number}",
                        _command(replace(settings, pods=pods)),
                        log=root / f"engines-{number}.log",
                        lifeline=lifeline,
                    )
                    exits.callback(child.stop)
                    children.append(child)
                yield cls(in_force, children)

    def raise_if_ended(self) -> None:
        """Complain about an end that nobody asked for.

        Raises:
            StartError: A process of engines has ended.
        """
        for child in self.children:
            child.raise_if_ended()


def _command(settings: EnginesSettings) -> list[str]:
    text = _TO_JSON.dump_json(settings).decode()
    return [sys.executable, "-m", "tidegate_cli.bench.propagation_engines", text]


def _shares(pods: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    for first in range(0, len(pods), ENGINES_PER_PROCESS):
        yield pods[first : first + ENGINES_PER_PROCESS]
