"""The request bodies of the OpenAI API, as far as this engine honours them.

A field that is not listed is refused. So is a field of the OpenAI API that is known and not
supported, unless it holds the value that asks for nothing: silently ignoring it would answer a
question that wasn't asked. Fields without influence on the answer are accepted.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from tidegate_engine.core.sampling import (
    MAX_BIAS,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from tidegate_engine.server.errors import UNKNOWN, UNSUPPORTED

DEFAULT_COMPLETION_TOKENS = 16
MAX_CHOICES = 128
MAX_PROMPTS = 128
MAX_STOPS = 4
MAX_STOP_LENGTH = 256
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_METADATA = 16
MAX_STOP_TOKENS = 128
MAX_BIASED_TOKENS = 1024
_MAX_DIGITS = 10


class _Neutral:
    """Accepts only values that ask for nothing; None always does."""

    def __init__(self, *values: object) -> None:
        self.values = values

    def check(self, value: object) -> object:
        """Return `value`, or say what may stand in its place."""
        # With types compared, as True == 1 == 1.0.
        if value is not None and not any(
            value == v and _kind(value) is _kind(v) for v in self.values
        ):
            allowed = " or ".join(map(json.dumps, self.values)) if self.values else "null"
            raise PydanticCustomError(
                UNSUPPORTED, "not supported; leave it out or give {allowed}", {"allowed": allowed}
            )
        return value

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, _: CoreSchema, __: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [None, *self.values]}


def _kind(value: object) -> type:
    return float if type(value) is int else type(value)


def _check_stop(stops: str | list[str]) -> str | list[str]:
    listed = [stops] if isinstance(stops, str) else stops
    if not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in listed):
        raise PydanticCustomError(
            "stop_length", "stop strings have 1 to {limit} characters", {"limit": MAX_STOP_LENGTH}
        )
    return stops


def _check_token_names(biases: dict[str, float] | None) -> dict[str, float] | None:
    for name in biases or ():
        # As JSON has no numbers for keys; spelled in one way only, so that none comes twice.
        if not (name.isascii() and name.isdigit() and len(name) <= _MAX_DIGITS):
            raise PydanticCustomError("token_id", "{name} is no token id", {"name": repr(name)})
        if name != str(int(name)):
            raise PydanticCustomError("token_id", "{name} has leading zeros", {"name": repr(name)})
    return biases


def _null_is(*, default: object) -> BeforeValidator:
    """Take null for the default, as clients send it that spell every field."""
    return BeforeValidator(lambda value: default if value is None else value)


def _at_most(limit: int) -> BeforeValidator:
    """Count a map's entries before any is looked at: each that is wrong would be an error."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > limit:
            raise PydanticCustomError("too_long", "has more than {limit} entries", {"limit": limit})
        return value

    return BeforeValidator(check)


def _kind_of_prompt(prompt: object) -> str:
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else None
    if isinstance(first, str):
        return "texts"
    return "token_id_lists" if isinstance(first, list) else "token_ids"


def _kind_of_stop(stop: object) -> str:
    return "texts" if isinstance(stop, list) else "text"


def _kind_of_content(content: object) -> str:
    return "parts" if isinstance(content, list) else "text"


# Lists end at their first wrong item, and of a union's branches one is tried: a body of some MiB
# must not make as many errors.
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
MaxTokens = Annotated[int, Field(ge=1, lt=1 << 31)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
TokenIdLists = Annotated[
    list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
]
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[TokenIds, Tag("token_ids")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[TokenIdLists, Tag("token_id_lists")],
    Discriminator(_kind_of_prompt),
]
Stop = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True), Tag("texts")],
    Discriminator(_kind_of_stop),
    AfterValidator(_check_stop),
]
StopTokenIds = Annotated[
    list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)
]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],
    Field(max_length=MAX_BIASED_TOKENS),
    AfterValidator(_check_token_names),
    _at_most(MAX_BIASED_TOKENS),
]
Metadata = Annotated[dict[str, str], Field(max_length=MAX_METADATA), _at_most(MAX_METADATA)]
Nothing = Annotated[Any, _Neutral()]
Off = Annotated[Any, _Neutral(False)]  # noqa: FBT003 (a value, no flag)
Empty = Annotated[Any, _Neutral([], {})]


