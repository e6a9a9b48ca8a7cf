"""The shapes of what the API answers, for its OpenAPI document; they are written by `render`."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Reason = Literal["stop", "length"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorObject(_Answer):
    """What is wrong, in words and as a code that programs may act on."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(_Answer):
    """Every error."""

    error: ErrorObject


class CachedTokens(_Answer):
    """Prompt tokens that were found in the prefix cache."""

    cached_tokens: Count


class Usage(_Answer):
    """Token counts of one response."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(_Answer):
    """Each property of all tokens."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[Count]


class CompletionChoice(_Answer):
    """One completion of a prompt."""

    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Reason


class CompletionAnswer(_Answer):
    """`POST /v1/completions` without a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[CompletionChoice]
    usage: Usage


class SpelledToken(_Answer):
    """One token; its bytes are not known when it is a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenToken(SpelledToken):
    """One output token and the likeliest ones at its place."""

    top_logprobs: list[SpelledToken]


class ChatLogprobs(_Answer):
    """The tokens of a message."""

    content: list[ChosenToken]
    refusal: None


class AnswerMessage(_Answer):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Answer):
    """One answer to a chat."""

    index: Count
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason


class ChatAnswer(_Answer):
    """`POST /v1/chat/completions` without a stream."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: Usage


class Model(_Answer):
    """A model that is served here."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(_Answer):
    """All models that are served here."""

    object: Literal["list"]
    data: list[Model]


class Cancelled(_Answer):
    """A request that was cancelled."""

    id: str
    object: Literal["request"]
    cancelled: Literal[True]


class Alive(_Answer):
    """Whether the engine's thread runs."""

    alive: bool


class Ready(_Answer):
    """Whether requests would be served, and what that lacks."""

    ready: bool
    lacking: list[str]


class PolicySummary(_Answer):
    """What a policy says, without keys."""

    batching: dict[str, int | float | None]
    watermarks: dict[str, int]
    kv_estimate: str
    unknown_tenants: str
    tiers: list[dict[str, str | int | float | bool | None]]
    tenants: list[dict[str, str | int]]


class PolicyAnswer(_Answer):
    """The policy in force; before the first there is none.

    Attributes:
        step: The first step that was planned under it.
        since: When it took effect; RFC 3339.
    """

    revision: Count
    digest: str
    step: Count
    since: str | None
    snapshot: PolicySummary | None


class DrainAnswer(_Answer):
    """How far a drain is."""

    draining: bool
    running: Count
    drained: bool


class DecisionAnswer(_Answer):
    """What was decided about one request, and why.

    Attributes:
        time: RFC 3339.
        request_id: Of one choice of a request: the response's id, a dot, and the choice's number.
        beneficiary: For whom it was preempted; null where that is another tenant's and may not be
            told, as its tenant is then.
        beneficiary_tier: The tier in which that one is served.
    """

    time: str
    step: Count
    revision: Count
    watermark: str
    request_id: str
    tenant: str
    verdict: str
    reason: str
    beneficiary: str | None
    beneficiary_tenant: str | None
    beneficiary_tier: str | None


class DecisionsAnswer(_Answer):
    """Decisions, the oldest first."""

    object: Literal["list"]
    data: list[DecisionAnswer]


class Place(_Answer):
    """Where a request stands.

    Attributes:
        state: `waiting`, `running` or `swapped`; of one that has left the engine `finished`, or the
            verdict that ended it.
        tier: In which it is served; null once it has left.
        queued_since: When it arrived; RFC 3339.
        position: Among its tenant's waiting requests of the tier, 1 = next; null while it runs.
        waits_for: `slot` in the batch, `kv` memory, its tenant's `quota`, a higher `tier`, its
            `turn` in its own, the end of a `hold`, or, when it was refused, of its `rate` limit.
        reason: What the last decision said.
        first_token_in_seconds: As predicted now; null once that has come.
        predicted_ttft_seconds: The same from its arrival on.
    """

    state: str
    tier: str | None
    queued_since: str | None
    position: Annotated[int, Field(ge=1)] | None
    waits_for: Literal["slot", "kv", "quota", "tier", "turn", "hold", "rate"] | None
    reason: str | None
    first_token_in_seconds: float | None
    predicted_ttft_seconds: float | None


class PreemptionAnswer(_Answer):
    """When a request was taken out, and for whom: another tenant's is told by its tier alone."""

    time: str
    cause: str
    request_id: str | None
    tenant: str | None
    tier: str | None


class ExplainedRequest(Place):
    """One request and its decisions, the oldest first."""

    id: str
    tenant: str
    preempted: list[PreemptionAnswer]
    decisions: list[DecisionAnswer]


class ExplanationAnswer(_Answer):
    """Every request, also of the recent past, that an id or a client's name means."""

    object: Literal["explanation"]
    id: str
    requests: list[ExplainedRequest]


class QueuedRequest(Place):
    """One waiting request."""

    id: str


class QueueAnswer(_Answer):
    """The tenant's waiting requests, those first that are served first.

    Attributes:
        length: Of the whole queue; the answer holds 100 requests of each tier.
    """

    object: Literal["list"]
    tenant: str
    length: Count
    data: list[QueuedRequest]


class RequestCounts(_Answer):
    """Running, waiting and swapped now; the others since the engine's start."""

    running: Count
    waiting: Count
    swapped: Count
    finished: Count
    cancelled: Count
    expired: Count
    preempted: Count
    shed: Count


class TokenCounts(_Answer):
    """Since the engine's start."""

    prompt: Count
    cached: Count
    output: Count
    recomputed: Count


class KvUsage(_Answer):
    """KV blocks held now, and for how long blocks were held since the engine's start."""

    blocks: Count
    percent: float
    borrowed_blocks: Count
    nominal_percent: float | None
    block_seconds: float


class ServiceUsage(_Answer):
    """Service since the engine's start: prompt tokens, and output tokens twice.

    Attributes:
        share_percent: Of all that tenants of the same tier got.
    """

    charged: float
    share_percent: float


class LatencyAttainment(_Answer):
    """A latency against its target."""

    target_seconds: float
    percentile: int
    measured_seconds: float | None
    met_percent: float


class AttainmentAnswer(_Answer):
    """The window's requests against the tenant's targets."""

    window_seconds: float
    requests: Count
    met: Count
    percent: float
    ttft: LatencyAttainment | None
    itl: LatencyAttainment | None


class UsageAnswer(_Answer):
    """What one tenant uses of this engine.

    Attributes:
        attainment: Null without targets, or without traffic.
    """

    object: Literal["usage"]
    tenant: str
    tier: str
    weight: Count
    requests: RequestCounts
    tokens: TokenCounts
    kv: KvUsage
    service: ServiceUsage
    attainment: AttainmentAnswer | None
