"""From logits to tokens, for all rows of a step at once.

Shapes: S rows that sample, V vocabulary. Whatever is done to a row is done by kernels that work row
by row: what a row gets doesn't depend on its neighbours.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tidegate_engine.core.plan import SampledToken
from tidegate_engine.core.sampling import SamplingContext, SamplingParams
from tidegate_engine.model.logit_edits import edit_logits

# Likeliest tokens looked at before a whole row is sorted.
_NUM_CANDIDATES = 64
# Maxima and sums of so many neighbours come first: kernels that look for a place are far slower
# than those that reduce.
_BLOCK = 256
# Below this the likeliest token has everything, up to gaps that float32 can't tell anyway.
_LEAST_TEMPERATURE = 1e-6
# What a double holds exactly: with more, the largest draws would round to 1.
_UNIFORM_BITS = 53


def sample(
    logits: Tensor, contexts: Sequence[SamplingContext], ends: Sequence[int]
) -> list[SampledToken | None]:
    """Choose a token for every row.

    A row's choice depends on its own logits, its context and its end only.

    Args:
        logits: [S, V]; left as they are.
        contexts: Of the rows.
        ends: How many of its context's tokens each row follows: the position of the chosen token.

    Returns:
        A token for each row; None where the logits, or what edits have left of them, are no
        distribution, since their largest isn't a finite number.
    """
    if not contexts:
        return []
    logits = logits.float()
    chosen = _likeliest(logits)
    is_usable = _is_finite_at(logits, chosen)
    edited = [i for i, context in enumerate(contexts) if context.params.edits_logits]
    drawing = [
        i
        for i, context in enumerate(contexts)
        if context.params.temperature and not context.params.edits_logits
    ]
    for rows, has_edits in ((edited, True), (drawing, False)):
        if rows:
            index = torch.tensor(rows, device=logits.device)
            own, own_ends = [contexts[i] for i in rows], [ends[i] for i in rows]
            own_logits = _select(logits, index)
            if has_edits:
                own_logits = edit_logits(own_logits.clone(), own, own_ends)
                is_usable[index] &= _is_finite_at(own_logits, _likeliest(own_logits))
            chosen[index] = _choose(own_logits, own, own_ends)
    tokens: list[SampledToken | None] = [
        SampledToken(token) if usable else None
        for token, usable in zip(chosen.tolist(), is_usable.tolist(), strict=True)
    ]
    for i, token in _report(logits, chosen, contexts):
        if tokens[i] is not None:
            tokens[i] = token
    return tokens


def _report(
    logits: Tensor, chosen: Tensor, contexts: Sequence[SamplingContext]
) -> list[tuple[int, SampledToken]]:
    """Log-probabilities under the model's own distribution, of the rows that ask for them."""
    rows = [i for i, context in enumerate(contexts) if context.params.logprobs is not None]
    if not rows:
        return []
    index = torch.tensor(rows, device=logits.device)
    counts = [contexts[i].params.logprobs or 0 for i in rows]
    logprobs = logits[index].log_softmax(dim=-1)
    own = logprobs.gather(1, chosen[index].unsqueeze(1)).squeeze(1).tolist()
    values, ids = logprobs.topk(min(max(counts), logits.shape[-1]), dim=-1)
    likeliest = zip(ids.tolist(), values.tolist(), strict=True)
    return [
        (i, SampledToken(token, logprob, tuple(zip(top[:count], best[:count], strict=True))))
        for i, token, logprob, count, (top, best) in zip(
            rows, chosen[index].tolist(), own, counts, likeliest, strict=True
        )
    ]


