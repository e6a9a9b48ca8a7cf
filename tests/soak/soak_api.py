"""An engine process fuzzed over HTTP from its own OpenAPI document, for minutes.

No answer may be a 500, none may hang, none may be other than the document says, and every operation
is carried out by some of its requests. Afterwards the engine is empty, and at most 12 MB larger
than after its first minute:

    make soak-api                                     five minutes
    make soak-api ARGS="--minutes 30 --seed 7"        longer, with other requests
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import booleans
from schemathesis import Case, GenerationMode
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.redis_server import RedisServer
from tidegate_policies.rules import StopPolicy
from tidegate_testing.cluster import eventually
from tidegate_testing.control import Publisher
from tidegate_testing.engine_process import EngineProcess, an_engine_process
from tidegate_testing.engines import a_keyed_tenant, key_of
from tidegate_testing.policies import a_snapshot
from tidegate_testing.raw_requests import a_head, connect

TENANT = "acme"
HELD = "held"
"""A tenant on hold, and what it calls the request that it has in the engine: `DELETE` finds it."""

MODEL = "fuzzed"
KNOWN = {"GET /v1/models/{name}": MODEL, "DELETE /v1/requests/{request_id}": HELD}
"""What there is to be found, by operation: every other request names that in its path."""

EXAMPLES = 40
ANSWER_SECONDS = 10.0
"""Far more than any answer takes: outputs are short by policy. Beyond it, the engine hangs."""

GROWTH_MB = 12.0
"""What an allocator may keep; a leak of a few kB a request is more than that in five minutes."""

Statuses = dict[str, Counter[int]]
"""How often each status was answered, by operation."""


def fuzz(engine: EngineProcess, *, minutes: float, first_seed: int) -> Statuses:
    """Send what the document allows and what it doesn't, operation by operation, until time is up.

    Raises:
        AssertionError: An answer is wrong, or something is left of what was sent.
    """
    base_url = f"http://127.0.0.1:{engine.port}"
    document = document_of(base_url)
    schema = schemathesis.openapi.from_dict(document)
    operations = [schema[path][verb] for path, verbs in document["paths"].items() for verb in verbs]
    statuses: Statuses = {operation.label: Counter() for operation in operations}
    began = time.monotonic()
    grown_from = None
    for number in count(first_seed):
        with a_held_request(engine):
            for operation in operations:
                answered = statuses[operation.label]
                for mode in modes_of(operation):
                    fuzz_operation(operation, mode, number, base_url=base_url, statuses=answered)
        elapsed = (time.monotonic() - began) / 60
        resident = resident_mb(engine)
        sent = sum(answered.total() for answered in statuses.values())
        say(f"seed {number}: {sent:,} requests in {elapsed:.1f} min, {resident:.0f} MB")
        if grown_from is None and elapsed >= min(1.0, minutes / 3):
            grown_from = resident
        if elapsed >= minutes:
            break
    eventually(lambda: is_empty(base_url), "an engine without requests", timeout_seconds=30)
    growth = resident_mb(engine) - (grown_from or 0.0)
    if growth > GROWTH_MB:
        raise AssertionError(f"the engine grew by {growth:.0f} MB, more than {GROWTH_MB:.0f} MB")
    idle = [label for label, answered in statuses.items() if not answered[HTTPStatus.OK]]
    if idle:
        raise AssertionError(f"no request was carried out of {', '.join(idle)}")
    return statuses


def fuzz_operation(
    operation: APIOperation[Any, Any, Any, Any],
    mode: GenerationMode,
    number: int,
    *,
    base_url: str,
    statuses: Counter[int],
) -> None:
    """Send one round of requests, and hold the answers against the document."""
    tenant = HELD if operation.method == "delete" else TENANT

    @seed(number)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode), booleans())
    def send(case: Case[Any], names_known: bool) -> None:  # noqa: FBT001 - as hypothesis gives it
        if names_known and operation.label in KNOWN:
            case.path_parameters = dict.fromkeys(case.path_parameters, KNOWN[operation.label])
        answer = case.call(
            base_url=base_url,
            headers={"authorization": f"Bearer {key_of(tenant)}"},
            timeout=ANSWER_SECONDS,
        )
        case.validate_response(answer, excluded_checks=[positive_data_acceptance])
        statuses[answer.status_code] += 1

    send()


def modes_of(operation: APIOperation[Any, Any, Any, Any]) -> tuple[GenerationMode, ...]:
    """Return what can be sent: without a body there is nothing to get wrong."""
    if operation.method == "post":
        return GenerationMode.POSITIVE, GenerationMode.NEGATIVE
    return (GenerationMode.POSITIVE,)


def document_of(base_url: str) -> dict[str, Any]:
    """Return the engine's document, with the one model that it serves in it."""
    document: dict[str, Any] = requests.get(f"{base_url}/openapi.json", timeout=5).json()
    for body in ("CompletionBody", "ChatBody"):
        properties = document["components"]["schemas"][body]["properties"]
        properties["model"]["enum"] = [MODEL]
    return document


def is_empty(base_url: str) -> bool:
    """Whether the engine's own metrics count no request any more."""
    lines = requests.get(f"{base_url}/metrics", timeout=5).text.splitlines()
    for name in ("tidegate_requests", "tidegate_tokens_after_cancel_total"):
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{")]
        if not values:
            raise AssertionError(f"the engine has no metric {name}")
        if any(values):
            return False
    return True


def resident_mb(engine: EngineProcess) -> float:
    """Return the process' resident memory in MB."""
    return float(psutil.Process(engine.process.pid).memory_info().rss) / 1e6


@contextmanager
def a_fuzzed_engine() -> Iterator[EngineProcess]:
    """Start an engine whose answers are short, with a Redis of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with RedisServer(folder / "redis", Assets.from_environment()) as redis:
            publisher = Publisher(redis.url)
            fuzzed = a_keyed_tenant(TENANT, max_output_tokens=64)
            held = a_keyed_tenant(HELD, stop=StopPolicy.HOLD)
            publisher.publish(a_snapshot(fuzzed, held), 1)
            steps = {"TIDEGATE_SIMULATED_STEP_SECONDS": "0.001"}
            with an_engine_process(
                publisher, folder, TIDEGATE_SERVED_MODEL_NAME=MODEL, **steps
            ) as engine:
                engine.wait_until_ready()
                yield engine


@contextmanager
def a_held_request(engine: EngineProcess) -> Iterator[None]:
    """Have a request in the engine that waits for ever, unless it is deleted."""
    body = json.dumps({"model": MODEL, "prompt": "Hello"}).encode()
    name = f"x-request-id: {HELD}\r\n"
    with connect(engine.port) as connection:
        connection.sendall(a_head(len(body), tenant=HELD, more=name) + body)
        eventually(lambda: queue_length(engine, HELD) == 1, "one that waits")
        yield


def queue_length(engine: EngineProcess, tenant: str) -> int:
    """Return how many requests of a tenant wait."""
    headers = {"authorization": f"Bearer {key_of(tenant)}"}
    url = f"http://127.0.0.1:{engine.port}/v1/tidegate/queue"
    return int(requests.get(url, headers=headers, timeout=5).json()["length"])


def say(text: str) -> None:
    """Print at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Fuzz an engine of its own; 0 when nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long")
    chosen = parser.parse_args(arguments)
    with a_fuzzed_engine() as engine:
        statuses = fuzz(engine, minutes=chosen.minutes, first_seed=chosen.seed)
        code = engine.terminate()
    for label, answered in statuses.items():
        say(f"{label}: {dict(sorted(answered.items()))}")
    say(f"the engine's exit code: {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
