"""From a request body to what the scheduler gets: prompts to tokens, wishes to limits."""

import hashlib
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from tidegate_engine.core.request import Request
from tidegate_engine.core.sampling import SamplingParams
from tidegate_engine.server.caller import Caller
from tidegate_engine.server.error_codes import ErrorCode
from tidegate_engine.server.errors import ApiError
from tidegate_engine.server.schema import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    GenerationBody,
)
from tidegate_engine.server.served_model import ServedModel
from tidegate_policies.rules import TenantRule

ENCODE_INLINE_CHARS = 4000
"""Longer prompts are encoded in a thread: the event loop must not wait for them."""

MAX_WHOLE_LOGPROBS = 1 << 22
"""Most log-probabilities of an answer that isn't a stream; they are kept until its last token."""

_SEED_BITS = 64
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """What one HTTP request asks for.

    Attributes:
        requests: One for each choice, in order of the choices.
        prompt_tokens: Of all prompts, each counted once.
        prompt_param: The field that holds them.
        stops: Stop strings.
    """

    requests: tuple[Request, ...]
    prompt_tokens: int
    prompt_param: str
    stops: tuple[str, ...]

    def check_fits_queue_of(self, rule: TenantRule) -> None:
        """Refuse what would find the queue of its tenant full even if nothing else were in it.

        All choices queue at once, and all are refused if one is.

        Raises:
            ApiError: It never fits.
        """
        if rule.max_queued is not None and len(self.requests) > rule.max_queued:
            raise ApiError(
                ErrorCode.TOO_MANY_CHOICES,
                f"{len(self.requests)} choices queue at once, and of tenant {rule.tenant!r} at most"
                f" {rule.max_queued} requests (concurrency.maxQueued).",
                param="n",
            )
        tokens = sum(len(request.prompt_ids) for request in self.requests)
        if rule.max_queued_tokens is not None and tokens > rule.max_queued_tokens:
            raise ApiError(
                ErrorCode.PROMPT_TOO_LONG,
                f"The prompts of all choices have {tokens} tokens, which queue at once, and of"
                f" tenant {rule.tenant!r} at most {rule.max_queued_tokens}"
                " (concurrency.maxQueuedTokens).",
                param=self.prompt_param,
            )


async def take_completion(body: CompletionBody, *, caller: Caller, model: ServedModel) -> Intake:
    """Prepare a completion.

    Raises:
        ApiError: The prompt can't be served by this model.
    """
    prompts = await _completion_prompts(body, caller, model)
    sampling = _sampling(body, logprobs=body.logprobs, model=model)
    wanted = body.max_tokens or DEFAULT_COMPLETION_TOKENS
    return _intake(
        body, prompts, sampling, _Limit(wanted, "max_tokens", "prompt"), caller=caller, model=model
    )


async def take_chat(body: ChatBody, *, caller: Caller, model: ServedModel) -> Intake:
    """Prepare a chat completion.

    Raises:
        ApiError: The messages can't be served by this model.
    """
    messages = [message.as_prompt() for message in body.messages]
    texts = [message["content"] for message in messages]
    try:
        prompt = await _encode(
            texts,
            lambda: model.tokenizer.apply_chat_template(messages),
            param="messages",
            caller=caller,
            model=model,
        )
    except ValueError as error:
        raise ApiError(ErrorCode.INVALID_MESSAGES, f"{error}.", param="messages") from error
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = _sampling(body, logprobs=logprobs, model=model)
    wanted = body.max_completion_tokens or body.max_tokens or model.max_context_tokens
    param = "max_tokens" if body.max_tokens else "max_completion_tokens"
    limit = _Limit(wanted, param, "messages")
    return _intake(body, [prompt], sampling, limit, caller=caller, model=model)


def _intake(
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    limit: "_Limit",
    *,
    caller: Caller,
    model: ServedModel,
) -> Intake:
    if len(prompts) * body.n > MAX_CHOICES:
        raise ApiError(
            ErrorCode.TOO_MANY_CHOICES,
            f"n times the number of prompts is at most {MAX_CHOICES}.",
            param="n",
        )
    eos_ids = frozenset() if body.ignore_eos else model.tokenizer.eos_token_ids
    stop_ids = tuple(sorted(eos_ids.union(body.stop_token_ids or ())))
    requests = tuple(
        Request(
            request_id=f"{caller.request_id}.{number * body.n + choice}",
            tenant=caller.tenant,
            prompt_ids=prompt,
            max_output_tokens=_output_limit(prompt, limit, sampling, model),
            sampling=_for_choice(sampling, number * body.n + choice),
            stop_token_ids=stop_ids,
            ttft_seconds=caller.ttft_seconds,
            tier=caller.tier,
            arrived_at=caller.arrived_at,
            generation_id=caller.request_id,
        )
        for number, prompt in enumerate(map(tuple, prompts))
        for choice in range(body.n)
    )
    if not body.stream and sampling.logprobs is not None:
        _check_whole_logprobs(requests, 1 + sampling.logprobs)
    return Intake(
        requests=requests,
        prompt_tokens=sum(len(p) for p in prompts),
        prompt_param=limit.prompt_param,
        stops=body.stops,
    )


