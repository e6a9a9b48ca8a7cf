"""What `tidegate bench engine` sends: lengths, arrivals, and prompts of exactly those lengths."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import accumulate
from typing import Protocol

from tidegate_cli.bench.batching import load_trace
from tidegate_cli.bench.errors import BenchError
from tidegate_cli.prompts import prompt_of
from tidegate_cli.traces import LengthSummary, TraceRequest, summarize_lengths

WORKLOAD_W = "smollm2_w64.json"
PADDED_TRACE = "azure2023_conv"
"""Whose lengths continuous and static batching are compared on."""

_MOST_DRAWS = 50


class Vocabulary(Protocol):
    """What writing prompts needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedRequest:
    """A request to be sent.

    Attributes:
        at_seconds: From the start of the run.
        text: The prompt.
        token_ids: The same in the served model's vocabulary.
        output_tokens: All of them are generated, whatever the model says.
    """

    at_seconds: float
    text: str
    token_ids: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledTrace:
    """A recorded trace, shortened for a small model.

    Attributes:
        prompt_factor: What the recorded prompt lengths were multiplied by.
        output_factor: And the output lengths.
    """

    requests: tuple[TraceRequest, ...]
    prompt_factor: float
    output_factor: float

    @property
    def lengths(self) -> LengthSummary:
        """How many, and how long."""
        return summarize_lengths(self.requests)


def workload_w(rate: float) -> tuple[TraceRequest, ...]:
    """Return the lengths of workload W, as Poisson arrivals of `rate` requests a second."""
    file = resources.files("tidegate_cli") / "recorded" / WORKLOAD_W
    rows = json.loads(file.read_text(encoding="utf-8"))["requests"]
    times = accumulate(row["gap_s"] / rate for row in rows)
    return tuple(
        TraceRequest(
            at_seconds=at,
            tenant="",
            prompt_tokens=row["prompt_tokens"],
            output_tokens=row["output_tokens"],
        )
        for at, row in zip(times, rows, strict=True)
    )


def at_once(requests: Sequence[TraceRequest]) -> tuple[TraceRequest, ...]:
    """Let all arrive at the start."""
    return tuple(replace(request, at_seconds=0.0) for request in requests)


def capped(
    requests: Sequence[TraceRequest], *, prompt_tokens: int, output_tokens: int
) -> tuple[TraceRequest, ...]:
    """Cut off what is longer."""
    return tuple(
        replace(
            request,
            prompt_tokens=min(request.prompt_tokens, prompt_tokens),
            output_tokens=min(request.output_tokens, output_tokens),
        )
        for request in requests
    )


def scaled_trace(num_requests: int, *, longest: int) -> ScaledTrace:
    """Return the first requests of `PADDED_TRACE`, all at once.

    Prompts and outputs keep the shape of their lengths: each side has one factor, by which its
    longest becomes `longest`.
    """
    recorded = load_trace(PADDED_TRACE, None)[:num_requests]
    by_prompt = longest / max(one.prompt_tokens for one in recorded)
    by_output = longest / max(one.output_tokens for one in recorded)
    return ScaledTrace(
        requests=tuple(
            TraceRequest(
                at_seconds=0.0,
                tenant="",
                prompt_tokens=max(1, round(one.prompt_tokens * by_prompt)),
                output_tokens=max(1, round(one.output_tokens * by_output)),
            )
            for one in recorded
        ),
        prompt_factor=by_prompt,
        output_factor=by_output,
    )


def padding_bound(requests: Sequence[TraceRequest], slots: int) -> float:
    """Return output tokens and padding over output tokens, in batches of `slots` as they come.

    What continuous batching can gain at most where every row of a decode step costs the same and
    prompts cost nothing.
    """
    outputs = [request.output_tokens for request in requests]
    batches = [outputs[i : i + slots] for i in range(0, len(outputs), slots)]
    return sum(max(batch) * len(batch) for batch in batches) / sum(outputs)


class PromptWriter:
    """Writes texts that are exactly so many tokens long, no two with the same beginning.

    So no server finds one in its prefix cache, neither within a run nor from an earlier one.
    """

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        self._vocabulary = vocabulary
        self._rng = random.Random(seed)
        self._num_written = 0

    def write(self, requests: Sequence[TraceRequest]) -> tuple[SizedRequest, ...]:
        """Give each request its prompt.

        Raises:
            BenchError: No text was found that has the length of one of them.
        """
        return tuple(self._sized(request) for request in requests)

    def _sized(self, request: TraceRequest) -> SizedRequest:
        self._num_written += 1
        for _ in range(_MOST_DRAWS):
            # More words than needed, cut to length: a word is a token at least.
            words = prompt_of(request.prompt_tokens, self._rng)
            token_ids = self._vocabulary.encode(f"{self._num_written}. {words}")
            token_ids = token_ids[: request.prompt_tokens]
            text = self._vocabulary.decode(token_ids)
            # Where a word was cut in two, its half may be other tokens when it stands alone.
            if self._vocabulary.encode(text) == token_ids:
                return SizedRequest(
                    at_seconds=request.at_seconds,
                    text=text,
                    token_ids=tuple(token_ids),
                    output_tokens=request.output_tokens,
                )
        raise BenchError(f"no text of exactly {request.prompt_tokens} tokens was found")
