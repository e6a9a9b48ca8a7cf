"""What requests go through, from the steps that decide it: for who follows them in traces.

There is none of this, and nothing is done for it, unless traces are asked for.
"""

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple

from starlette.datastructures import Headers

from tidegate_engine.core.decisions import Decision, Verdict
from tidegate_engine.core.request import FinishReason, TokenOutput
from tidegate_engine.events import CancelCause, StepReport
from tidegate_engine.server.caller import Caller
from tidegate_engine.server.errors import ApiError
from tidegate_engine.server.schema import GenerationBody

CARRIER = ("traceparent", "tracestate")
"""Headers of W3C's Trace Context, by which a caller's trace goes on here."""

Parameter = str | int | float
"""What a request asks for, or got, as an attribute of a span may be."""


class Phase(enum.StrEnum):
    """What is being done for a choice, or not done."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"


class PhaseSpan(NamedTuple):
    """One phase of one choice.

    Attributes:
        began_at: On the engine's clock, as is `ended_at`.
        reason: Why it was admitted after its time in the queue, or why it was taken out; empty when
            there is no more to say.
        beneficiary_tier: Tier for whose request it was taken out; empty = for nobody in particular.
    """

    phase: Phase
    choice: int
    began_at: float
    ended_at: float
    reason: str = ""
    beneficiary_tier: str = ""


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """One HTTP request and what it went through.

    Attributes:
        follower: Hears of what happens to it.
        operation: `chat` or `text_completion`.
        carrier: Headers by which the caller's own trace goes on.
        parameters: What the client asked for, by the name of the attribute.
        ended_at: On the engine's clock; what it was at the arrival while it hasn't ended.
        error: Code of what ended it early; empty = nothing did.
        is_our_fault: Whether that is the engine's failure rather than an answer to the client.
        finish_reasons: By choice.
    """

    follower: "RequestTraces"
    operation: str
    tenant: str
    request_id: str
    arrived_at: float
    ended_at: float
    carrier: Mapping[str, str]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    choices_per_prompt: int = 1
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    is_our_fault: bool = False
    finish_reasons: dict[int, str] = field(default_factory=dict)
    spans: list[PhaseSpan] = field(default_factory=list)

    def ask(self, body: GenerationBody, *, prompt_tokens: int) -> None:
        """Note what the client asks for, where it says so.

        Args:
            body: Of the HTTP request.
            prompt_tokens: Of all prompts, each counted once.
        """
        asked: dict[str, Parameter | None] = {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "frequency_penalty": body.frequency_penalty,
            "presence_penalty": body.presence_penalty,
            "seed": body.seed,
            "choice.count": body.n if body.n > 1 else None,
        }
        self.parameters = {
            f"gen_ai.request.{name}": one for name, one in asked.items() if one is not None
        }
        self.choices_per_prompt = body.n
        self.input_tokens = prompt_tokens

    def fail(self, error: ApiError) -> None:
        """Note the error that the client got."""
        self.error = error.code.value
        self.is_our_fault = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR


@dataclass(slots=True, eq=False)
class _Choice:
    """A choice in the engine, and the phase that it is in."""

    index: int
    trace: RequestTrace
    since: float
    phase: Phase = Phase.QUEUE
    has_begun: bool = False
    reason: str = ""
    beneficiary_tier: str = ""

    def decide(self, decision: Decision, at: float) -> None:
        """Go on to the phase that a decision leads to."""
        match decision.verdict:
            case Verdict.ADMITTED | Verdict.RESUMED:
                if self.phase is Phase.QUEUE:
                    self.reason = decision.reason.value
                self.turn(Phase.DECODE if self.has_begun else Phase.PREFILL, at)
            case Verdict.PREEMPTED:
                self.turn(Phase.PREEMPTED, at)
                self.reason = decision.reason.value
                self.beneficiary_tier = decision.beneficiary_tier
            case _:
                pass

    def read(self) -> None:
        """Note that a step read some of its prompt, or of what it lost when it was taken out."""
        # Whether there is anything to read again shows only now; it began with the resumption.
        if self.phase is Phase.DECODE:
            self.phase = Phase.PREFILL

    def take(self, output: TokenOutput, at: float) -> None:
        """Note what a step gave; with a token everything before it is read."""
        if output.token is not None:
            self.has_begun = True
            if self.phase is Phase.PREFILL:
                self.turn(Phase.DECODE, at)
        if output.finish_reason is not None:
            self.trace.finish_reasons[self.index] = output.finish_reason.value

    def turn(self, phase: Phase, at: float) -> None:
        """End the phase it is in, and begin another."""
        self.end(at)
        self.phase, self.since = phase, at
        self.reason = self.beneficiary_tier = ""

    def end(self, at: float) -> None:
        """End the phase it is in."""
        span = PhaseSpan(self.phase, self.index, self.since, at, self.reason, self.beneficiary_tier)
        self.trace.spans.append(span)


class RequestTraces:
    """The traces of all requests that are in the engine; lives in the event loop."""

    def __init__(
        self, export: Callable[[RequestTrace], None], *, clock: Callable[[], float]
    ) -> None:
        """Begin without a request.

        Args:
            export: Gets every request that has ended.
            clock: The engine's.
        """
        self._export = export
        self._clock = clock
        self._choices: dict[str, _Choice] = {}

    def of(self, headers: Headers, caller: Caller, *, operation: str) -> RequestTrace:
        """Return the trace of a request that has come, without following it yet."""
        return RequestTrace(
            follower=self,
            operation=operation,
            tenant=caller.tenant,
            request_id=caller.request_id,
            arrived_at=caller.arrived_at,
            ended_at=caller.arrived_at,
            carrier={name: ",".join(headers.getlist(name)) for name in CARRIER if name in headers},
        )

    def begin(self, trace: RequestTrace, request_ids: Iterable[str]) -> None:
        """Follow a request's choices from here on."""
        for index, request_id in enumerate(request_ids):
            self._choices[request_id] = _Choice(index, trace, trace.arrived_at)

    def take_step(self, report: StepReport) -> None:
        """Note what a step decided and gave."""
        for decision in report.decisions:
            if (choice := self._choices.get(decision.request_id)) is not None:
                choice.decide(decision, report.planned_at)
        for request_id, _ in report.reading:
            if (choice := self._choices.get(request_id)) is not None:
                choice.read()
        for output in report.outputs:
            if (choice := self._choices.get(output.request_id)) is not None:
                choice.take(output, report.committed_at)

    def close(self, request_id: str, *, ended_at: float | None, cause: CancelCause | None) -> None:
        """Note that a choice is complete, or was taken out for a cause."""
        choice = self._choices.pop(request_id)
        choice.end(self._clock() if ended_at is None else ended_at)
        if cause is None:
            # The engine has named its own; a stop string is found outside.
            choice.trace.finish_reasons.setdefault(choice.index, FinishReason.STOP.value)
        else:
            choice.trace.error = choice.trace.error or cause.value

    def end(self, trace: RequestTrace) -> None:
        """Export a request whose choices are all closed."""
        trace.ended_at = self._clock()
        self._export(trace)

    def refuse(self, trace: RequestTrace, error: ApiError) -> None:
        """Export a request that never came to the engine."""
        trace.fail(error)
        self.end(trace)
