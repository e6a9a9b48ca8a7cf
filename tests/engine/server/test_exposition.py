import asyncio

from tidegate_engine.metrics import Scrape
from tidegate_engine.server.exposition import CHEAP_SECONDS, Exposition


class Scrapes:
    """Counts what is scraped."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self.count = 0
        self.seconds = seconds
        self.text = Exposition(self.scrape, clock=lambda: self.now)

    async def scrape(self) -> Scrape:
        self.count += 1
        return _Rendered(self, self.count)


class _Rendered(Scrape):
    def __init__(self, scrapes: Scrapes, number: int) -> None:
        super().__init__(tuple)
        self._scrapes = scrapes
        self._number = number

    def render(self) -> bytes:
        self._scrapes.now += self._scrapes.seconds
        return b"%d" % self._number


async def test_who_asks_at_the_same_time_gets_the_same_text() -> None:
    scrapes = Scrapes(seconds=0.0)
    texts = await asyncio.gather(scrapes.text(), scrapes.text())
    assert [*texts] == [b"1", b"1"]


async def test_a_cheap_text_is_written_for_each_scrape() -> None:
    scrapes = Scrapes(seconds=CHEAP_SECONDS / 2)
    assert [await scrapes.text() for _ in range(3)] == [b"1", b"2", b"3"]


async def test_a_dear_text_holds_for_as_long_as_it_took_to_write() -> None:
    scrapes = Scrapes(seconds=0.8)
    assert await scrapes.text() == b"1"
    scrapes.now += 0.7
    assert await scrapes.text() == b"1"
    scrapes.now += 0.2
    assert await scrapes.text() == b"2"
