"""Behind the API, who is swapped out in the middle of a stream loses nothing of it."""

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from openai import Stream
from openai.types import Completion

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.plan import StepPlan, StepResult
from tidegate_engine.executor.base import Capacity, Executor
from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.executor.torch_executor import TorchExecutor
from tidegate_engine.model.llama import Llama
from tidegate_engine.model.loader import LoadedModel
from tidegate_engine.model.tokenizer import Tokenizer
from tidegate_engine.server.served_model import ServedModel
from tidegate_policies.rules import KvEstimate, PreemptionMode, PreemptionRule, WatermarkRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import (
    MODEL,
    RunningEngine,
    StepGate,
    a_keyed_tenant,
    a_running_engine,
)
from tidegate_testing.models import (
    TINY,
    one_torch_thread,
    smollm2,
    tiny_backend,
    tiny_model,
)
from tidegate_testing.policies import a_snapshot

__all__ = ["one_torch_thread", "smollm2"]

BLOCK_SIZE = 4

PROMPT = "hello hello 42, hello again"
GOLD_PROMPT = "Once upon a time there was a king who had 3 daughters. The eldest was called An"
LENGTH = 60
GOLD_LENGTH = 24
ENDLESS = 4000


class PacedExecutor:
    """Computes as another executor does; every step waits for a gate before its end."""

    def __init__(self, inner: Executor, gate: StepGate) -> None:
        self._inner = inner
        self._gate = gate

    @property
    def capacity(self) -> Capacity:
        return self._inner.capacity

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._inner.execute(plan)
        self._gate.advance(0.0)
        return result

    def measure(self) -> ExecutorCosts:
        return self._inner.measure()


@dataclasses.dataclass
class Served:
    """An engine with a real model, what paces it, and threads for its callers."""

    engine: RunningEngine
    gate: StepGate
    callers: ThreadPoolExecutor

    def stream(self, tenant: str, *, count: int) -> Stream[Completion]:
        return self.engine.openai(tenant).completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=count, stream=True, logprobs=1, seed=7
        )

    def whole(self, tenant: str, *, prompt: str = PROMPT, count: int = LENGTH) -> list[str]:
        """Return an answer, token by token."""
        return tokens_of(
            self.engine.openai(tenant).completions.create(
                model=MODEL, prompt=prompt, max_tokens=count, logprobs=1, seed=7
            )
        )

    def step(self) -> None:
        """Let the step pass that is held; from then on every step is held."""
        self.gate.let_one_pass()

    def step_until(self, condition: Callable[[], bool], what: str) -> None:
        def is_met() -> bool:
            self.step()
            return condition()

        eventually(is_met, what)

    def sample(self, name: str, **labels: str) -> float:
        """Scrape one series while steps pass."""
        scrape = self.callers.submit(self.engine.sample, name, **labels)
        self.step_until(scrape.done, "a scrape")
        return scrape.result() or 0.0

    def num_swapped(self) -> float:
        return self.sample("tidegate_requests", tenant="batch", state="swapped")

    def num_swaps(self) -> dict[str, float]:
        """Count batch's preemptions by swap, by cause."""
        labels = {"tenant": "batch", "mode": "swap"}
        return {
            cause: self.sample("tidegate_preemptions_total", cause=cause, **labels)
            for cause in ("displaced", "reclaimed", "pressure")
        }

    def host_blocks(self) -> float:
        return self.sample("tidegate_kv_blocks", state="host_used")


def tokens_of(answer: Completion) -> list[str]:
    """Return the tokens in a whole answer, or in an event of a stream."""
    return [
        token
        for choice in answer.choices
        if choice.logprobs is not None
        for token in choice.logprobs.tokens or ()
    ]


def policy() -> PolicySnapshot:
    """Gold owns the KV pool, and batch borrows it; nobody meets calm."""
    swaps = PreemptionRule(mode=PreemptionMode.SWAP, min_quantum_tokens=0)
    return a_snapshot(
        a_keyed_tenant("gold", tier="high", kv_nominal_percent=96),
        a_keyed_tenant("calm", tier="high"),
        a_keyed_tenant("batch", tier="low", preemption=swaps),
        tiers={"high": 10, "low": 0},
        watermarks=WatermarkRule(low_percent=98, high_percent=99),
        kv_estimate=KvEstimate.OPTIMISTIC,
    )


