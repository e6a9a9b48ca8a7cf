import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tidegate_engine.core.plan import SampledToken
from tidegate_engine.core.sampling import SamplingContext, SamplingParams
from tidegate_engine.model import sampler
from tidegate_testing.sampling import a_context

VOCABULARY = 5000
LOGITS = 2 * torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(3))


def sample(
    logits: Tensor, params: Sequence[SamplingParams], ends: Sequence[int]
) -> list[SampledToken]:
    """Sample where there is nothing to look back at."""
    tokens = sampler.sample(logits, [a_context(p) for p in params], ends)
    return [token for token in tokens if token is not None]


def draws(logits: Tensor, count: int, **params: float) -> list[int]:
    """Tokens drawn from one distribution at `count` positions."""
    asked = SamplingParams(seed=11, **params)  # type: ignore[arg-type]
    chosen = sample(logits.expand(count, -1), [asked] * count, range(count))
    return [token.token_id for token in chosen]


def of_probabilities(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities).log()


def test_temperature_zero_takes_the_likeliest() -> None:
    tokens = sample(LOGITS, [SamplingParams(temperature=0.0)] * 8, range(8))
    assert [t.token_id for t in tokens] == LOGITS.argmax(dim=-1).tolist()


def test_draws_follow_the_distribution() -> None:
    tokens = draws(of_probabilities(0.1, 0.6, 0.3), 4000)
    shares = [tokens.count(i) / 4000 for i in range(3)]
    # Three standard deviations of a share of 4000 draws are at most 0.024.
    assert shares == pytest.approx([0.1, 0.6, 0.3], abs=0.024)


def test_temperature_sharpens_and_flattens() -> None:
    # p**(1/t), normalised: at 0.5 the shares are 1 : 36 : 9, at 2 they are 1 : 2.45 : 1.73.
    cold = draws(of_probabilities(0.1, 0.6, 0.3), 4000, temperature=0.5)
    hot = draws(of_probabilities(0.1, 0.6, 0.3), 4000, temperature=2.0)
    assert cold.count(1) / 4000 == pytest.approx(36 / 46, abs=0.024)
    assert hot.count(1) / 4000 == pytest.approx(2.449 / 5.181, abs=0.024)


def test_a_tiny_temperature_is_greedy_not_an_overflow() -> None:
    assert set(draws(LOGITS[0], 20, temperature=1e-320)) == {int(LOGITS[0].argmax())}


def test_top_k_leaves_the_k_likeliest() -> None:
    likeliest = set(LOGITS[0].topk(5).indices.tolist())
    assert set(draws(LOGITS[0], 500, top_k=5)) == likeliest


def test_top_p_leaves_the_smallest_set_that_holds_the_share() -> None:
    logits = of_probabilities(0.05, 0.5, 0.15, 0.3)
    assert set(draws(logits, 500, top_p=0.79)) == {1, 3}
    assert set(draws(logits, 500, top_p=0.81)) == {1, 3, 2}
    assert set(draws(logits, 500, top_p=1e-9)) == {1}


def test_top_p_is_a_share_of_what_top_k_leaves() -> None:
    # Of 0.4 + 0.3 + 0.2 the first holds 0.44 and the first two 0.78.
    logits = of_probabilities(0.1, 0.4, 0.3, 0.2)
    assert set(draws(logits, 300, top_k=3, top_p=0.42)) == {1}
    assert set(draws(logits, 300, top_k=3, top_p=0.75)) == {1, 2}


@pytest.mark.parametrize(
    "params", [{"top_p": 0.5}, {"top_p": 0.9, "top_k": 3000}, {"top_p": 0.2, "top_k": 3000}]
)
def test_cuts_wider_than_the_candidates_are_exact(params: dict[str, float]) -> None:
    flat = 0.001 * LOGITS[0]  # half of the probability takes some 2500 tokens
    order = flat.argsort(descending=True)
    shares = flat.double().softmax(-1)[order]
    kept = shares[: int(params.get("top_k", VOCABULARY))]
    count = int((kept.cumsum(0) < params["top_p"] * kept.sum()).sum()) + 1
    places = {token: i for i, token in enumerate(order.tolist())}
    drawn = [places[token] for token in draws(flat, 1000, **params)]
    assert count * 0.98 < max(drawn) < count


