"""An engine's process that sends traces to a collector, which decodes what comes."""

import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tidegate_devcluster.redis_server import RedisServer
from tidegate_engine.server.otlp import FLUSH_SECONDS
from tidegate_policies.rules import PreemptionMode, PreemptionRule
from tidegate_testing.cluster import eventually
from tidegate_testing.control import Publisher
from tidegate_testing.engine_process import (
    EngineProcess,
    an_engine_process,
    engine_environment,
    run_to_its_end,
)
from tidegate_testing.engines import a_keyed_tenant, key_of
from tidegate_testing.otlp_receiver import OtlpReceiver, an_otlp_receiver, attributes_of
from tidegate_testing.policies import a_snapshot
from tidegate_testing.raw_requests import a_raw_request

SECRET = "a-prompt-that-nobody-else-reads"
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
POLICY = a_snapshot(
    a_keyed_tenant("acme", tier="high"),
    *(
        a_keyed_tenant(
            mode.value, tier="low", preemption=PreemptionRule(mode=mode, min_quantum_tokens=0)
        )
        for mode in (PreemptionMode.SWAP, PreemptionMode.RECOMPUTE)
    ),
    tiers={"high": 10, "low": 0},
)


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with an_otlp_receiver() as listening:
        yield listening


@pytest.fixture
def engine(
    redis_server: RedisServer, receiver: OtlpReceiver, tmp_path: Path
) -> Iterator[EngineProcess]:
    publisher = Publisher(redis_server.url)
    publisher.publish(POLICY, 1)
    more = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "50",
        "TIDEGATE_MAX_NUM_SEQS": "1",
        "TIDEGATE_MAX_BATCHED_TOKENS": "64",
        "TIDEGATE_HOST_KV_BLOCKS": "256",
        # More than any request here fills: the prefix cache has nothing of what is taken out.
        "TIDEGATE_BLOCK_SIZE": "256",
    }
    with an_engine_process(publisher, tmp_path, **more) as running:
        running.wait_until_ready()
        yield running


def ask(
    engine: EngineProcess, path: str = "completions", *, headers: dict[str, str], **body: object
) -> httpx.Response:
    return httpx.post(
        f"http://127.0.0.1:{engine.port}/v1/{path}",
        json={"model": "simulated", "max_tokens": 5, **body},
        headers={"authorization": f"Bearer {key_of('acme')}", **headers},
    )


def the_roots(receiver: OtlpReceiver, number: int) -> list[Span]:
    eventually(lambda: len(receiver.roots()) >= number, f"{number} traces")
    assert len(receiver.roots()) == number
    return receiver.roots()


def names_and_order(phases: list[Span]) -> list[str]:
    """Return their names; they follow one another without a gap."""
    for before, after in pairwise(phases):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    return [phase.name for phase in phases]


def test_a_chat_is_a_trace_below_its_callers_with_what_it_cost_and_nothing_secret(
    engine: EngineProcess, receiver: OtlpReceiver
) -> None:
    began = time.time_ns()
    answer = ask(
        engine,
        "chat/completions",
        headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=own"},
        messages=[{"role": "user", "content": SECRET}],
        temperature=0.5,
        seed=7,
    ).json()
    (root,) = the_roots(receiver, 1)
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert (root.name, root.trace_state) == ("chat simulated", "vendor=own")
    assert attributes_of(root.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tidegate",
        "gen_ai.request.model": "simulated",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.response.model": "simulated",
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "tidegate.tenant": "acme",
    }
    phases = receiver.phases_of(root)
    assert names_and_order(phases) == ["queue", "prefill", "decode"]
    assert began < root.start_time_unix_nano == phases[0].start_time_unix_nano
    assert phases[-1].end_time_unix_nano <= root.end_time_unix_nano < time.time_ns()
    assert {phase.trace_id.hex() for phase in phases} == {TRACE_ID}
    assert receiver.resources[0]["service.name"] == "tidegate-engine"
    assert receiver.resources[0]["service.instance.id"] == "engine-0"
    assert receiver.resources[0]["tidegate.pool"]
    sent = b"".join(receiver.bodies)
    for secret in (SECRET, key_of("acme")):
        assert secret.encode() not in sent


