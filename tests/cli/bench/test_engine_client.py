import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tidegate_cli.bench.engine_client import StreamingClient, Target
from tidegate_cli.bench.engine_workload import SizedRequest
from tidegate_cli.bench.errors import BenchError
from tidegate_testing.engines import RunningEngine, a_running_engine, key_of


def a_request(output: int, *, prompt: int = 4, at: float = 0.0) -> SizedRequest:
    return SizedRequest(
        at_seconds=at, text="a" * prompt, token_ids=(65,) * prompt, output_tokens=output
    )


def target_of(engine: RunningEngine) -> Target:
    return Target(base_url=f"{engine.base_url}/v1", key=key_of("acme"))


@pytest.mark.parametrize(
    ("url", "base_url", "key"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1", ""),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000/v1", ""),
        ("https://:secret@peer/api", "https://peer/api/v1", "secret"),
    ],
)
def test_a_peer_is_named_by_a_url(url: str, base_url: str, key: str) -> None:
    assert Target.of(url) == Target(base_url=base_url, key=key)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://peer", "http://"])
def test_what_is_no_url_is_named(url: str) -> None:
    with pytest.raises(BenchError, match=f"--peer {url}: not a URL"):
        Target.of(url)


async def test_every_request_gets_its_tokens_and_is_timed() -> None:
    with a_running_engine(step_seconds=0.01) as engine:
        async with StreamingClient(target_of(engine), temperature=0.0) as client:
            run = await client.run([a_request(3), a_request(5, prompt=9, at=0.1)])

    assert client.takes_token_ids
    assert (run.prompt_tokens, run.output_tokens) == (13, 8)
    assert len(run.ttft_seconds) == 2
    assert len(run.itl_seconds) == 2 + 4
    # The second comes later; its own time does not begin before.
    assert run.seconds > 0.1 + 5 * 0.01
    assert 0.01 <= run.ttft_p99 < 0.1 + 5 * 0.01
    assert run.itl_p99_ms >= 9


async def test_a_refused_request_ends_the_run_in_one_line() -> None:
    with a_running_engine() as engine:
        target = target_of(engine)
        async with StreamingClient(target, temperature=0.0) as client:
            with pytest.raises(BenchError, match="HTTP 400"):
                await client.run([a_request(1), a_request(1 << 40)])


async def test_a_server_that_takes_no_token_ids_gets_text() -> None:
    async with (
        a_server_of_text(tokens=3) as url,
        StreamingClient(Target.of(url), temperature=0.0) as client,
    ):
        run = await client.run([a_request(3)])

    assert not client.takes_token_ids
    # It counts nothing, so pieces of text are counted.
    assert (run.prompt_tokens, run.output_tokens) == (4, 3)


async def test_a_server_that_stops_early_is_not_measured() -> None:
    async with (
        a_server_of_text(tokens=2) as url,
        StreamingClient(Target.of(url), temperature=0.0) as client,
    ):
        with pytest.raises(BenchError, match="2 tokens instead of 3"):
            await client.run([a_request(3)])


async def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(BenchError, match=r"http://127\.0\.0\.1:1/v1/models"):
        async with StreamingClient(Target.of("http://127.0.0.1:1"), temperature=0.0):
            pass


@asynccontextmanager
async def a_server_of_text(*, tokens: int) -> AsyncIterator[str]:
    """Serve so many tokens to whoever sends text, without counting them."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "text-only"}]})

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not isinstance(body["prompt"], str):
            return web.Response(status=422)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(tokens):
            await response.write(b'data: {"choices": [{"text": " word"}]}\n\n')
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