def sorted_draw(logits: Tensor, params: SamplingParams, position: int) -> int:
    """Draw from all tokens in order, equals by their ids, with the number of seed and position."""
    key = params.seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11
    shares = logits.softmax(-1).double().numpy()
    order = np.argsort(-shares, kind="stable")
    shares = shares[order]
    shares[params.top_k or len(shares) :] = 0.0
    shares[shares < params.min_p * shares[0]] = 0.0
    whole = shares.sum() if params.top_k or params.min_p else 1.0
    shares[np.cumsum(shares) - shares >= params.top_p * whole] = 0.0
    sums = np.cumsum(shares)
    return int(order[np.searchsorted(sums, number / 2.0**53 * sums[-1], side="right")])


@pytest.mark.parametrize("flatness", [0.001, 0.3, 1.0])
@pytest.mark.parametrize("step", [0.0, 0.05, 100.0])
@pytest.mark.parametrize(
    "cuts", [{"top_p": 0.7}, {"min_p": 0.02}, {"top_k": 70, "top_p": 0.95}, {"top_k": 3000}]
)
def test_cuts_draw_what_a_whole_sort_would_equals_by_their_ids(
    flatness: float, step: float, cuts: dict[str, float]
) -> None:
    # The larger the step, the more tokens are equal: with 100 all of a row are.
    logits = flatness * LOGITS
    if step:
        logits = (logits / step).round() * step
    rows = [SamplingParams(seed=seed, **cuts) for seed in range(8)]  # type: ignore[arg-type]
    for first in (0, 5000):
        ends = range(first, first + 8)
        drawn = [token.token_id for token in sample(logits, rows, ends)]
        assert drawn == [
            sorted_draw(of_row, params, end)
            for of_row, params, end in zip(logits, rows, ends, strict=True)
        ]


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    params = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_p=0.8),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3, top_k=40, temperature=0.7),
    ]
    together = sample(LOGITS[:4], params, [7, 8, 9, 10])
    alone = [sample(LOGITS[i : i + 1], [params[i]], [7 + i])[0] for i in range(4)]
    assert together == alone


def test_other_seeds_and_other_positions_draw_other_numbers() -> None:
    by_position = draws(LOGITS[0], 50)
    by_seed = [
        sample(LOGITS[:1], [SamplingParams(seed=seed)], [0])[0].token_id for seed in range(50)
    ]
    assert len(set(by_position)) > 20
    assert len(set(by_seed)) > 20


def test_logprobs_are_the_models_own_whatever_the_cuts() -> None:
    logits = of_probabilities(0.1, 0.6, 0.3).expand(2, -1)
    plain, cut = sample(
        logits,
        [
            SamplingParams(temperature=0.0, logprobs=2),
            SamplingParams(top_k=1, temperature=0.1, logprobs=0),
        ],
        [0, 0],
    )
    assert plain.logprob == pytest.approx(math.log(0.6))
    assert [i for i, _ in plain.top_logprobs] == [1, 2]
    assert [p for _, p in plain.top_logprobs] == pytest.approx([math.log(0.6), math.log(0.3)])
    assert cut.logprob == pytest.approx(math.log(0.6))
    assert cut.top_logprobs == ()


def test_without_being_asked_there_are_no_logprobs() -> None:
    token = sample(LOGITS[:1], [SamplingParams()], [0])[0]
    assert (token.logprob, token.top_logprobs) == (None, ())


def test_min_p_leaves_what_is_likely_beside_the_likeliest() -> None:
    logits = of_probabilities(0.05, 0.5, 0.15, 0.3)
    assert set(draws(logits, 500, min_p=0.29)) == {1, 3, 2}
    assert set(draws(logits, 500, min_p=0.31)) == {1, 3}
    # Of 0.5 and 0.3 the first holds 0.625.
    assert set(draws(logits, 300, min_p=0.31, top_p=0.6)) == {1}
    assert set(draws(logits, 300, min_p=0.31, top_p=0.65)) == {1, 3}


