"""Engines that serve the real API from a thread of the test's process."""

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx
import uvloop
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.events import EngineStats
from tidegate_engine.executor.base import Capacity, Executor
from tidegate_engine.executor.simulated import SimulatedExecutor
from tidegate_engine.executor.step_cost import AffineCost
from tidegate_engine.fleet.bucket_script import BucketStore
from tidegate_engine.fleet.rates import FleetRates
from tidegate_engine.model.bytes_tokenizer import NUM_PRINTABLE, BytesTokenizer
from tidegate_engine.server.app import create_app
from tidegate_engine.server.connections import HttpServer, listen
from tidegate_engine.server.generation import MAX_UNREAD_EVENTS
from tidegate_engine.server.served_model import ServedModel, Tokenizer
from tidegate_engine.server.service import Service, assemble
from tidegate_policies.rules import TenantRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.cluster import eventually
from tidegate_testing.policies import POOL, a_snapshot, a_tenant

MODEL = "simulated"
BLOCK_SIZE = 16
BLOCK_BYTES = 4096

NO_REDIS = "redis://127.0.0.1:1"
"""Where none is; nobody asks before a policy has rate limits."""

_engines = count(1)


def key_of(tenant: str) -> str:
    """The API key of a tenant of `a_keyed_tenant`."""
    return f"sk-{tenant}"


def digest_of(key: str) -> str:
    """What a policy says of an API key."""
    return hashlib.sha256(key.encode()).hexdigest()


def a_keyed_tenant(name: str = "acme", **fields: object) -> TenantRule:
    """Build the rule of a tenant that calls with `key_of(name)`."""
    return a_tenant(name, **{"key_digests": (digest_of(key_of(name)),), **fields})  # type: ignore[arg-type]


@dataclass
class StepGate:
    """A simulated executor's clock, paced by hand: steps pass while it is open, else they wait.

    Attributes:
        is_holding: Whether a step waits.
    """

    is_holding: bool = False
    _open: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.open()

    def now(self) -> float:
        """Return the machine's monotonic time."""
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        """Let a step's time pass."""
        time.sleep(max(0.0, seconds))
        if not self._open.is_set():
            self.is_holding = True
            self._open.wait()
            self.is_holding = False

    def open(self) -> None:
        """Let steps pass."""
        self._open.set()

    def let_one_pass(self) -> None:
        """Let the step that is held end; the next one is held again."""
        self._open.set()
        self._open.clear()

    def shut(self) -> None:
        """Hold the next step; return while it is held."""
        self._open.clear()
        eventually(lambda: self.is_holding, "a step to hold")


@dataclass
class RunningEngine:
    """An engine behind a real HTTP server.

    Attributes:
        gate: Holds its steps.
        exits: Closes the clients.
    """

    service: Service
    port: int
    event_loop: asyncio.AbstractEventLoop
    gate: StepGate
    exits: ExitStack
    revision: int = 0

    @property
    def base_url(self) -> str:
        """Of the server, without `/v1`."""
        return f"http://127.0.0.1:{self.port}"

    def apply(self, policy: PolicySnapshot) -> None:
        """Put a policy in force."""
        self.revision += 1
        self._in_loop(
            lambda: self.service.board.offer(policy, revision=self.revision, digest=policy.digest)
        )
        eventually(
            lambda: getattr(self.service.board.in_force, "revision", 0) == self.revision,
            f"revision {self.revision} in force",
        )

    def drain(self, grace_seconds: float) -> None:
        """Begin to drain, without waiting for its end."""
        generations = self.service.generations
        asyncio.run_coroutine_threadsafe(generations.drain(grace_seconds), self.event_loop)
        eventually(lambda: generations.is_draining, "draining")

    def stats(self) -> EngineStats:
        """Count at the next step boundary."""
        return self.service.engine.stats().result(timeout=10)

    def is_idle(self) -> bool:
        """Whether no request is in the engine."""
        scheduler = self.stats().scheduler
        return scheduler.running + scheduler.waiting + scheduler.swapped == 0

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Scrape: value by name and labels, without `pool`."""
        text = self.http().get("/metrics").text
        return {
            (sample.name, frozenset((k, v) for k, v in sample.labels.items() if k != "pool")): (
                sample.value
            )
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def sample(self, name: str, **labels: str) -> float | None:
        """Scrape one series; None when there is none."""
        return self.samples().get((name, frozenset(labels.items())))

    def openai(self, tenant: str = "acme", **options: object) -> OpenAI:
        """The official client with the tenant's key, without repeats."""
        client = OpenAI(
            base_url=f"{self.base_url}/v1",
            api_key=key_of(tenant),
            max_retries=0,
            **options,  # type: ignore[arg-type]
        )
        return self.exits.enter_context(client)

    def http(self, tenant: str = "acme") -> httpx.Client:
        """A plain client with the tenant's key."""
        headers = {"authorization": f"Bearer {key_of(tenant)}"}
        client = httpx.Client(base_url=self.base_url, headers=headers, timeout=30)
        return self.exits.enter_context(client)

    def _in_loop(self, call: Callable[[], None]) -> None:
        done = threading.Event()

        def run() -> None:
            call()
            done.set()

        self.event_loop.call_soon_threadsafe(run)
        done.wait()