def _choose(logits: Tensor, contexts: Sequence[SamplingContext], ends: Sequence[int]) -> Tensor:
    """Choose from logits as they are after edits."""
    params = [context.params for context in contexts]
    if all(p.temperature for p in params):
        chosen = torch.zeros(len(params), dtype=torch.int64, device=logits.device)
    else:
        chosen = _likeliest(logits)
    for has_cuts in (False, True):
        rows = [i for i, p in enumerate(params) if p.temperature and p.has_cuts is has_cuts]
        if rows:
            index = torch.tensor(rows, device=logits.device)
            own = [params[i] for i in rows]
            probabilities = _probabilities(_select(logits, index), own)
            uniform = _uniform(own, [ends[i] for i in rows], logits)
            if has_cuts:
                cuts = _Cuts(own, probabilities)
                chosen[index] = _draw_from_likeliest(probabilities, cuts, uniform)
            else:
                chosen[index] = _draw_from_all(probabilities, uniform)
    return chosen


def _is_finite_at(logits: Tensor, places: Tensor) -> Tensor:
    return logits.gather(1, places.unsqueeze(1)).squeeze(1).isfinite()


def _likeliest(logits: Tensor) -> Tensor:
    """Return the place of the largest of each row, the first of several; NaN is the largest."""
    blocks = _in_blocks(logits)
    block = blocks.amax(dim=-1).argmax(dim=-1)
    return block * blocks.shape[-1] + _block_of_each(blocks, block).argmax(dim=-1)