def test_a_caller_that_does_not_sample_gets_no_spans_and_a_broken_parent_a_trace_of_its_own(
    engine: EngineProcess, receiver: OtlpReceiver
) -> None:
    for traceparent in (f"00-{TRACE_ID}-{PARENT_ID}-00", "00-nonsense", f"00-{TRACE_ID}"):
        assert ask(engine, headers={"traceparent": traceparent}, prompt="Hello").is_success
    assert engine.terminate() == 0
    roots = the_roots(receiver, 2)
    for root in roots:
        assert root.trace_id.hex() != TRACE_ID
        assert root.parent_span_id == b""


@pytest.mark.parametrize(
    ("mode", "resumed"),
    [
        (PreemptionMode.SWAP, ["decode"]),
        (PreemptionMode.RECOMPUTE, ["prefill", "decode"]),
    ],
)
def test_a_request_that_is_taken_out_has_a_span_for_it_and_one_for_what_is_read_again(
    engine: EngineProcess, receiver: OtlpReceiver, mode: PreemptionMode, resumed: list[str]
) -> None:
    with a_raw_request(engine.port, tenant=mode.value, stream=True, max_tokens=300) as reader:
        assert reader.recv(1)
        assert ask(engine, headers={}, prompt="Hello", n=2).is_success
        gold, batch = the_roots(receiver, 2)
    phases = receiver.phases_of(batch)
    assert attributes_of(batch.attributes)["tidegate.tenant"] == mode.value
    names = names_and_order(phases)
    # Both choices of the other request take it out, one after the other.
    again = ["preempted", *resumed]
    assert names in (
        ["queue", "prefill", "decode", *again],
        ["queue", "prefill", "decode", *again, *again],
    )
    taken_out = attributes_of(phases[3].attributes)
    assert (taken_out["tidegate.reason"], taken_out["tidegate.beneficiary_tier"]) == (
        "displaced",
        "high",
    )
    assert attributes_of(phases[0].attributes)["tidegate.reason"]
    asked = attributes_of(gold.attributes)
    assert (asked["gen_ai.request.choice.count"], asked["gen_ai.usage.output_tokens"]) == (2, 10)
    assert asked["gen_ai.response.finish_reasons"] == ["length", "length"]
    choices = [attributes_of(p.attributes)["tidegate.choice"] for p in receiver.phases_of(gold)]
    assert sorted(choices) == [0, 0, 0, 1, 1, 1]


def test_refusals_and_clients_that_leave_are_told_by_their_code(
    engine: EngineProcess, receiver: OtlpReceiver
) -> None:
    assert ask(engine, headers={}, prompt="Hello", model="other").status_code == 404
    with a_raw_request(engine.port, stream=True, max_tokens=4000) as reader:
        assert reader.recv(1)
    roots = the_roots(receiver, 2)
    assert [attributes_of(root.attributes)["error.type"] for root in roots] == [
        "model_not_found",
        "disconnect",
    ]
    assert {root.status.code for root in roots} == {Status.STATUS_CODE_UNSET}
    assert receiver.phases_of(roots[0]) == []
    assert [phase.name for phase in receiver.phases_of(roots[1])] == ["queue", "prefill", "decode"]


def test_an_engine_whose_collector_is_gone_serves_and_ends_in_time(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    publisher = Publisher(redis_server.url)
    publisher.publish(POLICY, 1)
    with an_otlp_receiver() as gone:
        endpoint = gone.endpoint
    more = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    with an_engine_process(publisher, tmp_path, **more) as engine:
        engine.wait_until_ready()
        for _ in range(3):
            assert ask(engine, headers={}, prompt="Hello").is_success
        began = time.monotonic()
        assert engine.terminate() == 0
        assert time.monotonic() - began < 3 * FLUSH_SECONDS


def test_an_engine_without_a_collector_imports_nothing_of_it() -> None:
    program = (
        # redis-py itself looks for the SDK, so it is what sends traces that must not be there.
        "import sys, tidegate_engine.main;print([name for name in sys.modules if 'otlp' in name])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_a_collector_without_what_sends_traces_ends_the_start_and_says_what_to_install(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    without_it = "import sys; sys.modules['opentelemetry.exporter'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(without_it)
    done = run_to_its_end(
        engine_environment(
            Publisher(redis_server.url),
            tmp_path,
            TIDEGATE_PORT="0",
            OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:4318",
            PYTHONPATH=str(tmp_path),
        )
    )
    assert done.returncode == 1
    assert "the engine can't start: OTEL_EXPORTER_OTLP_ENDPOINT: " in done.stderr
    assert "install tidegate[tracing]" in done.stderr
