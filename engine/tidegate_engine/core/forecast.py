"""How much KV requests will need at their longest, and the service they will take.

Source: "Past-Future Scheduler for LLM Serving under SLA Guarantees" (Gong et al., ASPLOS 2025),
section 3: output lengths from the history of finished requests, admission by the peak of all.
"""

from collections.abc import Iterable

from tidegate_engine.core.lengths import LengthEstimator
from tidegate_engine.core.sequence import Sequence
from tidegate_policies.admission import PredictedPeak
from tidegate_policies.fairness import OUTPUT_TOKEN_COST, PromptPrice
from tidegate_policies.rules import KvEstimate

_PREDICTED_AHEAD_TOKENS = 16
"""A prediction is made anew once the request has grown by so much."""


class Forecast:
    """Expectations about requests, from what was seen of finished ones.

    Attributes:
        lengths: What was seen.
        estimate: How admission expects, as the policy in force says.
        prompt_price: What prompts cost.
    """

    def __init__(self, *, block_size: int, prompt_price: PromptPrice) -> None:
        self.lengths = LengthEstimator()
        self.estimate = KvEstimate.PREDICTED
        self.prompt_price = prompt_price
        self._block_size = block_size

    def remaining_tokens(self, seq: Sequence) -> int:
        """Return how many output tokens are counted with for `seq` yet.

        Whoever can't be taken out again is counted with at its longest, whatever the estimate.
        """
        if self.estimate is KvEstimate.WORST_CASE or seq.must_fit_at_worst:
            return seq.max_tokens - seq.num_tokens
        if self.estimate is KvEstimate.OPTIMISTIC:
            return 0
        return self._predicted_total(seq) - seq.num_tokens

    def final_tokens(self, seq: Sequence) -> int:
        """Return the context that `seq` is counted with at its end; the last token isn't cached."""
        remaining = self.remaining_tokens(seq)
        return max(seq.num_tokens, seq.num_tokens + remaining - 1)

    def expected_cost(self, seq: Sequence) -> float:
        """Return the service that `seq` is expected to take yet, in cost units."""
        output_tokens = self._predicted_total(seq) - seq.num_tokens
        prompt = self.prompt_price.of(seq.charged_tokens, seq.uncharged_prompt_tokens)
        return prompt + OUTPUT_TOKEN_COST * output_tokens

    def peak_of(self, sequences: Iterable[Sequence]) -> PredictedPeak:
        """Return the most KV that these requests will hold together, if all run from now on."""
        together = list(sequences)
        return PredictedPeak([seq.num_tokens for seq in together], self._remaining_of(together))

    def blocks_with(self, peak: PredictedPeak, seq: Sequence) -> int:
        """Return the blocks of a peak which `seq` adds to."""
        tokens = peak.with_one_more(seq.num_tokens, self.remaining_tokens(seq))
        # A request's last block is half full in the mean, and holds a single token at worst.
        is_worst = self.estimate is KvEstimate.WORST_CASE
        count = len(peak) + 1
        return tokens // self._block_size + (count if is_worst else (count + 1) // 2)

    def _remaining_of(self, sequences: Iterable[Sequence]) -> list[int]:
        """Return `remaining_tokens` of many, at a fraction of the time where all was predicted."""
        if self.estimate is not KvEstimate.PREDICTED:
            return [self.remaining_tokens(seq) for seq in sequences]
        version = self.lengths.version
        return [
            seq.predicted_total - seq.num_tokens
            if seq.num_tokens < seq.predicted_until
            and seq.num_tokens < seq.predicted_total
            and seq.predicted_version == version
            and not seq.preemptions
            and seq.tenant.is_preemptible
            else self.remaining_tokens(seq)
            for seq in sequences
        ]

    def _predicted_total(self, seq: Sequence) -> int:
        version = self.lengths.version
        if seq.num_tokens >= seq.predicted_until or seq.predicted_version != version:
            seq.predicted_until = seq.num_tokens + _PREDICTED_AHEAD_TOKENS
            seq.predicted_version = version
            seq.predicted_total = seq.num_tokens + self.lengths.predict(
                seq.tenant.name, seq.num_output_tokens, seq.max_output_tokens
            )
        return max(seq.predicted_total, seq.num_tokens + 1)
