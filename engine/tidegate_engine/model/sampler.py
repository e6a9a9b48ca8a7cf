"""From logits to tokens, for all rows of a step at once."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from tidegate_engine.core.plan import SampledToken
from tidegate_engine.core.sampling import SamplingParams

# Likeliest tokens looked at before a whole row is sorted; nearly always enough for top-p.
_NUM_CANDIDATES = 1024
# What a double holds exactly: with more, the largest draws would round to 1.
_UNIFORM_BITS = 53


def sample(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[SampledToken]:
    """Choose a token for every row.

    A row's choice depends on its own logits [vocabulary], parameters and position only; the
    position is that of the token to be chosen, in its sequence.
    """
    logits = logits.float()
    chosen = logits.argmax(dim=-1)
    drawing = [i for i, p in enumerate(params) if not p.is_greedy]
    cut = [i for i in drawing if params[i].top_p < 1.0 or params[i].top_k is not None]
    for rows, draw in (
        ([i for i in drawing if i not in set(cut)], _draw_from_all),
        (cut, _draw_from_likeliest),
    ):
        if rows:
            index = torch.tensor(rows, device=logits.device)
            chosen[index] = draw(
                logits[index], [params[i] for i in rows], [positions[i] for i in rows]
            )
    tokens = [SampledToken(token_id=token) for token in chosen.tolist()]
    reported = [i for i, p in enumerate(params) if p.logprobs is not None]
    for i, with_logprobs in zip(reported, _report(logits, chosen, reported, params), strict=True):
        tokens[i] = with_logprobs
    return tokens


def _report(
    logits: Tensor, chosen: Tensor, rows: list[int], params: Sequence[SamplingParams]
) -> list[SampledToken]:
    """Log-probabilities under the model's own distribution: before temperature and cuts."""
    if not rows:
        return []
    index = torch.tensor(rows, device=logits.device)
    logprobs = logits[index].log_softmax(dim=-1)
    own = logprobs.gather(1, chosen[index, None]).squeeze(1).tolist()
    count = max(params[i].logprobs or 0 for i in rows)
    values, ids = logprobs.topk(count, dim=-1)
    return [
        SampledToken(
            token_id=token,
            logprob=logprob,
            top_logprobs=tuple(zip(top, best, strict=True))[: params[i].logprobs],
        )
        for i, token, logprob, top, best in zip(
            rows, chosen[index].tolist(), own, ids.tolist(), values.tolist(), strict=True
        )
    ]


def _draw_from_all(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> Tensor:
    return _invert(_probabilities(logits, params), _uniform(params, positions, logits))


def _draw_from_likeliest(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> Tensor:
    vocabulary = logits.shape[-1]
    probabilities = _probabilities(logits, params)
    top_k = _column([min(p.top_k or vocabulary, vocabulary) for p in params], logits)
    top_p = _column([p.top_p for p in params], logits)
    uniform = _uniform(params, positions, logits)
    count = min(_NUM_CANDIDATES, vocabulary)
    values, ids = probabilities.topk(count, dim=-1)
    # Enough when the candidates hold all that top-k leaves, or, where only top-p cuts, its share.
    sums = values.sum(dim=-1, keepdim=True)
    enough = (top_k <= count) | ((top_k == vocabulary) & (sums > top_p))
    places = _invert(_cut(values, top_k, top_p), uniform)
    chosen = ids.gather(1, places[:, None]).squeeze(1)
    if count < vocabulary and not bool(enough.all()):
        short = (~enough).squeeze(1).nonzero().squeeze(1)
        values, ids = probabilities[short].sort(dim=-1, descending=True)
        places = _invert(_cut(values, top_k[short], top_p[short]), uniform[short])
        chosen[short] = ids.gather(1, places[:, None]).squeeze(1)
    return chosen


def _cut(values: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zero what top-k and then top-p leave out, of probabilities in descending order."""
    places = torch.arange(values.shape[-1], device=values.device)
    values = values.masked_fill(places >= top_k, 0.0)
    # A token stays while those before it hold less than the share: so the first always does. Only
    # top-k changes the whole that the share is of; without it that is 1, seen or not.
    before = values.cumsum(dim=-1) - values
    whole = torch.where(top_k <= values.shape[-1], values.sum(dim=-1, keepdim=True), 1.0)
    return values.masked_fill(before >= top_p * whole, 0.0)


def _probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    # Doubles, since a running sum over the vocabulary loses small shares in float32. The maximum
    # goes first: dividing by a tiny temperature would overflow.
    temperature = _column([p.temperature for p in params], logits)
    logits = logits.double()
    return ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return for each row the place at which its running sum passes `uniform` of the whole."""
    sums = weights.cumsum(dim=-1)
    places = torch.searchsorted(sums, uniform * sums[:, -1:], right=True).squeeze(1)
    # Rounding can put the target at the very end; the last place with weight is meant then.
    last = (weights > 0).cumsum(dim=-1).argmax(dim=-1)
    return torch.minimum(places, last)


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
