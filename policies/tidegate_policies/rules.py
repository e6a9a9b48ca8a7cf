"""What a policy snapshot is made of: the rules of tenants, tiers and the pool.

A rule says what engines enforce and nothing else. The defaults are part of the format of a
snapshot's text, which leaves them out: a changed one would give the same text another meaning.
"""

import enum
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from tidegate_policies.problems import SnapshotError, first_problem

UNKNOWN_TENANT = "unknown"
"""Name under which all requests of undeclared tenants are scheduled and counted."""

MAX_WEIGHT = 1_000_000

MAX_RESERVED_PERCENT = 90
"""Most that the tiers of one pool may reserve together, so that some service is left to order."""

Percent = Annotated[int, Field(ge=0, le=100)]
Weight = Annotated[int, Field(ge=0, le=MAX_WEIGHT)]
PercentileInt = Annotated[int, Field(ge=1, le=99)]
PositiveInt = Annotated[int, Field(ge=1)]
NaturalInt = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
KeyDigest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


# An engine must not acknowledge a rule that it doesn't know: an unknown field is refused.
KNOWN_FIELDS_ONLY = ConfigDict(extra="forbid")


class UnknownAction(enum.StrEnum):
    """What an engine does with requests of no declared tenant."""

    REJECT = "Reject"
    ADMIT = "Admit"


class PreemptionMode(enum.StrEnum):
    """What becomes of a victim's KV."""

    AUTO = "Auto"
    SWAP = "Swap"
    RECOMPUTE = "Recompute"


class StopPolicy(enum.StrEnum):
    """Whether a tenant is served at all.

    HOLD queues and admits nothing new. DRAIN refuses new requests and lets the others finish.
    CANCEL refuses new requests and cancels the others.
    """

    NONE = "None"
    HOLD = "Hold"
    DRAIN = "Drain"
    CANCEL = "Cancel"


