"""On SmolLM2, whoever is preempted twice gets the output it has alone, token for token.

Greedy outputs count until the two best tokens are closer than rounding: products of matrices of
other shapes are summed in another order, and what is that close may come out either way.
"""

import pytest

from tidegate_engine.core.plan import SampledToken
from tidegate_engine.core.request import Request
from tidegate_engine.core.sampling import SamplingParams
from tidegate_engine.core.sequence import Phase
from tidegate_engine.executor.clock import VirtualClock
from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.executor.torch_executor import TorchExecutor
from tidegate_engine.model.llama import Llama
from tidegate_engine.model.loader import LoadedModel
from tidegate_policies.rules import PreemptionMode, PreemptionRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.lab import GREEDY, SEEDED, Lab
from tidegate_testing.models import one_torch_thread, smollm2
from tidegate_testing.policies import a_tenant
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import Simulation, admitting_by_present_need

__all__ = ["one_torch_thread", "smollm2"]

pytestmark = pytest.mark.model

BLOCK_SIZE = 8
PROMPT_TOKENS = 4 * BLOCK_SIZE
OUTPUT_TOKENS = 26
NUM_VICTIMS = 3
# As many as the victims need at their longest.
NUM_BLOCKS = NUM_VICTIMS * -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE)

STORIES = (
    "Once upon a time there was a king who had three daughters. The eldest was called Anna, the"
    " second was called Maria, and the youngest had no name at all, since nobody had",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid."
    " The capital of Germany is Berlin. The capital of Austria is Vienna. The capital of",
    "To bake a simple bread you need flour, water, salt and yeast. First mix the flour with the"
    " salt in a large bowl, then add the yeast and the water, and knead it until",
    "Photosynthesis is the process by which green plants and some other organisms use sunlight to"
    " make food from carbon dioxide and water. It takes place in the leaves, where",
    "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen,"
    " fifteen, sixteen, seventeen, eighteen, nineteen, twenty, twenty-one, twenty-two",
    "Dear Sir or Madam, I am writing to you about the train from London to Oxford on Monday, which"
    " was more than two hours late. I would like to ask you",
)


class OneLab(Lab):
    """A lab that computes each request alone only once."""

    def __init__(self, executor: TorchExecutor) -> None:
        super().__init__(executor, VirtualClock())
        self._known: dict[Request, list[SampledToken]] = {}

    def alone(self, request: Request) -> list[SampledToken]:
        """Compute a request alone, or remember it."""
        if request not in self._known:
            self._known[request] = super().alone(request)
        return self._known[request]


@pytest.fixture(scope="module")
def lab(smollm2: LoadedModel) -> OneLab:
    cache = KvCache.allocate(
        smollm2.config, num_blocks=64, num_host_blocks=64, block_size=BLOCK_SIZE
    )
    return OneLab(TorchExecutor(Llama(smollm2.config, smollm2.weights), cache))


@pytest.fixture(scope="module")
def prompts(smollm2: LoadedModel) -> list[tuple[int, ...]]:
    tokens = [smollm2.tokenizer.encode(story) for story in STORIES]
    assert min(map(len, tokens)) >= PROMPT_TOKENS
    return [tuple(each[:PROMPT_TOKENS]) for each in tokens]


def policy(mode: PreemptionMode) -> PolicySnapshot:
    rule = PreemptionRule(mode=mode, min_quantum_tokens=1, max_preemptions=10)
    return admitting_by_present_need(
        a_tenant("gold", tier="high", kv_nominal_percent=96),
        a_tenant("batch", tier="low", preemption=rule),
    )


def victims(prompts: list[tuple[int, ...]], *, share_prefixes: bool) -> list[Request]:
    """Build the requests: greedy, seeded, and two choices of one prompt as `n` = 2 makes them."""
    text = prompts[0]
    begins_alike = (*text[: 2 * BLOCK_SIZE], *prompts[1][: BLOCK_SIZE + 3])
    texts = (text, text, begins_alike) if share_prefixes else prompts[:NUM_VICTIMS]
    other_seed = SamplingParams(seed=6, temperature=1.0, top_k=8)
    return [
        a_request(
            "batch",
            prompt=prompt,
            output=OUTPUT_TOKENS,
            request_id=f"batch-{i}",
            sampling=sampling,
        )
        for i, (prompt, sampling) in enumerate(
            zip(texts, (SEEDED, other_seed, GREEDY), strict=True)
        )
    ]


def wave(number: int, prompts: list[tuple[int, ...]]) -> list[Request]:
    """Build as many requests as there are places in the batch; no two begin alike."""
    return [
        a_request(
            "gold",
            prompt=(100 * number + i, *prompts[3 + i]),
            output=2,
            request_id=f"gold-{number}-{i}",
            sampling=(GREEDY, SEEDED)[i % 2],
        )
        for i in range(NUM_VICTIMS)
    ]


def produce(engine: Simulation, requests: list[Request], more: int) -> None:
    """Go on until all of them have so many further tokens."""
    wanted = {r.request_id: len(engine.output(r.request_id)) + more for r in requests}
    for _ in range(300):
        if all(len(engine.output(name)) >= count for name, count in wanted.items()):
            return
        engine.step()
    raise AssertionError("not within 300 steps")


def end(engine: Simulation, requests: list[Request]) -> None:
    for _ in range(300):
        if all(phase_of(engine, request) is Phase.ENDED for request in requests):
            return
        engine.step()
    raise AssertionError("not within 300 steps")


def phase_of(engine: Simulation, request: Request) -> Phase:
    seq = engine.scheduler._live.get(request.request_id)
    return Phase.ENDED if seq is None else seq.phase


@pytest.mark.parametrize(
    ("mode", "max_batched_tokens", "share_prefixes"),
    [
        (PreemptionMode.SWAP, 16, True),
        (PreemptionMode.SWAP, 64, False),
        (PreemptionMode.SWAP, 256, True),
        (PreemptionMode.RECOMPUTE, 16, False),
        (PreemptionMode.RECOMPUTE, 64, True),
        (PreemptionMode.RECOMPUTE, 256, False),
    ],
)
def test_whoever_is_preempted_twice_gets_the_output_it_has_alone(
    lab: OneLab,
    prompts: list[tuple[int, ...]],
    mode: PreemptionMode,
    max_batched_tokens: int,
    *,
    share_prefixes: bool,
) -> None:
    engine = lab.engine(
        policy(mode),
        blocks=NUM_BLOCKS,
        max_num_seqs=NUM_VICTIMS,
        max_batched_tokens=max_batched_tokens,
    )
    batch = victims(prompts, share_prefixes=share_prefixes)
    # One after the other, so that what they share is there when they come.
    for request in batch:
        engine.accept(request)
        produce(engine, [request], 1)
    gold = [wave(number, prompts) for number in (1, 2)]
    for each in gold:
        produce(engine, batch, 1)
        engine.accept(*each)
        end(engine, each)
    engine.drain()

    times_out = [one.request_id for one in engine.preempted()]
    assert min(times_out.count(request.request_id) for request in batch) >= 2
    swapped = sum(len(swap.host_blocks) for plan in engine.plans for swap in plan.swap_in)
    assert (swapped > 0) == (mode is PreemptionMode.SWAP)
    if share_prefixes:
        assert engine.scheduler.stats().tenants["batch"].cached_tokens >= 5 * BLOCK_SIZE
        assert any(plan.copies for plan in engine.plans)
    lab.assert_as_alone(engine, *batch, *gold[0], *gold[1])
    stats = engine.scheduler.stats()
    assert stats.kv_used_blocks == stats.host_used_blocks == 0