def _check_whole_logprobs(requests: Sequence[Request], logprobs_per_token: int) -> None:
    wanted = logprobs_per_token * sum(request.max_output_tokens for request in requests)
    if wanted > MAX_WHOLE_LOGPROBS:
        raise ApiError(
            ErrorCode.TOO_MANY_LOGPROBS,
            f"All choices' tokens, each with its alternatives, may have {wanted} log-probabilities;"
            f" without stream = true at most {MAX_WHOLE_LOGPROBS}.",
            param="logprobs",
        )


class _Limit(NamedTuple):
    """The most output tokens that a client wants.

    Attributes:
        param: The field that says so.
        prompt_param: The field that holds the prompt.
    """

    tokens: int
    param: str
    prompt_param: str


def _output_limit(
    prompt: Sequence[int], limit: _Limit, sampling: SamplingParams, model: ServedModel
) -> int:
    """Return how many output tokens there may be: as wanted, and as the model's context leaves."""
    room = model.max_context_tokens - len(prompt)
    if room < 1:
        raise ApiError(
            ErrorCode.PROMPT_TOO_LONG,
            f"The prompt has {len(prompt)} tokens; the model's context holds"
            f" {model.max_context_tokens}, one of them for the output.",
            param=limit.prompt_param,
        )
    tokens, what = min((limit.tokens, limit.param), (room, "what the context leaves"))
    if sampling.min_tokens > tokens:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"min_tokens: {sampling.min_tokens} is more than {what}, {tokens}.",
            param="min_tokens",
        )
    return tokens


async def _completion_prompts(
    body: CompletionBody, caller: Caller, model: ServedModel
) -> list[list[int]]:
    prompt = body.prompt
    texts = [prompt] if isinstance(prompt, str) else [p for p in prompt if isinstance(p, str)]
    if texts:
        encode = model.tokenizer.encode
        return await _encode(
            texts,
            lambda: [encode(text) for text in texts],
            param="prompt",
            caller=caller,
            model=model,
        )
    ids = [p for p in prompt if isinstance(p, int)]
    lists = [ids] if ids else [p for p in prompt if isinstance(p, list)]
    _check_in_vocabulary("prompt", lists, model)
    return lists


def _check_in_vocabulary(
    param: str, token_ids: Iterable[Collection[int]], model: ServedModel
) -> None:
    largest = max(map(max, filter(None, token_ids)), default=0)
    if largest >= model.tokenizer.vocab_size:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"{param}: token {largest} is not below the vocabulary's {model.tokenizer.vocab_size}.",
            param=param,
        )


async def _encode(
    texts: Sequence[str],
    encode: "Callable[[], T]",
    *,
    param: str,
    caller: Caller,
    model: ServedModel,
) -> "T":
    """Encode texts, unless one is so long that it can't fit however it is cut into tokens."""
    if sum(map(len, texts)) <= ENCODE_INLINE_CHARS:
        return encode()
    longest = max(map(len, texts))
    most_chars = model.max_context_tokens * model.tokenizer.max_token_chars
    if longest > most_chars:
        raise ApiError(
            ErrorCode.PROMPT_TOO_LONG,
            f"A text has {longest} characters; with the longest tokens that there are,"
            f" {most_chars} fill the model's context of {model.max_context_tokens} tokens.",
            param=param,
        )
    return await model.encoders.run(caller.tenant, encode)


def _sampling(body: GenerationBody, *, logprobs: int | None, model: ServedModel) -> SamplingParams:
    """Read how tokens are to be chosen; what isn't said is as the OpenAI API has it."""
    seed = secrets.randbits(_SEED_BITS) if body.seed is None else body.seed % (1 << _SEED_BITS)
    biases = {int(name): bias for name, bias in (body.logit_bias or {}).items()}
    _check_in_vocabulary("logit_bias", [biases], model)
    _check_in_vocabulary("stop_token_ids", [body.stop_token_ids or ()], model)
    return SamplingParams(
        temperature=_or(body.temperature, 1.0),
        min_p=_or(body.min_p, 0.0),
        top_k=body.top_k if body.top_k and body.top_k > 0 else None,
        top_p=_or(body.top_p, 1.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=tuple(sorted(biases.items())),
        min_tokens=body.min_tokens or 0,
        seed=seed,
        logprobs=logprobs,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _for_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Give every choice a seed of its own that follows from the first one's."""
    if choice == 0:
        return sampling
    digest = hashlib.sha256(f"{sampling.seed}.{choice}".encode()).digest()
    return replace(sampling, seed=int.from_bytes(digest[: _SEED_BITS // 8]))
