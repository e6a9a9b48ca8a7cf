"""How long a step will take, learnt while serving, and how much prefill fits into a target.

Source of the idea: "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve"
(Agrawal et al., OSDI 2024), section 4.3: the token budget of a step follows from the latency
target and a profile of the step's time. Here the profile is fitted online, and the budget is
chosen anew for each step.
"""

from math import inf, sqrt
from typing import NamedTuple

from tidegate_engine.core.costs import ExecutorCosts

UNBOUNDED_TOKENS = 1 << 31
"""The prefill budget where prompt tokens cost nothing."""

_FORGETTING = 0.99  # a step counts for 1 % less with each one learnt after it
_DECODE_ONLY_EVERY = 8  # steps of decodes alone look alike: learning from each is wasted time
_LEAST_OF_PREDICTED = 0.7  # a time below this share of the prediction counts as this share
_LEAST_SECONDS = 1e-6  # and one below this as this
_LEAST_OF_PRIOR = 0.25  # prompt tokens never cost less than this share of their measured cost

_TYPICAL = (1.0, 512.0, 64.0, 65536.0, 262144.0)  # amounts in the step that gives the scale
_PRIOR_STEPS = 2.0  # how many typical steps the prior counts for, at first
_ANCHOR_STEPS = 0.01  # the same of the present coefficients, always

_MIN_MARGIN, _MAX_MARGIN, _FIRST_MARGIN = 0.05, 0.5, 0.2
_MARGIN_UP = 0.02
_MARGIN_DOWN = _MARGIN_UP / 199  # in balance when 1 step of 200 is longer than its margin allows


class StepFeatures(NamedTuple):
    """What a step computes, as far as it tells how long that takes.

    Attributes:
        prefill_tokens: Tokens of all prompt chunks.
        context_tokens: Context that the decodes read, added up over them.
        prefill_pairs: Pairs of a chunk's token and a token before it: `tokens * (start + tokens/2)`
            of each chunk, added up.
    """

    prefill_tokens: int
    decodes: int
    context_tokens: int
    prefill_pairs: int


