"""What quantised weights cost: how much worse a model foretells a text."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tidegate_engine.core.plan import PlanRow
from tidegate_engine.core.sampling import SamplingContext, SamplingParams
from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.model.batch import build_batch
from tidegate_engine.model.linear import Quantization
from tidegate_engine.model.llama import Llama
from tidegate_engine.model.loader import LoadedModel

SAMPLE_TEXT = """\
The harbour of the old town lies open to the north, so that in winter the ships come in on the \
morning tide and leave again before dark. Whoever waits for one of them stands at the gate, a \
heavy frame of oak and iron that was built in 1847 and has been repaired eleven times since. When \
the water rises it closes by itself; nobody has to pull a chain. The keeper writes down each ship, \
its captain, what it carries and how long it stayed. On a quiet day that is a single line. In the \
week before the autumn market there may be sixty, and then he decides who goes first: fish before \
coal, since fish does not keep, and small boats between the large ones, because they need little \
room and their owners have no money to lose.

Question: If a train leaves at 9:40 and needs 2 hours and 35 minutes, when does it arrive?
Answer: It arrives at 12:15.

def moving_average(values, width):
    total = sum(values[:width])
    averages = [total / width]
    for old, new in zip(values, values[width:]):
        total += new - old
        averages.append(total / width)
    return averages

Water boils at 100 degrees Celsius at sea level. On a high mountain the air presses less, and it \
boils at a lower temperature, so that eggs take longer. The three states of matter that everybody \
knows are solid, liquid and gas. A metal conducts heat well because its electrons move freely.
"""
_BLOCK_SIZE = 16
_POSITIONS_PER_STEP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityLoss:
    """A quantised model beside the one that it was made from, on the same text.

    Attributes:
        num_tokens: How many tokens were foretold.
        perplexity: Of the model as it is; what a token's surprise amounts to, on average.
        quantised_perplexity: Of the quantised one.
        same_choice: Share of the tokens for which both have the same likeliest one, in [0, 1].
    """

    num_tokens: int
    perplexity: float
    quantised_perplexity: float
    same_choice: float

    def __str__(self) -> str:
        return (
            f"perplexity {self.perplexity:.2f} -> {self.quantised_perplexity:.2f}, the same"
            f" likeliest token for {self.same_choice:.0%} of {self.num_tokens}"
        )


def measure_quality_loss(
    model: LoadedModel,
    quantization: Quantization,
    *,
    text: str = SAMPLE_TEXT,
    kernel_cache: Path | None = None,
) -> QualityLoss:
    """Let a model and its quantised form read a text of two tokens at least; takes seconds.

    Needs memory for both.
    """
    token_ids = model.tokenizer.encode(text)
    exact = Llama(model.config, model.weights, kernel_cache=kernel_cache)
    quantised = Llama(
        model.config, model.weights, quantization=quantization, kernel_cache=kernel_cache
    )
    surprise = quantised_surprise = 0.0
    num_same = 0
    following = torch.tensor(token_ids[1:])
    with torch.inference_mode():
        like = model.weights.embedding
        steps = zip(
            _logits(exact, token_ids, like), _logits(quantised, token_ids, like), strict=True
        )
        for i, (ours, theirs) in enumerate(steps):
            expected = following[i * _POSITIONS_PER_STEP :][: len(ours)]
            surprise += _surprise(ours, expected)
            quantised_surprise += _surprise(theirs, expected)
            num_same += int((ours.argmax(dim=-1) == theirs.argmax(dim=-1)).sum())
    count = len(following)
    return QualityLoss(
        num_tokens=count,
        perplexity=math.exp(surprise / count),
        quantised_perplexity=math.exp(quantised_surprise / count),
        same_choice=num_same / count,
    )


def _surprise(logits: Tensor, expected: Tensor) -> float:
    logprobs = logits.double().log_softmax(dim=-1)
    return -float(logprobs.gather(1, expected.to(logits.device)[:, None]).sum())


def _logits(llama: Llama, token_ids: Sequence[int], like: Tensor) -> Iterator[Tensor]:
    """Logits after each token but the last, some positions at a time; in the dtype of `like`."""
    config, count = llama.config, len(token_ids) - 1
    num_blocks = -(-count // _BLOCK_SIZE)
    cache = KvCache.allocate(
        config,
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        dtype=like.dtype,
        device=like.device,
    )
    context = SamplingContext(
        params=SamplingParams(temperature=0.0), token_ids=token_ids, num_prompt_tokens=count
    )
    for start in range(0, count, _POSITIONS_PER_STEP):
        # A row for each position, as only a row's last token gets logits. They share the blocks:
        # in a step all keys and values are written before any is read.
        rows = [
            PlanRow(
                request_id="sample",
                start=position,
                token_ids=token_ids[position : position + 1],
                block_ids=range(num_blocks),
                samples=True,
                sampling=context,
            )
            for position in range(start, min(start + _POSITIONS_PER_STEP, count))
        ]
        batch = build_batch(
            rows,
            config,
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            device=like.device,
        )
        yield llama.forward(batch, cache.pool)