def _draw_from_all(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Draw a block, then with what the number says beyond that, a token of it."""
    blocks = _in_blocks(probabilities)
    weights = blocks.sum(dim=-1).double()
    block = _invert(weights, uniform)
    ends = weights.cumsum(dim=-1)
    end, weight = (t.gather(1, block.unsqueeze(1)) for t in (ends, weights))
    beyond = (uniform * ends[:, -1:] - (end - weight)) / weight
    own = _block_of_each(blocks, block).double()
    return block * blocks.shape[-1] + _invert(own, beyond.clamp(0.0, 1.0))


def _in_blocks(rows: Tensor) -> Tensor:
    """Return [S, V] as [S, blocks, tokens in each]."""
    return rows.reshape(len(rows), -1, math.gcd(rows.shape[-1], _BLOCK))


def _block_of_each(blocks: Tensor, block: Tensor) -> Tensor:
    return blocks[torch.arange(len(block), device=block.device), block]


def _select(logits: Tensor, rows: Tensor) -> Tensor:
    """Return some rows, in ascending order; all of them as they are, without a copy."""
    return logits if len(rows) == len(logits) else logits[rows]


def _draw_from_likeliest(probabilities: Tensor, cuts: "_Cuts", uniform: Tensor) -> Tensor:
    """Draw from what is left by min-p, top-k and top-p, looking at few candidates if these do."""
    num_rows, vocabulary = probabilities.shape
    chosen = torch.zeros(num_rows, dtype=torch.int64, device=probabilities.device)
    left = torch.arange(num_rows, device=probabilities.device)
    for count in (min(_NUM_CANDIDATES, vocabulary), vocabulary):
        of_rows = _select(probabilities, left)
        kept = _descending(of_rows) if count == vocabulary else of_rows.topk(count).values.double()
        is_done = cuts.apply(kept, left) | (count == vocabulary)
        done = is_done.nonzero().squeeze(1)
        places = _invert(kept, uniform[left])[done]
        chosen[left[done]] = _tokens_at(places, _select(kept, done), _select(of_rows, done))
        left = left[~is_done]
        if not len(left):
            break
    return chosen


def _descending(rows: Tensor) -> Tensor:
    """Sort the values of each row, as doubles.

    Without the places that they come from it is far faster, most so by NumPy on a CPU.
    """
    if rows.device.type == "cpu":
        return torch.from_numpy(np.sort(rows.numpy(), axis=-1)[:, ::-1].astype(np.float64))
    return rows.sort(dim=-1, descending=True).values.double()


def _tokens_at(places: Tensor, kept: Tensor, probabilities: Tensor) -> Tensor:
    """Return the tokens at some places of rows sorted from the likeliest, equals by their ids.

    Args:
        places: One of each row, where something is kept.
        kept: The sorted rows up to that place at least, as doubles.
        probabilities: The same rows by token.
    """
    value = kept.gather(1, places.unsqueeze(1))
    place_among_equals = places - (kept > value).sum(dim=-1)
    equals, vocabulary = _equals(probabilities, value.float()), probabilities.shape[-1]
    starts = torch.arange(len(places), device=places.device) * vocabulary
    # A row of NaN equals nothing, not even itself; whatever it gets here isn't used.
    found = (torch.searchsorted(equals, starts) + place_among_equals).clamp_(0, len(equals))
    return torch.cat((equals, equals.new_zeros(1)))[found] % vocabulary


def _equals(rows: Tensor, values: Tensor) -> Tensor:
    """Return where rows have each its value [S, 1], in the rows laid out as one."""
    if rows.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(rows.numpy() == values.numpy()))
    return (rows == values).view(-1).nonzero().squeeze(1)


class _Cuts:
    """What leaves unlikely tokens out, one row for each request."""

    def __init__(self, params: Sequence[SamplingParams], like: Tensor) -> None:
        vocabulary = like.shape[-1]
        self._vocabulary = vocabulary
        self._min_p = _column([p.min_p for p in params], like)
        self._top_k = _column([min(p.top_k or vocabulary, vocabulary) for p in params], like)
        self._top_p = _column([p.top_p for p in params], like)

    def apply(self, values: Tensor, rows: Tensor) -> Tensor:
        """Zero what is left out.

        Args:
            values: Probabilities of the likeliest tokens, in descending order, as doubles; changed
                in place, which spares the system from handing out memory as large again.
            rows: Whose they are.

        Returns:
            For each row whether nothing else could have been kept.
        """
        min_p, top_k, top_p = self._min_p[rows], self._top_k[rows], self._top_p[rows]
        count = values.shape[-1]
        places = torch.arange(count, device=values.device)
        least = min_p * values[:, :1]
        is_whole = (top_k <= count) | (values[:, -1:] < least)
        values.masked_fill_((places >= top_k) | (values < least), 0.0)
        # A token stays while those before it hold less than the share: so the first always does.
        # It is a share of what other cuts have left, which has to be seen whole; else of all.
        # They are summed up in one order, however many are seen and however many rows there are.
        through = values.cumsum(dim=-1)
        sums = through[:, -1:].clone()
        before = through.sub_(values)
        only_top_p = (min_p == 0.0) & (top_k == self._vocabulary)
        values.masked_fill_(before >= top_p * torch.where(only_top_p, 1.0, sums), 0.0)
        is_enough = is_whole | (only_top_p & (sums >= top_p))
        return is_enough.squeeze(1)


def _probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    temperatures = [max(p.temperature, _LEAST_TEMPERATURE) for p in params]
    return (logits / _column(temperatures, logits).float()).softmax(dim=-1)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return for each row the place at which its running sum passes `uniform` of the whole.

    Args:
        weights: [S, places], as doubles: a running sum over the vocabulary would lose small shares
            in float32.
        uniform: [S, 1], in [0, 1).
    """
    sums = weights.cumsum(dim=-1)
    whole = sums[:, -1:]
    # Rounding mustn't put the target at the end, where no place is left to pass it. The first sum
    # above it is at a place with weight.
    target = torch.minimum(uniform * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    places = torch.searchsorted(sums, target, right=True).squeeze(1)
    return places.clamp_(max=weights.shape[-1] - 1)  # only where the sums are NaN


def _uniform(params: Sequence[SamplingParams], positions: Sequence[int], like: Tensor) -> Tensor:
    """One number in [0, 1) a row, fixed by seed and position on every machine and device."""
    return _column(
        [
            _hash(p.seed, position) / 2.0**_UNIFORM_BITS
            for p, position in zip(params, positions, strict=True)
        ],
        like,
    )


def _hash(seed: int, position: int) -> int:
    key = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _UNIFORM_BITS)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)
