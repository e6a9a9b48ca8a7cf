"""An engine process fuzzed over HTTP from its own OpenAPI document, for minutes.

No answer may be a 500, none may hang, none may be other than the document says, and afterwards the
engine is empty and as large as after its first minute:

    make soak-api                                     five minutes
    make soak-api ARGS="--minutes 30 --seed 7"        longer, with other requests
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.redis_server import RedisServer
from tidegate_testing.cluster import eventually
from tidegate_testing.control import Publisher
from tidegate_testing.engine_process import EngineProcess, an_engine_process
from tidegate_testing.engines import a_keyed_tenant, key_of
from tidegate_testing.policies import a_snapshot

TENANT = "acme"
MODEL = "fuzzed"
EXAMPLES = 40
ANSWER_SECONDS = 10.0
"""Far more than any answer takes: outputs are short by policy. Beyond it, the engine hangs."""

GROWTH_MB = 48.0
"""What an allocator may keep; a leak of a few kB a request is more than that in five minutes."""


def fuzz(engine: EngineProcess, *, minutes: float, first_seed: int) -> Counter[int]:
    """Send what the document allows and what it doesn't, operation by operation, until time is up.

    Returns:
        How often each status was answered.
    """
    base_url = f"http://127.0.0.1:{engine.port}"
    document = document_of(base_url)
    schema = schemathesis.openapi.from_dict(document)
    operations = [schema[path][verb] for path, verbs in document["paths"].items() for verb in verbs]
    statuses: Counter[int] = Counter()
    began = time.monotonic()
    grown_from = None
    for number in count(first_seed):
        for operation in operations:
            for mode in modes_of(operation):
                fuzz_operation(operation, mode, number, base_url=base_url, statuses=statuses)
        elapsed = (time.monotonic() - began) / 60
        resident = resident_mb(engine)
        say(f"seed {number}: {statuses.total():,} requests in {elapsed:.1f} min, {resident:.0f} MB")
        if grown_from is None and elapsed >= min(1.0, minutes / 3):
            grown_from = resident
        if elapsed >= minutes:
            break
    eventually(lambda: is_empty(base_url), "an engine without requests", timeout_seconds=30)
    growth = resident_mb(engine) - (grown_from or 0.0)
    if growth > GROWTH_MB:
        raise AssertionError(f"the engine grew by {growth:.0f} MB, more than {GROWTH_MB:.0f} MB")
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

    @seed(number)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: Case[Any]) -> None:
        answer = case.call(
            base_url=base_url,
            headers={"authorization": f"Bearer {key_of(TENANT)}"},
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
    return all(
        float(line.rsplit(" ", 1)[1]) == 0
        for line in lines
        if line.startswith(("tidegate_requests{", "tidegate_tokens_after_cancel_total{"))
    )


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
            publisher.publish(a_snapshot(a_keyed_tenant(TENANT, max_output_tokens=64)), 1)
            steps = {"TIDEGATE_SIMULATED_STEP_SECONDS": "0.001"}
            with an_engine_process(
                publisher, folder, TIDEGATE_SERVED_MODEL_NAME=MODEL, **steps
            ) as engine:
                engine.wait_until_ready()
                yield engine


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
    say(f"answers: {dict(sorted(statuses.items()))}; the engine's exit code: {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
