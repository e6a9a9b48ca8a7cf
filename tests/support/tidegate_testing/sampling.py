"""Sampling contexts for rows made by hand."""

from collections.abc import Sequence

from tidegate_engine.core.sampling import SamplingContext, SamplingParams


def a_context(
    params: SamplingParams | None = None,
    token_ids: Sequence[int] = (),
    *,
    num_prompt_tokens: int | None = None,
    stop_token_ids: tuple[int, ...] = (),
) -> SamplingContext:
    """Build the context of a request whose tokens are all prompt, unless told otherwise."""
    return SamplingContext(
        params=params or SamplingParams(),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        stop_token_ids=stop_token_ids,
    )