class StepTimeModel:
    """The time of a step as a sum of its parts, by least squares with forgetting.

    What is made small is the sum of the squared relative errors, so that a step ten times slower
    than its like (a pause of the garbage collector) weighs a hundredth of an ordinary one. No
    coefficient is ever negative. The sums over steps are kept rather than an inverse of them: they
    stay sound under constraints and however long some features don't vary, and a sweep of
    coordinate descent per step, from where the last one ended, solves them closely enough.
    """

    def __init__(self, costs: ExecutorCosts) -> None:
        """Start from costs that were measured, or are known."""
        self._swap_block_seconds = costs.swap_block_seconds
        self._coefficients = [
            costs.step_seconds,
            costs.prefill_token_seconds,
            costs.decode_seconds,
            costs.context_token_seconds,
            costs.prefill_pair_seconds,
        ]
        # Short prompts ride along in steps that memory bounds, and would teach that prompt tokens
        # are free; the first long prompt would then come in a single chunk.
        self._floors = [
            0.0,
            costs.prefill_token_seconds * _LEAST_OF_PRIOR,
            0.0,
            0.0,
            costs.prefill_pair_seconds * _LEAST_OF_PRIOR,
        ]
        typical = sum(c * t for c, t in zip(self._coefficients, _TYPICAL, strict=True)) or 0.01
        scales = [(amount / typical) ** 2 for amount in _TYPICAL]
        self._anchors = [scale * _ANCHOR_STEPS for scale in scales]
        # The normal equations `products @ coefficients = totals`, first of the prior alone.
        self._products = [
            [scale * _PRIOR_STEPS if column == row else 0.0 for column in range(len(scales))]
            for row, scale in enumerate(scales)
        ]
        self._totals = [
            row[i] * coefficient
            for i, (row, coefficient) in enumerate(
                zip(self._products, self._coefficients, strict=True)
            )
        ]
        self._margin = _FIRST_MARGIN
        self._decode_only_steps = 0

    @property
    def costs(self) -> ExecutorCosts:
        """The coefficients as fitted; what swaps cost, as given."""
        fixed, token, decode, context, pair = self._coefficients
        return ExecutorCosts(
            step_seconds=fixed,
            prefill_token_seconds=token,
            decode_seconds=decode,
            context_token_seconds=context,
            prefill_pair_seconds=pair,
            swap_block_seconds=self._swap_block_seconds,
        )

    @property
    def margin(self) -> float:
        """Share of a target that a prefill budget leaves free, in [0.05, 0.5].

        It is what covers all but about one in 200 of the steps with prefill, since nothing else
        can be made shorter to meet a target. It grows fast and shrinks slowly.
        """
        return self._margin

    def predict(self, features: StepFeatures) -> float:
        """Return the seconds that such a step takes."""
        fixed, token, decode, context, pair = self._coefficients
        return (
            fixed
            + token * features[0]
            + decode * features[1]
            + context * features[2]
            + pair * features[3]
        )

    def observe(self, features: StepFeatures, seconds: float) -> None:
        """Learn from a step.

        Of steps with decodes alone, only every 8th is looked at. Ignored are steps that computed
        nothing, and times that are none: not finite, or not positive.
        """
        if not 0.0 < seconds < inf:
            return
        if features.prefill_tokens:
            predicted = self.predict(features)
            self._adapt_margin(seconds, predicted)
        else:
            if not features.decodes:
                return
            self._decode_only_steps += 1
            if self._decode_only_steps % _DECODE_ONLY_EVERY:
                return
            predicted = self.predict(features)
        self._learn(features, max(seconds, predicted * _LEAST_OF_PREDICTED, _LEAST_SECONDS))

    def prefill_budget(
        self, *, target_seconds: float, decodes: int, context_tokens: int, start: int
    ) -> int:
        """Return the most prompt tokens that keep a step within its target, less the margin.

        Args:
            target_seconds: Of the whole step.
            decodes: That share the step.
            context_tokens: Context that they read.
            start: Position at which the chunk begins.
        """
        fixed, token, decode, context, pair = self._coefficients
        room = target_seconds * (1.0 - self._margin)
        room -= fixed + decode * decodes + context * context_tokens
        if room <= 0.0:
            return 0
        # n tokens cost n * linear + n^2 * pair/2; this form of the root divides by no difference.
        linear = token + pair * start
        divisor = linear + sqrt(linear * linear + 2.0 * pair * room)
        if divisor * UNBOUNDED_TOKENS <= 2.0 * room:
            return UNBOUNDED_TOKENS
        return int(2.0 * room / divisor)

    def _adapt_margin(self, seconds: float, predicted: float) -> None:
        if seconds * (1.0 - self._margin) <= predicted:
            self._margin = max(_MIN_MARGIN, self._margin - _MARGIN_DOWN)
        # No margin would have held a step beyond twice its prediction: it says nothing of ours.
        elif seconds * (1.0 - _MAX_MARGIN) <= predicted:
            self._margin = min(_MAX_MARGIN, self._margin + _MARGIN_UP)

    def _learn(self, features: StepFeatures, seconds: float) -> None:
        """Add a step to the sums, relative to its time, and take one sweep towards their minimum.

        The anchor pulls each coefficient to where it is: a feature that hasn't varied for long has
        next to no weight in the sums, and must not be moved by what rounding leaves of it.
        """
        scale = 1.0 / seconds
        relative = (
            scale,
            features[0] * scale,
            features[1] * scale,
            features[2] * scale,
            features[3] * scale,
        )
        coefficients, totals = self._coefficients, self._totals
        for i, row in enumerate(self._products):
            weight = relative[i]
            row[:] = [
                _FORGETTING * product + weight * other
                for product, other in zip(row, relative, strict=True)
            ]
            totals[i] = total = _FORGETTING * totals[i] + weight
            fixed, token, decode, context, pair = coefficients
            residual = total - (
                row[0] * fixed + row[1] * token + row[2] * decode + row[3] * context + row[4] * pair
            )
            moved = coefficients[i] + residual / (row[i] + self._anchors[i])
            coefficients[i] = max(self._floors[i], moved)