def test_min_p_wider_than_the_candidates_is_exact() -> None:
    flat = 0.001 * LOGITS[0]
    shares = flat.double().softmax(-1)
    drawn = set(draws(flat, 3000, min_p=0.998))
    kept = set((shares >= 0.998 * shares.max()).nonzero().squeeze(1).tolist())
    assert drawn <= kept
    assert len(drawn) > 0.5 * len(kept)


@pytest.mark.parametrize("size", [1, 7, 96, 250, 1024])
def test_every_size_of_vocabulary_is_drawn_from_evenly(size: int) -> None:
    drawn = Counter(draws(torch.zeros(size), 20 * size))
    # 20 of each are expected; below 2 or above 50 falls one in a million.
    assert len(drawn) == size
    assert max(drawn.values()) < 51


def test_the_first_of_equals_is_the_likeliest() -> None:
    logits = torch.zeros(2, 512)
    logits[0, [300, 40, 511]] = 1.0
    greedy = [SamplingParams(temperature=0.0)] * 2
    assert [token.token_id for token in sample(logits, greedy, [0, 0])] == [40, 0]


# -- against a plain reference -------------------------------------------------------------------

SMALL = 24
TOKENS = st.lists(st.integers(0, SMALL - 1), max_size=12)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.4, 1.0]),
    top_k=st.sampled_from([None, None, 1, 4, 23, 24, 100]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.95]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.3, 5.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.5, 0.7, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 0.4, 1.9]),
    logit_bias=st.dictionaries(
        st.integers(0, SMALL - 1), st.sampled_from([-100.0, -1.0, 0.5, 100.0]), max_size=4
    ).map(lambda biases: tuple(sorted(biases.items()))),
    min_tokens=st.sampled_from([0, 0, 3, 9]),
    seed=st.integers(0, 1000),
)


@st.composite
def contexts(draw: st.DrawFn) -> SamplingContext:
    prompt, output, later = draw(TOKENS), draw(TOKENS), draw(TOKENS)
    return SamplingContext(
        params=draw(PARAMS),
        token_ids=[*prompt, *output, *later],
        num_prompt_tokens=len(prompt),
        stop_token_ids=tuple(draw(st.sets(st.integers(0, SMALL - 1), max_size=3))),
    )


def allowed_shares(
    logits: npt.NDArray[np.float64], context: SamplingContext, end: int
) -> npt.NDArray[np.float64]:
    """The distribution that a row is to be drawn from, step by step in plain words."""
    params, prompt = context.params, context.num_prompt_tokens
    seen = list(context.token_ids[:end])
    output = seen[prompt:]
    logits = logits.copy()
    for token, bias in params.logit_bias:
        logits[token] += bias
    if len(output) < params.min_tokens:
        for token in context.stop_token_ids:
            logits[token] = -np.inf
    for token in set(seen):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token, count in Counter(output).items():
        logits[token] -= params.presence_penalty + count * params.frequency_penalty
    if params.temperature == 0.0:
        return np.asarray(logits == logits.max(), dtype=np.float64)
    shares: npt.NDArray[np.float64] = np.exp((logits - logits.max()) / params.temperature)
    shares /= shares.sum()
    shares[shares < params.min_p * shares.max() * (1 - 1e-6)] = 0.0
    order = np.argsort(-shares, kind="stable")
    shares[order[params.top_k or SMALL :]] = 0.0
    before = np.cumsum(shares[order]) - shares[order]
    shares[order[before >= params.top_p * shares.sum() * (1 + 1e-6)]] = 0.0
    return shares


