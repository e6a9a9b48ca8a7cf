"""What each ready-made set of policies does to the requests of its tenants."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tidegate_engine.core.request import RejectionCode
from tidegate_operator.compiler import compile_pool
from tidegate_operator.resources import KINDS, EnginePool, Resource
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.objects import a_view
from tidegate_testing.simulation import Simulation, a_simulation
from tidegate_testing.simulation_load import a_load, charged_service, steady_cost

CATALOG = Path(__file__).parents[2] / "policies" / "catalog"
NAMESPACE = "team"
MODELS = {kind.__name__: kind for kind in KINDS}
STEP_SECONDS = 0.02
BLOCKS = 200


def policy_of(name: str) -> PolicySnapshot:
    """Compile a set as the operator does, applied to one namespace."""
    objects = [
        an_applied(document, age=age)
        for path in sorted((CATALOG / name).glob("*.yaml"))
        for age, document in enumerate(yaml.safe_load_all(path.read_text()))
    ]
    (pool,) = (one for one in objects if isinstance(one, EnginePool))
    return compile_pool(a_view(*objects), pool).snapshot


def an_applied(document: dict[str, object], *, age: int) -> Resource:
    """Read a document as the API server would give it back."""
    metadata = document["metadata"]
    assert isinstance(metadata, dict)
    model = MODELS[str(document["kind"])]
    namespace = "" if document["kind"] == "PriorityTier" else NAMESPACE
    stored = {
        "namespace": namespace,
        "uid": f"uid-{metadata['name']}",
        "generation": 1,
        "creationTimestamp": f"2026-01-01T00:00:{age:02}Z",
    }
    return model.model_validate({**document, "metadata": {**metadata, **stored}})


def an_engine(name: str, *, places: int = 4, host_blocks: int = 0) -> Simulation:
    return a_simulation(
        policy_of(name),
        blocks=BLOCKS,
        host_blocks=host_blocks,
        max_num_seqs=places,
        cost=steady_cost(STEP_SECONDS),
    )


def tenant(name: str) -> str:
    return f"{NAMESPACE}/{name}"


def service_between(engine: Simulation, steps: int) -> dict[str, float]:
    """Return each tenant's part of the service of the next steps, in percent."""
    before = charged_service(engine)
    engine.steps(steps)
    return percentages_since(before, engine)


def percentages_since(before: Mapping[str, float], engine: Simulation) -> dict[str, float]:
    gained = {name: now - before[name] for name, now in charged_service(engine).items()}
    return {name: 100 * part / sum(gained.values()) for name, part in gained.items()}


def keep_gold_busy(engine: Simulation, *, steps: int) -> None:
    for _ in range(steps):
        if not engine.scheduler.stats().tenants[tenant("gold")].waiting:
            name = f"gold-at-{engine.clock.now():.2f}"
            engine.submit(a_load(tenant("gold"), 1, prompt=40, output=40, name=name)[0])
        engine.step()


def test_fair_share_gives_three_teams_a_third_each_however_much_they_ask_for() -> None:
    engine = an_engine("fair-share")
    for name, requests in ("research", 400), ("search", 60), ("support", 60):
        engine.accept(*a_load(tenant(name), requests, prompt=40, output=40))
    engine.steps(50)

    shares = service_between(engine, 500)

    for name in "research", "search", "support":
        assert shares[tenant(name)] == pytest.approx(100 / 3, abs=3)


def test_fair_share_lends_a_teams_memory_and_gives_it_back() -> None:
    engine = an_engine("fair-share", places=64)
    engine.accept(*a_load(tenant("research"), 20, prompt=100, output=400))
    engine.steps(250)
    assert engine.used_blocks(tenant("research")) > 2 * BLOCKS // 5

    engine.accept(*a_load(tenant("search"), 3, prompt=150, output=20))
    engine.steps(3)

    assert engine.used_blocks(tenant("search")) >= 3 * 150 // 16


def test_gold_goes_first_and_bronze_keeps_a_tenth() -> None:
    engine = an_engine("gold-silver-bronze")
    for name in "bronze", "silver":
        engine.accept(*a_load(tenant(name), 200, prompt=40, output=40))
    # Gold's requests come as fast as they are served: more than its target lets wait is shed.
    keep_gold_busy(engine, steps=100)
    before = charged_service(engine)
    keep_gold_busy(engine, steps=600)

    share = percentages_since(before, engine)
    assert share[tenant("gold")] > 75
    assert share[tenant("bronze")] == pytest.approx(10, abs=3)
    assert share[tenant("silver")] < 15


def test_gold_is_told_at_once_when_its_target_cannot_be_met() -> None:
    engine = an_engine("gold-silver-bronze")
    first, *others = a_load(tenant("gold"), 60, prompt=60, output=200)
    engine.accept(first)
    engine.steps(2)

    refused = [answer for one in others if (answer := engine.submit(one)) is not None]

    assert 0 < len(refused) < len(others)
    assert {answer.code for answer in refused} == {RejectionCode.SHED}
    assert all((answer.retry_after_seconds or 0) > 0 for answer in refused)


def test_a_chat_takes_a_job_out_whose_work_is_kept() -> None:
    engine = an_engine("chat-and-batch", host_blocks=BLOCKS)
    jobs = a_load(tenant("jobs"), 8, prompt=40, output=120)
    engine.accept(*jobs)
    engine.steps(50)
    (chat,) = a_load(tenant("chat"), 1, prompt=40, output=20)

    engine.accept(chat)
    engine.steps(4)

    assert engine.output(chat.request_id)
    assert len(engine.preempted()) == 1
    engine.drain()
    stats = engine.scheduler.stats().tenants[tenant("jobs")]
    assert (stats.finished, stats.recomputed_tokens) == (8, 0)


def test_jobs_are_refused_first_while_a_chat_would_miss_its_target() -> None:
    engine = an_engine("chat-and-batch")
    engine.accept(*a_load(tenant("chat"), 40, prompt=60, output=400))
    engine.steps(2)

    answer = engine.submit(a_load(tenant("jobs"), 1, prompt=40, output=40)[0])

    assert answer is not None
    assert answer.code is RejectionCode.SHED
