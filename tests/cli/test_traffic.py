import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from tidegate_cli.traces import TraceRequest
from tidegate_cli.traffic import Call, Latency, Traffic, summarize_calls


class StreamingServer:
    """Streams as many tokens as are asked for; with `is_stuck`, nothing at all."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.keys: list[str] = []
        self.hung_up = asyncio.Event()
        self.arrived = asyncio.Event()
        self.is_stuck = False

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers["Authorization"])
        self.arrived.set()
        if request.headers["Authorization"] != "Bearer key-of-gold":
            return web.json_response({"error": {"message": "unknown key"}}, status=401)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            if self.is_stuck:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.hung_up.set()
            raise
        for _ in range(body["max_tokens"]):
            await response.write(f"data: {json.dumps({'choices': [{'text': 'x'}]})}\n\n".encode())
        await response.write(b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')
        return response


@pytest.fixture
def server() -> StreamingServer:
    return StreamingServer()


@pytest.fixture
async def base_url(server: StreamingServer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    # Cancelled when the caller hangs up, as an engine's handlers are.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    yield f"http://{host}:{port}/v1"
    await runner.cleanup()


def request(tenant: str = "gold", at: float = 0.0, output: int = 3) -> TraceRequest:
    return TraceRequest(at_seconds=at, tenant=tenant, prompt_tokens=7, output_tokens=output)


def traffic_to(base_url: str) -> Traffic:
    keys = {"gold": "key-of-gold", "silver": "stolen"}
    return Traffic(base_url=base_url, model="small", keys=keys)


async def until_ended(traffic: Traffic, count: int) -> None:
    async with asyncio.timeout(10):
        while sum(c.ended_at is not None or c.error is not None for c in traffic.calls) < count:
            await asyncio.sleep(0.001)


async def test_requests_go_out_with_recorded_lengths_and_the_tenants_key(
    server: StreamingServer, base_url: str
) -> None:
    async with traffic_to(base_url) as traffic:
        traffic.start([request(output=3), request(at=0.01, output=5)])
        await until_ended(traffic, 2)

    assert [body["max_tokens"] for body in server.bodies] == [3, 5]
    assert {len(str(body["prompt"]).split()) for body in server.bodies} == {7}
    assert all(body["ignore_eos"] and body["stream"] for body in server.bodies)
    assert server.keys == ["Bearer key-of-gold"] * 2


async def test_each_piece_of_text_is_timed(base_url: str) -> None:
    async with traffic_to(base_url) as traffic:
        traffic.send(request(output=4))
        await until_ended(traffic, 1)

    (call,) = traffic.calls
    assert call.ended_at is not None
    assert len(call.token_times) == 4
    assert [call.sent_at, *call.token_times, call.ended_at] == sorted(
        [call.sent_at, *call.token_times, call.ended_at]
    )


async def test_a_refusal_is_kept_as_the_calls_error(base_url: str) -> None:
    async with traffic_to(base_url) as traffic:
        traffic.send(request(tenant="silver"))
        await until_ended(traffic, 1)

    (error,) = traffic.errors()
    assert error.startswith("silver: HTTP 401")
    assert "unknown key" in error


async def test_later_requests_do_not_wait_for_earlier_ones(
    server: StreamingServer, base_url: str
) -> None:
    server.is_stuck = True
    async with traffic_to(base_url) as traffic:
        traffic.start([request(), request(), request()])
        async with asyncio.timeout(10):
            while len(server.bodies) < 3:
                await asyncio.sleep(0.001)

    assert all(call.ended_at is None and call.error is None for call in traffic.calls)


async def test_leaving_hangs_up_on_what_still_runs(server: StreamingServer, base_url: str) -> None:
    server.is_stuck = True
    async with traffic_to(base_url) as traffic:
        traffic.send(request())
        await asyncio.wait_for(server.arrived.wait(), 10)

    await asyncio.wait_for(server.hung_up.wait(), 10)
    assert [call.ended_at for call in traffic.calls] == [None]


def call_of(
    *token_times: float, sent_at: float = 0.0, ended_at: float | None = None, tenant: str = "gold"
) -> Call:
    return Call(tenant=tenant, sent_at=sent_at, token_times=list(token_times), ended_at=ended_at)


def test_only_the_span_and_the_tenant_count() -> None:
    calls = [
        call_of(1.0, 2.0, 9.0, sent_at=0.0, ended_at=9.0),
        call_of(10.5, 11.0, 11.2, sent_at=10.0, ended_at=11.2),
        call_of(10.1, sent_at=10.0, ended_at=10.1, tenant="silver"),
        call_of(20.5, sent_at=20.0, ended_at=21.0),
    ]

    figures = summarize_calls(calls, "gold", start=10.0, end=20.0)

    assert (figures.sent, figures.finished, figures.failed) == (1, 1, 0)
    assert figures.ttft_p50 == Latency(0.5)
    assert figures.itl_p99 == Latency(0.5)


def test_a_token_of_an_earlier_call_counts_for_the_span_in_which_it_comes() -> None:
    figures = summarize_calls([call_of(1.0, 13.0)], "gold", start=10.0, end=20.0)

    assert figures.sent == 0
    assert figures.itl_p99 == Latency(12.0)
    assert figures.ttft_p50 is None


def test_who_still_waits_counts_with_its_age_and_makes_the_figure_a_lower_bound() -> None:
    calls = [call_of(0.5), call_of(0.7), call_of(sent_at=2.0)]

    figures = summarize_calls(calls, "gold", start=0.0, end=10.0)

    assert figures.ttft_p50 == Latency(0.7)
    assert figures.ttft_p99 == Latency(8.0, at_least=True)


def test_a_failed_call_is_counted_and_gives_no_latency() -> None:
    failed = Call(tenant="gold", sent_at=1.0, error="HTTP 500")

    figures = summarize_calls([failed], "gold", start=0.0, end=10.0)

    assert (figures.sent, figures.failed, figures.ttft_p99) == (1, 1, None)