@settings(max_examples=150, deadline=None)
@given(st.lists(contexts(), min_size=1, max_size=5), st.integers(0, 1 << 30))
def test_every_row_is_chosen_as_the_plain_reference_allows_and_as_alone(
    rows: list[SamplingContext], number: int
) -> None:
    # Apart by more than float32 can confuse, in an order that the number fixes.
    draw = torch.Generator().manual_seed(number)
    steps = torch.stack([torch.randperm(SMALL, generator=draw) for _ in rows])
    logits = 0.37 * steps - 3.0
    ends = [
        min(len(row.token_ids), row.num_prompt_tokens + (number + i) % 13)
        for i, row in enumerate(rows)
    ]
    before = logits.clone()
    together = sampler.sample(logits, rows, ends)
    assert torch.equal(logits, before)
    for i, (row, end, token) in enumerate(zip(rows, ends, together, strict=True)):
        shares = allowed_shares(logits[i].double().numpy(), row, end)
        assert token is not None
        assert shares[token.token_id] > 1e-9
        # What it will have later, and its neighbours, change nothing.
        cut = replace(row, token_ids=row.token_ids[:end])
        assert sampler.sample(logits[i : i + 1], [cut], [end]) == [token]


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": -0.4},
        {"min_p": 0.1, "temperature": 1.5},
        {"top_k": 6, "top_p": 0.8, "logit_bias": ((2, 1.5), (7, -2.0))},
    ],
)
def test_draws_follow_the_reference_distribution(params: dict[str, float]) -> None:
    count = 6000
    logits = torch.randn(SMALL, generator=torch.Generator().manual_seed(8))
    tokens = [1, 5, 2, 2, 9, 2, 11, 9]
    rows = [
        a_context(
            SamplingParams(seed=seed, **params),  # type: ignore[arg-type]
            tokens,
            num_prompt_tokens=3,
        )
        for seed in range(count)
    ]
    chosen = sampler.sample(logits.expand(count, -1), rows, [7] * count)
    drawn = Counter(token.token_id for token in chosen if token is not None)
    shares = allowed_shares(logits.double().numpy(), rows[0], 7)
    shares = shares / shares.sum()
    for token, share in enumerate(shares.tolist()):
        # Four standard deviations, and none at all of what is left out.
        assert drawn[token] / count == pytest.approx(
            share, abs=4 * math.sqrt(share * (1 - share) / count)
        )


def test_a_token_that_occurs_often_is_penalised_as_often_on_its_own_row_alone() -> None:
    penalised = SamplingParams(temperature=0.0, frequency_penalty=0.5)
    plain = SamplingParams(temperature=0.0)
    logits = torch.tensor([[2.0, 1.2, 0.0, 0.0]] * 4)
    rows = [
        a_context(penalised, [0, 0, 0, 1], num_prompt_tokens=4),  # in the prompt: doesn't count
        a_context(penalised, [0, 0], num_prompt_tokens=1),
        a_context(penalised, [0, 0, 0], num_prompt_tokens=1),
        a_context(plain, [0, 0, 0], num_prompt_tokens=1),
    ]
    chosen = sampler.sample(logits, rows, [4, 2, 3, 3])
    assert [token.token_id for token in chosen if token is not None] == [0, 0, 1, 0]


def test_log_probabilities_are_the_models_own_before_penalties_too() -> None:
    params = SamplingParams(temperature=0.0, logit_bias=((0, 50.0),), logprobs=20)
    token = sample(of_probabilities(0.1, 0.6, 0.3).unsqueeze(0), [params], [0])[0]
    assert token.token_id == 0
    assert token.logprob == pytest.approx(math.log(0.1))
    assert [i for i, _ in token.top_logprobs] == [1, 2, 0]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"presence_penalty": 1.0, "logprobs": 2}]
)
def test_logits_without_a_finite_maximum_give_no_token_and_harm_no_neighbour(
    broken: float, params: dict[str, float]
) -> None:
    asked = [SamplingParams(seed=7, **params)] * 3  # type: ignore[arg-type]
    logits = LOGITS[:3].clone()
    sound = sample(logits, asked, [1, 2, 3])
    if broken == -math.inf:
        logits[1] = broken
    else:
        logits[1, 40] = broken
    rows = [a_context(p) for p in asked]
    assert sampler.sample(logits, rows, [1, 2, 3]) == [sound[0], None, sound[2]]


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"presence_penalty": 1.0, "logprobs": 2}]
)
def test_a_row_whose_tokens_are_all_barred_gets_none_and_harms_no_neighbour(
    params: dict[str, float],
) -> None:
    logits = LOGITS[:3, :64]
    asked = SamplingParams(seed=7, min_tokens=3, **params)  # type: ignore[arg-type]
    barred = a_context(asked, stop_token_ids=tuple(range(64)))
    sound = a_context(asked, stop_token_ids=tuple(range(63)))
    first, second, third = sampler.sample(logits, [sound, barred, sound], [0, 0, 0])
    assert second is None
    assert first is not None
    assert third is not None
    assert (first.token_id, third.token_id) == (63, 63)