class KvEstimate(enum.StrEnum):
    """How much KV admission expects a request to need at its longest."""

    PREDICTED = "Predicted"
    WORST_CASE = "WorstCase"
    OPTIMISTIC = "Optimistic"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRule:
    """A priority level.

    Attributes:
        value: Larger goes first.
        reserved_share_percent: Share of charged service kept for the tier while it has work.
        preempts_lower: Whether its requests may take running requests of lower tiers out.
        wait_window_seconds: How long a first arrival may be held to fill a batch; None = as the
            pool says.
    """

    __pydantic_config__: ClassVar[ConfigDict] = KNOWN_FIELDS_ONLY

    name: str
    value: int
    reserved_share_percent: Annotated[int, Field(ge=0, le=MAX_RESERVED_PERCENT)] = 0
    preempts_lower: bool = True
    wait_window_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionRule:
    """Whether and how a tenant's running requests may be taken out.

    Attributes:
        preemptible: False = once admitted, a request leaves only by finish, cancel or deadline; it
            is therefore admitted only when its worst case fits in the tenant's nominal.
        max_preemptions: Of one request; after so many it is no longer a victim.
        min_quantum_tokens: Tokens that a request may produce after each admission before it can be
            a victim.
        reclaims: Whether the tenant, below its nominal KV, takes back blocks that others borrowed.
    """

    __pydantic_config__: ClassVar[ConfigDict] = KNOWN_FIELDS_ONLY

    preemptible: bool = True
    mode: PreemptionMode = PreemptionMode.AUTO
    max_preemptions: PositiveInt = 3
    min_quantum_tokens: NaturalInt = 16
    reclaims: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRule:
    """What a tenant's requests were promised; None = nothing.

    Attributes:
        ttft_seconds: Target of the time to the first token: orders the tenant's own queue.
        itl_seconds: Target of the time between two tokens: bounds the prefill beside its decodes,
            and how long these may stand back for a higher tier's prompts.
        queue_timeout_seconds: A request that waited so long for its first token is dropped.
        request_timeout_seconds: A request that is not done after so long is dropped.
        sheds: Whether a request that is predicted to miss `ttft_seconds` is refused at arrival.
        ttft_percentile: Percent of the requests that have to meet `ttft_seconds`.
        itl_percentile: Percent of the times between two tokens that have to meet `itl_seconds`.
        window_seconds: How far back attainment is counted.
    """

    __pydantic_config__: ClassVar[ConfigDict] = KNOWN_FIELDS_ONLY

    ttft_seconds: Seconds | None = None
    itl_seconds: Seconds | None = None
    queue_timeout_seconds: Seconds | None = None
    request_timeout_seconds: Seconds | None = None
    sheds: bool = False
    ttft_percentile: PercentileInt = 99
    itl_percentile: PercentileInt = 99
    window_seconds: Seconds = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRule:
    """What a tenant may use a minute, over all engines of the pool; None = no limit.

    Attributes:
        tokens_per_minute: Uncached prompt tokens and output tokens.
        burst_percent: Depth of the token buckets, in percent of the limits.
    """

    __pydantic_config__: ClassVar[ConfigDict] = KNOWN_FIELDS_ONLY

    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    burst_percent: PositiveInt = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRule:
    """How one tenant is served.

    Attributes:
        tenant: Identity in engines and metrics, unique in the snapshot.
        policy: `namespace/name` of the TenantPolicy this comes from.
        tier: Name of one of the snapshot's tiers.
        allowed_tiers: Lower tiers of the snapshot that a request may ask for.
        weight: Share inside the tier; 0 = only when nobody else in the tier wants service.
        kv_nominal_percent: Share of the engine's KV blocks that is the tenant's own.
        kv_borrowing_limit_percent: Most that it may hold above that, in percent of the engine's KV
            blocks; None = no limit.
        kv_lendable_percent: Share of its unused nominal that others may borrow.
        max_running: Most of its requests in one engine's batch; None = no limit of its own.
        max_queued: Most of its requests waiting in one engine.
        max_queued_tokens: Most prompt tokens of its requests waiting in one engine.
        max_prompt_tokens: Longest prompt, in tokens; None = what fits the pool.
        max_output_tokens: Most output tokens of one request; a larger wish is clipped.
        rate: What it may use a minute, over all engines of the pool.
        cancel_on_disconnect: Whether a client that hangs up cancels its request.
        shares_prefixes: Whether its KV blocks of equal prefixes are one with those of the other
            tenants that share.
        key_digests: SHA-256 (hex) of the API keys whose holder is this tenant.
    """

    __pydantic_config__: ClassVar[ConfigDict] = KNOWN_FIELDS_ONLY

    tenant: str
    policy: str
    tier: str
    allowed_tiers: tuple[str, ...] = ()
    weight: Weight = 100
    kv_nominal_percent: Percent = 0
    kv_borrowing_limit_percent: Percent | None = None
    kv_lendable_percent: Percent = 100
    max_running: PositiveInt | None = None
    max_queued: PositiveInt | None = None
    max_queued_tokens: PositiveInt | None = None
    max_prompt_tokens: PositiveInt | None = None
    max_output_tokens: PositiveInt | None = None
    rate: RateRule = field(default_factory=RateRule)
    cancel_on_disconnect: bool = True
    shares_prefixes: bool = False
    preemption: PreemptionRule = field(default_factory=PreemptionRule)
    service: ServiceRule = field(default_factory=ServiceRule)
    stop: StopPolicy = StopPolicy.NONE
    key_digests: tuple[KeyDigest, ...] = ()

    @classmethod
    def from_json(cls, line: str) -> "TenantRule":
        """Read a line of a snapshot's text.

        Raises:
            SnapshotError: Not JSON, or a field is missing or out of range.
        """
        try:
            return _TENANT_ADAPTER.validate_json(line)
        except ValidationError as error:
            raise SnapshotError(first_problem(error, whole="tenant")) from error

    def to_json(self) -> str:
        """Write the tenant's line of a snapshot's text."""
        return _tenant_line(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingRule:
    """How the batch of a step is formed; None = the engine's own setting.

    Attributes:
        max_num_seqs: Most requests in one step.
        max_batched_tokens: Most tokens computed in one step.
        wait_window_seconds: How long a first arrival may be held to fill a batch.
        prefill_chunk_min: Fewest prompt tokens a step offers, so that decodes never starve prefill.
        prefill_chunk_max: Most prompt tokens in one step.
        max_partial_prefills: Prompts that may be half read at a time.
    """

    __pydantic_config__: ClassVar[ConfigDict] = KNOWN_FIELDS_ONLY

    max_num_seqs: PositiveInt | None = None
    max_batched_tokens: PositiveInt | None = None
    wait_window_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    prefill_chunk_min: PositiveInt | None = None
    prefill_chunk_max: PositiveInt | None = None
    max_partial_prefills: PositiveInt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkRule:
    """KV usage levels, in percent of the block pool: low opens, high closes and evicts."""

    __pydantic_config__: ClassVar[ConfigDict] = KNOWN_FIELDS_ONLY

    low_percent: Percent = 80
    high_percent: Percent = 92


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRule:
    """How engines leave the pool.

    Attributes:
        engines: Pod names of those that are to take no new work, in order.
        seconds: How long requests may go on once their engine drains; None = the engine's own
            setting.
    """

    __pydantic_config__: ClassVar[ConfigDict] = KNOWN_FIELDS_ONLY

    engines: tuple[str, ...] = ()
    seconds: Annotated[float | None, Field(ge=0)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownTenantsRule:
    """Requests with no known identity.

    Attributes:
        tier: Name of one of the snapshot's tiers; looked at only when they are admitted.
        max_running: Most of them in one engine's batch; None = no limit of their own.
    """

    __pydantic_config__: ClassVar[ConfigDict] = KNOWN_FIELDS_ONLY

    action: UnknownAction = UnknownAction.REJECT
    tier: str = ""
    weight: Weight = 1
    max_running: PositiveInt | None = None


# Of thousands of tenants hardly any differs from one compilation to the next.
@lru_cache(maxsize=1 << 14)
def _tenant_line(rule: TenantRule) -> str:
    return _TENANT_ADAPTER.dump_json(rule, exclude_defaults=True).decode()


_TENANT_ADAPTER = TypeAdapter(TenantRule)
