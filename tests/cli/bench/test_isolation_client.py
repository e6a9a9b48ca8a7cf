import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tidegate_cli.bench.errors import BenchError
from tidegate_cli.bench.isolation_client import Clients
from tidegate_cli.bench.isolation_figures import End, Experience
from tidegate_cli.bench.isolation_load import Planned

_TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'


async def _complete(request: web.Request) -> web.StreamResponse:
    """Answer as the prompt's first word, read backwards, says."""
    body = json.loads(await request.text())
    way = body["prompt"].split()[0][::-1]
    if way in {"429", "503", "504", "400"}:
        return web.json_response({"error": {"message": "no"}}, status=int(way))
    response = web.StreamResponse()
    await response.prepare(request)
    if way == "silent":
        await asyncio.Event().wait()
    for _ in range(body["max_tokens"]):
        await response.write(_TOKEN)
    if way == "error":
        await response.write(b'data: {"error": {"message": "cut"}}\n\n')
    return response


@pytest.fixture
async def base_url() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", _complete)
    async with TestServer(app) as server:
        yield f"http://{server.host}:{server.port}/v1"


async def experience(base_url: str, way: str, **changes: object) -> Experience:
    planned = Planned(
        request_id=way,
        at_seconds=0.0,
        tenant="gold",
        prompt_tokens=5,
        output_tokens=3,
        **changes,  # type: ignore[arg-type]
    )
    clients = Clients(base_url=base_url, model="m", keys={"gold": "key"}, seed=1)
    [one] = await clients.run([planned], until=1.0)
    return one


async def test_a_whole_answer_is_done_with_all_its_tokens(base_url: str) -> None:
    one = await experience(base_url, "whole", patience_seconds=0.9)

    assert one.end is End.DONE
    assert len(one.token_times) == 3
    assert one.ended_at is not None
    assert 0.0 < one.ttft_seconds <= one.ended_at < 1.0


@pytest.mark.parametrize(
    ("way", "end"),
    [("429", End.REFUSED), ("503", End.REFUSED), ("504", End.CUT), ("error", End.CUT)],
)
async def test_refusals_and_cuts_are_told_apart(base_url: str, way: str, end: End) -> None:
    assert (await experience(base_url, way)).end is end


async def test_who_loses_patience_hangs_up_and_who_has_none_to_lose_waits(base_url: str) -> None:
    assert (await experience(base_url, "silent", patience_seconds=0.1)).end is End.LEFT
    assert (await experience(base_url, "silent", leaves_after_seconds=0.1)).end is End.LEFT
    assert (await experience(base_url, "silent")).end is End.OPEN


async def test_who_never_reads_gets_nothing_until_the_end(base_url: str) -> None:
    one = await experience(base_url, "whole", is_read=False)

    assert one.end is End.OPEN
    assert not one.token_times


async def test_an_answer_that_no_overload_explains_ends_the_run(base_url: str) -> None:
    with pytest.raises(BenchError, match="HTTP 400"):
        await experience(base_url, "400")
