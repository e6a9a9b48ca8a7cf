"""Over HTTP with SmolLM2, whoever is preempted twice is answered as alone, streamed or not."""

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from openai.types import Completion, CompletionChoice

from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.executor.torch_executor import TorchExecutor
from tidegate_engine.model.llama import Llama
from tidegate_engine.model.loader import LoadedModel
from tidegate_engine.server.served_model import ServedModel
from tidegate_policies.rules import KvEstimate, PreemptionMode, PreemptionRule, WatermarkRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import MODEL, RunningEngine, a_keyed_tenant, a_running_engine
from tidegate_testing.lab import TIE
from tidegate_testing.models import one_torch_thread, smollm2
from tidegate_testing.policies import a_snapshot

__all__ = ["one_torch_thread", "smollm2"]

pytestmark = pytest.mark.model

STORY = "Once upon a time there was a king who had three daughters. The eldest was called"
LETTER = "Dear Sir or Madam, I am writing to you about the train from London, which was"
GOLD_PROMPT = "The capital of France is Paris. The capital of Italy is"
LENGTH = 36
PLACES = 3


def policy(mode: PreemptionMode) -> PolicySnapshot:
    """Gold takes every place in the batch; nobody meets calm, who shares no cache with batch."""
    yields = PreemptionRule(mode=mode, min_quantum_tokens=0)
    return a_snapshot(
        a_keyed_tenant("gold", tier="high", kv_nominal_percent=96),
        a_keyed_tenant("calm", tier="high"),
        a_keyed_tenant("batch", tier="low", preemption=yields),
        tiers={"high": 10, "low": 0},
        watermarks=WatermarkRule(low_percent=98, high_percent=99),
        kv_estimate=KvEstimate.OPTIMISTIC,
    )


@pytest.fixture
def engine(smollm2: LoadedModel) -> Iterator[RunningEngine]:
    cache = KvCache.allocate(smollm2.config, num_blocks=60, num_host_blocks=60, block_size=4)
    model = ServedModel(
        name=MODEL,
        tokenizer=smollm2.tokenizer,
        max_context_tokens=smollm2.config.max_context_tokens,
        created=0,
    )
    with a_running_engine(
        policy(PreemptionMode.SWAP),
        executor=TorchExecutor(Llama(smollm2.config, smollm2.weights), cache),
        model=model,
        max_num_seqs=PLACES,
    ) as running:
        yield running


class Choices:
    """What came of each choice of an answer.

    Attributes:
        tokens: By the choice's index.
        gaps: Between the two best log-probabilities, beside each token.
    """

    def __init__(self) -> None:
        self.tokens: dict[int, list[str]] = defaultdict(list)
        self.gaps: dict[int, list[float]] = defaultdict(list)

    def has(self, count: int) -> bool:
        """Whether both choices of a stream have come so far."""
        return len(self.tokens) == 2 and min(map(len, self.tokens.values())) >= count

    def take(self, choices: list[CompletionChoice]) -> None:
        """Append a whole answer, or an event of a stream."""
        for choice in choices:
            if choice.logprobs is not None:
                self.tokens[choice.index] += choice.logprobs.tokens or []
                for likely in choice.logprobs.top_logprobs or []:
                    best = sorted(likely.values(), reverse=True)
                    self.gaps[choice.index].append(best[0] - best[1] if best[1:] else 1.0)


def stream(engine: RunningEngine, tenant: str, into: Choices) -> None:
    """Two seeded choices, streamed."""
    for event in engine.openai(tenant).completions.create(
        model=MODEL, prompt=LETTER, max_tokens=LENGTH, stream=True, n=2, logprobs=2, seed=7
    ):
        into.take(event.choices)


def whole(engine: RunningEngine, tenant: str) -> Choices:
    """One greedy choice, in one piece."""
    answer: Completion = engine.openai(tenant).completions.create(
        model=MODEL, prompt=STORY, max_tokens=LENGTH, temperature=0, logprobs=2
    )
    choices = Choices()
    choices.take(answer.choices)
    return choices


def interrupt(engine: RunningEngine) -> None:
    """Take every place in the batch for a few steps."""
    answer = engine.openai("gold").completions.create(
        model=MODEL, prompt=GOLD_PROMPT, max_tokens=3, n=PLACES, seed=1
    )
    assert len(answer.choices) == PLACES


def num_preemptions(engine: RunningEngine, mode: PreemptionMode) -> float:
    labels = {"tenant": "batch", "mode": mode.value.lower()}
    causes = ("displaced", "reclaimed", "pressure")
    return sum(
        engine.sample("tidegate_preemptions_total", cause=cause, **labels) or 0 for cause in causes
    )


def test_answers_that_gold_interrupts_twice_are_those_that_callers_get_alone(
    engine: RunningEngine,
) -> None:
    streamed_alone = Choices()
    stream(engine, "calm", streamed_alone)
    whole_alone = whole(engine, "calm")
    assert [len(tokens) for tokens in streamed_alone.tokens.values()] == [LENGTH, LENGTH]
    gaps = whole_alone.gaps[0]
    decided = next((i for i, gap in enumerate(gaps) if gap < TIE), LENGTH)
    assert decided >= LENGTH // 2

    # By the second time the prompts are in batch's prefix cache.
    for mode in (PreemptionMode.SWAP, PreemptionMode.RECOMPUTE):
        engine.apply(policy(mode))
        streamed = Choices()
        with ThreadPoolExecutor() as callers:
            reading = callers.submit(stream, engine, "batch", streamed)
            waiting = callers.submit(whole, engine, "batch")
            for seen in (4, 12):
                eventually(partial(streamed.has, seen + 1), f"more than {seen} tokens")
                interrupt(engine)
            reading.result(timeout=60)
            answered = waiting.result(timeout=60)
        assert num_preemptions(engine, mode) >= 2 * PLACES
        assert streamed.tokens == streamed_alone.tokens
        assert answered.tokens[0][:decided] == whole_alone.tokens[0][:decided]
        assert len(answered.tokens[0]) == LENGTH
    eventually(engine.is_idle, "an idle engine")
    assert engine.stats().scheduler.kv_used_blocks == 0