class _Body(BaseModel):
    # Strict, so that "5" or true is no number. Unknown fields are let in and refused below: the
    # first one alone, while "forbid" makes an error of each.
    model_config = ConfigDict(
        extra="allow",
        frozen=True,
        strict=True,
        json_schema_extra={"additionalProperties": False},
    )

    @model_validator(mode="after")
    def _check_names(self) -> "_Body":
        for name in self.model_extra or ():
            raise PydanticCustomError(UNKNOWN, "unknown field", {"param": name})
        return self


class StreamOptions(_Body):
    """How a stream is sent."""

    include_usage: bool = False
    include_obfuscation: Off = None


class GenerationBody(_Body):
    """What both kinds of generation share.

    Attributes:
        frequency_penalty: Counts output tokens only.
        presence_penalty: Counts output tokens only.
        logit_bias: By token id, in decimal.
        repetition_penalty: Extension: weakens tokens of prompt and output; 1 = off.
        min_p: Extension: leave out tokens less likely than this share of the likeliest one.
        top_k: Extension: draw from this many likeliest tokens; -1 or 0 = from all.
        min_tokens: Extension: neither stop tokens nor stop strings end the answer before.
        stop_token_ids: Extension: tokens that end the answer; they aren't part of its text.
        ignore_eos: Extension: the model's own end tokens don't end the answer.
    """

    model: str
    n: Annotated[int, _null_is(default=1), Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: (
        Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None
    ) = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    stop_token_ids: StopTokenIds | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    ignore_eos: Annotated[bool, _null_is(default=False)] = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Without influence on the answer.
    user: str | None = None
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "contradiction",
                "only allowed with stream = true",
                {"param": "stream_options"},
            )
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if isinstance(self.stop, str):
            return (self.stop,)
        return tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    echo: Off = None
    suffix: Annotated[Any, _Neutral("")] = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_best_of(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of != self.n:
            raise PydanticCustomError(
                UNSUPPORTED, "not supported unless equal to n", {"param": "best_of"}
            )
        return self


class TextPart(_Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[
        list[TextPart],
        Field(min_length=1, max_length=MAX_PARTS, fail_fast=True),
        Tag("parts"),
    ],
    Discriminator(_kind_of_content),
]


class ChatMessage(_Body):
    """One message of a chat.

    The fields after `content` are what the official client puts into the assistant's messages that
    it sends back.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Nothing = None
    refusal: Nothing = None
    annotations: Empty = None
    audio: Nothing = None
    function_call: Nothing = None
    tool_calls: Empty = None

    def as_prompt(self) -> dict[str, str]:
        """Return role and text, as chat templates know them."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "".join(part.text for part in self.content)}


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    # Not supported.
    audio: Nothing = None
    function_call: Annotated[Any, _Neutral("none", "auto")] = None
    functions: Empty = None
    modalities: Annotated[Any, _Neutral(["text"])] = None
    prediction: Nothing = None
    reasoning_effort: Annotated[Any, _Neutral("none")] = None
    response_format: Annotated[Any, _Neutral({"type": "text"})] = None
    service_tier: Annotated[Any, _Neutral("auto", "default")] = None
    store: Off = None
    tool_choice: Annotated[Any, _Neutral("none", "auto")] = None
    tools: Empty = None
    verbosity: Nothing = None
    web_search_options: Nothing = None

    # Without influence on the answer.
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError(
                "contradiction",
                "only allowed with logprobs = true",
                {"param": "top_logprobs"},
            )
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise PydanticCustomError(
                "contradiction",
                "differs from max_completion_tokens",
                {"param": "max_tokens"},
            )
        return self