@contextmanager
def serving(model: LoadedModel, *, blocks: int = 2048, places: int = 1) -> Iterator[Served]:
    cache = KvCache.allocate(
        model.config, num_blocks=blocks, num_host_blocks=blocks, block_size=BLOCK_SIZE
    )
    gate = StepGate()
    served_model = ServedModel(
        name=MODEL,
        tokenizer=model.tokenizer,
        max_context_tokens=model.config.max_context_tokens,
        created=0,
    )
    with (
        ThreadPoolExecutor(max_workers=4) as callers,
        a_running_engine(
            policy(),
            executor=PacedExecutor(TorchExecutor(Llama(model.config, model.weights), cache), gate),
            model=served_model,
            max_num_seqs=places,
            max_unread_events=2 * ENDLESS,
        ) as engine,
    ):
        try:
            yield Served(engine, gate, callers)
        finally:
            gate.open()


def tiny() -> LoadedModel:
    """A model that goes on without end."""
    # Tied, a random model mostly repeats its input.
    config = dataclasses.replace(TINY, has_tied_embeddings=False, max_context_tokens=8192)
    tokenizer = Tokenizer(tiny_backend(), chat_template=None, eos_token_ids=frozenset())
    return dataclasses.replace(tiny_model(config), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("model", "blocks", "places"),
    [
        pytest.param("tiny", 2048, 1, id="one place"),
        pytest.param("tiny", 26, 8, id="few blocks"),
        pytest.param("smollm2", 128, 1, marks=pytest.mark.model, id="one place, SmolLM2"),
    ],
)
def test_a_stream_that_gold_interrupts_goes_on_without_a_lost_or_doubled_token(
    request: pytest.FixtureRequest, model: str, blocks: int, places: int
) -> None:
    loaded = tiny() if model == "tiny" else request.getfixturevalue("smollm2")
    with serving(loaded, blocks=blocks, places=places) as served:
        alone = served.whole("calm")
        gold_alone = served.whole("calm", prompt=GOLD_PROMPT, count=GOLD_LENGTH)
        got: list[str] = []

        def read() -> None:
            for event in served.stream("batch", count=LENGTH):
                got.extend(tokens_of(event))

        served.step()
        reading = served.callers.submit(read)
        served.step_until(lambda: len(got) >= 12, "the first of batch's tokens")
        gold = served.callers.submit(served.whole, "gold", prompt=GOLD_PROMPT, count=GOLD_LENGTH)
        eventually(lambda: len(served.engine.service.generations.running_ids) == 2, "gold")
        eventually(lambda: served.num_swapped() == 1, "batch's request swapped out")
        assert served.host_blocks() > 0
        assert not gold.done()
        num_got = len(got)
        served.gate.open()
        assert gold.result(timeout=60) == gold_alone
        reading.result(timeout=60)

        assert 12 <= num_got < LENGTH
        assert got == alone
        assert sum(served.num_swaps().values()) == 1
        assert served.num_swapped() == served.host_blocks() == 0
        assert served.sample("tidegate_swap_bytes_total", direction="out") > 0
        assert served.engine.is_idle()


def test_who_hangs_up_while_swapped_out_leaves_nothing_on_the_host() -> None:
    with serving(tiny()) as served:
        batch = served.stream("batch", count=ENDLESS)
        assert tokens_of(next(batch))
        gold = served.stream("gold", count=ENDLESS)
        assert tokens_of(next(gold))
        assert (served.num_swapped(), served.num_swaps()["displaced"]) == (1, 1)
        assert served.host_blocks() > 0
        batch.close()
        eventually(lambda: served.host_blocks() == 0, "no host block in use")
        assert served.num_swapped() == 0
        labels = {"tenant": "batch", "cause": "disconnect", "state": "swapped"}
        assert served.sample("tidegate_cancelled_total", **labels) == 1
        served.gate.open()
        assert tokens_of(next(gold))
        gold.close()
        eventually(served.engine.is_idle, "an idle engine")
        stats = served.engine.stats()
        assert stats.scheduler.kv_used_blocks == stats.tokens_after_cancel == 0
