import math

import pytest
import torch
from torch import Tensor

from tidegate_engine.core.sampling import SamplingParams
from tidegate_engine.model.sampler import sample

VOCABULARY = 5000
LOGITS = 2 * torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(3))


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
