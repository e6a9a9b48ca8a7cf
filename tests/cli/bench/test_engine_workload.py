from collections.abc import Sequence

import pytest

from tidegate_cli.bench.engine_workload import (
    PromptWriter,
    at_once,
    capped,
    padding_bound,
    scaled_trace,
    workload_w,
)
from tidegate_cli.bench.errors import BenchError
from tidegate_cli.traces import TraceRequest
from tidegate_engine.model.bytes_tokenizer import BytesTokenizer
from tidegate_testing.models import tiny_tokenizer


def a_request(prompt: int = 1, output: int = 1) -> TraceRequest:
    return TraceRequest(at_seconds=0.0, tenant="", prompt_tokens=prompt, output_tokens=output)


def test_workload_w_is_as_it_was_agreed() -> None:
    requests = workload_w(1.0)

    assert len(requests) == 64
    assert sum(one.prompt_tokens for one in requests) == 7185
    assert sum(one.output_tokens for one in requests) == 3616
    assert all(16 <= one.prompt_tokens <= 400 for one in requests)
    assert all(8 <= one.output_tokens <= 256 for one in requests)


def test_arrivals_come_faster_at_a_higher_rate() -> None:
    slow, fast = workload_w(1.0), workload_w(4.0)

    assert slow[-1].at_seconds == pytest.approx(4 * fast[-1].at_seconds)
    assert [one.at_seconds for one in slow] == sorted(one.at_seconds for one in slow)
    assert slow[-1].at_seconds == pytest.approx(64, rel=0.2)


def test_at_once_nobody_waits_to_be_sent() -> None:
    assert {one.at_seconds for one in at_once(workload_w(1.0))} == {0.0}


def test_a_cap_cuts_what_is_longer_and_nothing_else() -> None:
    requests = (a_request(5, 9), a_request(50, 90))

    assert capped(requests, prompt_tokens=10, output_tokens=20) == (
        a_request(5, 9),
        a_request(10, 20),
    )


@pytest.mark.parametrize("tokenizer", [BytesTokenizer(), tiny_tokenizer()])
def test_prompts_have_exactly_their_tokens_as_ids_and_as_text(
    tokenizer: BytesTokenizer,
) -> None:
    requests = [a_request(prompt) for prompt in (1, 2, 16, 17, 400)]

    prompts = PromptWriter(tokenizer, seed=1).write(requests)

    assert [len(one.token_ids) for one in prompts] == [1, 2, 16, 17, 400]
    assert [tokenizer.encode(one.text) for one in prompts] == [list(p.token_ids) for p in prompts]


def test_no_prompt_begins_as_another_does() -> None:
    writer = PromptWriter(BytesTokenizer(), seed=1)

    prompts = [*writer.write(workload_w(1.0)), *writer.write(workload_w(1.0))]

    assert len({one.token_ids[:16] for one in prompts}) == 128


def test_a_seed_writes_the_same_prompts() -> None:
    first, second, other = (
        PromptWriter(BytesTokenizer(), seed=seed).write(workload_w(1.0)) for seed in (1, 1, 2)
    )

    assert first == second
    assert first != other


def test_a_vocabulary_in_which_a_length_is_impossible_is_named() -> None:
    class OneMore(BytesTokenizer):
        """Spells a letter more than it was given."""

        def decode(self, token_ids: Sequence[int]) -> str:
            return super().decode(token_ids) + "."

    with pytest.raises(BenchError, match="no text of exactly 7 tokens"):
        PromptWriter(OneMore(), seed=1).write([a_request(7)])


def test_a_scaled_trace_keeps_the_shape_of_its_lengths() -> None:
    scaled = scaled_trace(1000, longest=256)

    assert len(scaled.requests) == 1000
    assert max(one.output_tokens for one in scaled.requests) == 256
    assert max(one.prompt_tokens for one in scaled.requests) == 256
    assert scaled.output_factor == pytest.approx(256 / 1000)
    assert scaled.lengths.output_p50 < scaled.lengths.output_p95 < 256


def test_padding_costs_what_the_longest_of_each_batch_makes_the_others_wait() -> None:
    requests = [a_request(output=output) for output in (1, 3, 4, 4, 2)]

    # Batches of two: 1 and 3 hold two slots for 3 steps, 4 and 4 for 4, 2 has its own for 2.
    assert padding_bound(requests, 2) == pytest.approx((6 + 8 + 2) / 14)