@contextmanager
def a_running_engine(
    policy: PolicySnapshot | None = None,
    *,
    executor: Executor | None = None,
    model: ServedModel | None = None,
    blocks: int = 4096,
    host_blocks: int = 0,
    step_seconds: float = 0.0,
    max_num_seqs: int = 32,
    max_waiting: int = 1000,
    max_unread_events: int = MAX_UNREAD_EVENTS,
    has_policy: bool = True,
    listener: socket.socket | None = None,
    http_options: Mapping[str, Any] | None = None,
    redis_url: str = NO_REDIS,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[RunningEngine]:
    """Serve from a thread until the block ends; `policy` is in force when it begins.

    `http_options` are those of `HttpServer`. Redis is asked for rate limits alone. `clock` is what
    the engine judges time limits by.
    """
    gate = StepGate()
    used = executor or a_paced_executor(
        gate, blocks=blocks, host_blocks=host_blocks, step_seconds=step_seconds
    )
    limits = EngineLimits(max_num_seqs=max_num_seqs, max_waiting=max_waiting)
    scheduler = a_scheduler_of(used, limits)
    started = threading.Event()
    exits = ExitStack()
    engines: list[RunningEngine] = []
    servers: list[HttpServer] = []
    listener = listener or listen("127.0.0.1", 0)

    async def serve() -> None:
        redis = Redis.from_url(redis_url, socket_timeout=2)
        service = assemble(
            pool=POOL,
            scheduler=scheduler,
            executor=used,
            model=model or a_served_model(),
            rates=rates_of(redis),
            clock=clock,
            max_waiting=max_waiting,
            max_unread_events=max_unread_events,
        )
        server = HttpServer(create_app(service), **{"flush_seconds": 1, **(http_options or {})})
        port = listener.getsockname()[1]
        engines.append(RunningEngine(service, port, asyncio.get_running_loop(), gate, exits))
        servers.append(server)
        service.engine.start()
        started.set()
        await server.serve([listener])
        await asyncio.to_thread(service.engine.stop)
        await redis.aclose()

    thread = threading.Thread(target=lambda: uvloop.run(serve()), name="server")
    thread.start()
    started.wait()
    try:
        if has_policy:
            engines[0].apply(policy or a_snapshot(a_keyed_tenant()))
        yield engines[0]
    finally:
        gate.open()
        exits.close()
        servers[0].should_exit = True
        thread.join()


@contextmanager
def waiting_requests(
    engine: RunningEngine, *named: tuple[str, str], n: int = 1, max_tokens: int = 400
) -> Iterator[None]:
    """Send one request after the other, each of a tenant and with a name; cancel them at the end.

    All are in the engine when the block begins. Nobody reads their answers.
    """
    asked = {"model": MODEL, "prompt": "Hello", "max_tokens": max_tokens, "n": n, "stream": True}
    body = json.dumps(asked).encode()
    expected = engine.stats().scheduler.arrivals
    with ExitStack() as exits:
        for tenant, name in named:
            connection = socket.create_connection(("127.0.0.1", engine.port))
            exits.enter_context(connection)
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: engine\r\nx-request-id: {name}\r\n"
                f"authorization: Bearer {key_of(tenant)}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
            expected += n
            eventually(
                lambda: engine.stats().scheduler.arrivals == expected,  # noqa: B023
                f"{name} in the engine",
            )
        yield


def rates_of(redis: Redis) -> FleetRates:
    """Build an engine's part in the rate limits of its pool."""
    store = BucketStore(redis, pool=POOL, engine=f"engine-{next(_engines)}", expiry_seconds=6)
    return FleetRates(store, clock=time.monotonic)


def a_scheduler_of(executor: Executor, limits: EngineLimits | None = None) -> Scheduler:
    """Build the scheduler of an executor, as an engine's start does; no policy is in force."""
    return Scheduler(
        num_blocks=executor.capacity.num_blocks,
        block_size=executor.capacity.block_size,
        num_host_blocks=executor.capacity.num_host_blocks,
        limits=limits or EngineLimits(),
        costs=executor.measure(),
    )


def a_paced_executor(
    gate: StepGate,
    *,
    blocks: int = 4096,
    host_blocks: int = 0,
    step_seconds: float = 0.0,
    swap_block_seconds: float = 0.0001,
) -> SimulatedExecutor:
    """Build an executor whose steps take `step_seconds` and wait for `gate`."""
    return SimulatedExecutor(
        capacity=Capacity(
            num_blocks=blocks,
            num_host_blocks=host_blocks,
            block_size=BLOCK_SIZE,
            block_bytes=BLOCK_BYTES,
        ),
        vocab_size=NUM_PRINTABLE,
        cost=AffineCost(
            ExecutorCosts(
                step_seconds=step_seconds,
                prefill_token_seconds=0,
                decode_seconds=0,
                swap_block_seconds=swap_block_seconds,
            )
        ),
        clock=gate,
    )


class HeldTokenizer(BytesTokenizer):
    """Encodes nothing until it is told to; chats and tokens are as ever.

    Attributes:
        begun: Set when the first text came.
        released: Set to let texts be encoded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.released = threading.Event()

    def encode(self, text: str) -> list[int]:
        """Wait, then encode."""
        self.begun.set()
        self.released.wait()
        return super().encode(text)


def a_served_model(
    *, max_context_tokens: int = 1 << 20, tokenizer: Tokenizer | None = None
) -> ServedModel:
    """Build the model of simulated engines."""
    return ServedModel(
        name=MODEL,
        tokenizer=tokenizer or BytesTokenizer(),
        max_context_tokens=max_context_tokens,
        created=1_700_000_000,
    )
