"""What is done to logits before a temperature divides them: biases, barred tokens, penalties.

Only the entries concerned are touched: tokens in a context are few beside a vocabulary. They are
addressed as places in the logits laid out as one row, `row * V + token`.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from tidegate_engine.core.sampling import SamplingContext


def edit_logits(logits: Tensor, contexts: Sequence[SamplingContext], ends: Sequence[int]) -> Tensor:
    """Apply biases, bar the tokens that would end a request too early, then apply penalties.

    Args:
        logits: [S, V], contiguous; changed in place.
        contexts: Of the rows.
        ends: How many of its context's tokens each row follows.

    Returns:
        `logits`.
    """
    flat, vocabulary = logits.view(-1), logits.shape[-1]
    _add_biases(flat, vocabulary, contexts)
    barred = [context.barred_tokens(end) for context, end in zip(contexts, ends, strict=True)]
    if any(barred):
        flat[_Places(barred, flat, vocabulary).index] = -torch.inf
    _penalise_repetition(flat, vocabulary, contexts, ends)
    _penalise_output(flat, vocabulary, contexts, ends)
    return logits


class _Places:
    """Tokens of several rows as places in flat logits.

    Attributes:
        index: Of every token of the rows, in order; a token that occurs twice does so here.
    """

    def __init__(self, tokens: Sequence[Sequence[int]], flat: Tensor, vocabulary: int) -> None:
        lengths = [len(of_row) for of_row in tokens]
        self._lengths = torch.tensor(lengths, device=flat.device)
        # By NumPy, which reads a list of numbers several times as fast as PyTorch.
        ids = np.fromiter(chain.from_iterable(tokens), np.int64, count=sum(lengths))
        starts = torch.arange(len(tokens), device=flat.device) * vocabulary
        self.index = torch.from_numpy(ids).to(flat.device) + self.spread(starts)

    def spread(self, of_rows: Tensor) -> Tensor:
        """Repeat a value of each row for each of its tokens."""
        return of_rows.repeat_interleave(self._lengths)


def _add_biases(flat: Tensor, vocabulary: int, contexts: Sequence[SamplingContext]) -> None:
    biases = [context.params.logit_bias for context in contexts]
    if not any(biases):
        return
    places = _Places([[token for token, _ in of_row] for of_row in biases], flat, vocabulary)
    values = [bias for of_row in biases for _, bias in of_row]
    flat[places.index] += torch.tensor(values, dtype=flat.dtype, device=flat.device)


def _penalise_repetition(
    flat: Tensor, vocabulary: int, contexts: Sequence[SamplingContext], ends: Sequence[int]
) -> None:
    """Draw the logits of tokens in prompt and output towards less likely ones, each once."""
    seen = [
        context.token_ids[:end] if context.params.repetition_penalty != 1.0 else ()
        for context, end in zip(contexts, ends, strict=True)
    ]
    if not any(seen):
        return
    places = _Places(seen, flat, vocabulary)
    penalties = places.spread(_per_row([c.params.repetition_penalty for c in contexts], flat))
    # All are read before any is written: a token that occurs twice is written the same value twice.
    values = flat[places.index]
    flat[places.index] = torch.where(values > 0, values / penalties, values * penalties)


def _penalise_output(
    flat: Tensor, vocabulary: int, contexts: Sequence[SamplingContext], ends: Sequence[int]
) -> None:
    """Take the presence penalty once, and the frequency penalty as often as a token occurs."""
    outputs = [
        context.token_ids[context.num_prompt_tokens : end]
        if context.params.has_output_penalties
        else ()
        for context, end in zip(contexts, ends, strict=True)
    ]
    if not any(outputs):
        return
    places = _Places(outputs, flat, vocabulary)
    presence = _per_row([c.params.presence_penalty for c in contexts], flat)
    frequency = _per_row([c.params.frequency_penalty for c in contexts], flat)
    flat[places.index] = flat[places.index] - places.spread(presence)
    flat.index_add_(0, places.index, -places.spread(frequency))


def _per_row(values: Sequence[float], flat: Tensor) -> Tensor:
    return torch.tensor(values, dtype=flat.dtype, device=flat.device)
