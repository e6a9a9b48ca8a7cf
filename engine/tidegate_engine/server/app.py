"""The OpenAI-compatible HTTP API of one engine."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Depends, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from tidegate_engine.core.arrival import is_queue_full
from tidegate_engine.core.request import TenantStats
from tidegate_engine.fleet.rates import Reservation
from tidegate_engine.metrics import Scrape
from tidegate_engine.server.answers import (
    Alive,
    Cancelled,
    ChatAnswer,
    CompletionAnswer,
    Model,
    Models,
    Ready,
)
from tidegate_engine.server.body import read_body
from tidegate_engine.server.caller import TIER_HEADER, Caller, header_of
from tidegate_engine.server.edge import edged_app
from tidegate_engine.server.error_codes import ErrorCode
from tidegate_engine.server.errors import (
    ApiError,
    EngineDrainingError,
    QueueFullError,
    TenantStoppedError,
    TierNotAllowedError,
)
from tidegate_engine.server.exposition import Exposition
from tidegate_engine.server.generation import LEAST_UNREAD_TOKENS, Generation
from tidegate_engine.server.identity import AUTHORIZATION_HEADER, TENANT_HEADER
from tidegate_engine.server.intake import Intake, take_chat, take_completion
from tidegate_engine.server.json_response import JsonResponse
from tidegate_engine.server.openapi import GENERATION, answers, describe_bodies
from tidegate_engine.server.render import (
    ChatFormat,
    CompletionFormat,
    ResponseFormat,
    ResponseHead,
)
from tidegate_engine.server.request_id import is_named
from tidegate_engine.server.request_trace import RequestTrace
from tidegate_engine.server.schema import ChatBody, CompletionBody, GenerationBody
from tidegate_engine.server.served_model import ServedModel
from tidegate_engine.server.service import Service
from tidegate_engine.server.stream import Answer, EventStream, collect, unless_disconnected
from tidegate_engine.server.tenant_view import add_tenant_view
from tidegate_engine.server.text import AnswerText
from tidegate_policies.rules import UNKNOWN_TENANT, StopPolicy

_Body = TypeVar("_Body", bound=GenerationBody)


@dataclass(frozen=True, slots=True)
class _Endpoint(Generic[_Body]):
    """What is particular to one of the two ways to ask for tokens."""

    shape: type[_Body]
    operation: str
    take: Callable[[_Body, Caller, ServedModel], Coroutine[Any, Any, Intake]]
    answer_format: Callable[[ResponseHead, _Body], ResponseFormat]


_COMPLETIONS = _Endpoint(
    shape=CompletionBody,
    operation="text_completion",
    take=lambda body, caller, model: take_completion(body, caller=caller, model=model),
    answer_format=lambda head, body: CompletionFormat(
        head, wants_logprobs=body.logprobs is not None, includes_usage=body.includes_usage
    ),
)
_CHATS = _Endpoint(
    shape=ChatBody,
    operation="chat",
    take=lambda body, caller, model: take_chat(body, caller=caller, model=model),
    answer_format=lambda head, body: ChatFormat(
        head, wants_logprobs=bool(body.logprobs), includes_usage=body.includes_usage
    ),
)


def create_app(service: Service) -> FastAPI:
    """Build the API over `service`."""
    app = edged_app("Tidegate engine", service.clock)
    _add_generation(app, service)
    _add_requests(app, service)
    add_tenant_view(app, service, _identify(service))
    _add_operations(app, service)
    describe_bodies(app, {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody})
    return app


def _identify(service: Service) -> Callable[[Request], Awaitable[Caller]]:
    # Asynchronous, so that it runs in the event loop, where keys are replaced, not in a thread.
    async def identify(request: Request) -> Caller:
        tenant = service.identities.tenant_of(
            header_of(request, AUTHORIZATION_HEADER), request.headers.getlist(TENANT_HEADER)
        )
        request.state.tenant = tenant
        return Caller.of(request, tenant=tenant)

    return identify


def _add_generation(app: FastAPI, service: Service) -> None:
    identify = _identify(service)

    @app.post("/v1/completions", responses=answers(CompletionAnswer, *GENERATION, streams=True))
    async def complete(request: Request, caller: Annotated[Caller, Depends(identify)]) -> Response:
        return await _generate(service, request, caller, _COMPLETIONS)

    @app.post("/v1/chat/completions", responses=answers(ChatAnswer, *GENERATION, streams=True))
    async def chat(request: Request, caller: Annotated[Caller, Depends(identify)]) -> Response:
        return await _generate(service, request, caller, _CHATS)


def _add_requests(app: FastAPI, service: Service) -> None:
    identify = _identify(service)

    @app.delete("/v1/requests/{request_id}", responses=answers(Cancelled, 400, 401, 404, 503))
    async def cancel(request_id: str, caller: Annotated[Caller, Depends(identify)]) -> Response:
        # Strangers share a tenant: only the id, which can't be guessed, tells whose a request is.
        goes_by_name = caller.tenant != UNKNOWN_TENANT
        named = [
            running_id
            for running_id in service.generations.running_ids
            if running_id == request_id or (goes_by_name and is_named(running_id, request_id))
        ]
        cancel_one = partial(service.generations.cancel, tenant=caller.tenant)
        if not any(await asyncio.gather(*map(cancel_one, named))):
            raise ApiError(
                ErrorCode.REQUEST_NOT_FOUND,
                f"No running request {request_id!r} of yours.",
                param="request_id",
            )
        return JsonResponse({"id": request_id, "object": "request", "cancelled": True})

    @app.get(
        "/v1/models", dependencies=[Depends(identify)], responses=answers(Models, 400, 401, 503)
    )
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [_model_object(service.model)]})

    @app.get(
        "/v1/models/{name:path}",
        dependencies=[Depends(identify)],
        responses=answers(Model, 400, 401, 404, 503),
    )
    async def model(name: str) -> Response:
        _check_model(service.model, name)
        return JsonResponse(_model_object(service.model))


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", responses={**answers(Alive), 503: {"model": Alive}})
    async def healthz() -> Response:
        is_alive = service.engine.is_alive
        return JsonResponse({"alive": is_alive}, status_code=200 if is_alive else 503)

    @app.get("/readyz", responses={**answers(Ready), 503: {"model": Ready}})
    async def readyz() -> Response:
        lacking = _what_readiness_lacks(service)
        content = {"ready": not lacking, "lacking": lacking}
        return JsonResponse(content, status_code=503 if lacking else 200)

    async def scrape() -> Scrape:
        stats = await service.count()
        return service.metrics.scrape(
            stats,
            miss_ratios=service.levels.miss_ratios(),
            rates_are_alone=service.rate_gate.is_alone,
            at=service.clock(),
        )

    exposition = Exposition(scrape)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(await exposition(), headers={"content-type": CONTENT_TYPE_LATEST})


def _what_readiness_lacks(service: Service) -> Sequence[str]:
    conditions = {
        "engine": service.engine.is_alive,
        "policy": service.board.in_force is not None,
        "not draining": not (service.generations.is_leaving or service.generations.is_draining),
    }
    return [name for name, holds in conditions.items() if not holds]


@contextmanager
def _noting_refusals(
    service: Service, caller: Caller, trace: RequestTrace | None
) -> Iterator[None]:
    """Let an error through, and keep it for those who ask why."""
    try:
        yield
    except ApiError as error:
        service.note_refusal(caller.request_id, tenant=caller.tenant, reason=error.code)
        if trace is not None:
            trace.follower.refuse(trace, error)
        raise


def _check_servable(service: Service, caller: Caller) -> None:
    """Refuse before the body is read and the prompt encoded: that is the expensive part.

    The queue is that of the last count, about a second old; a retry is told to come no sooner, and
    is judged by a newer one, whether or not others count meanwhile.
    """
    if service.generations.is_draining:
        raise EngineDrainingError
    rule = service.identities.rule_of(caller.tenant)
    if rule is not None and rule.stop in {StopPolicy.DRAIN, StopPolicy.CANCEL}:
        raise TenantStoppedError
    if caller.tier is not None:
        allowed = service.identities.tiers_of(caller.tenant)
        if caller.tier not in allowed:
            raise TierNotAllowedError(TIER_HEADER, allowed)
    service.rate_gate.check(caller.tenant)
    stats = service.engine.last_stats.scheduler
    if is_queue_full(
        stats.tenants.get(caller.tenant, TenantStats()).waiting,
        num_tenants=max(1, len(stats.tenants)),
        num_waiting=stats.waiting,
        max_waiting=service.max_waiting,
    ):
        service.count.begin()
        raise QueueFullError(service.max_waiting)


def _check_model(model: ServedModel, name: str) -> None:
    if name != model.name:
        raise ApiError(
            ErrorCode.MODEL_NOT_FOUND,
            f"The model {name!r} is not served here; {model.name!r} is.",
            param="model",
        )


def _head(service: Service, caller: Caller) -> ResponseHead:
    return ResponseHead(
        generation_id=caller.request_id,
        model=service.model.name,
        created=int(service.wall_clock()),
    )


async def _generate(
    service: Service, request: Request, caller: Caller, endpoint: _Endpoint[_Body]
) -> Response:
    trace = None
    if service.traces is not None:
        trace = service.traces.of(request.headers, caller, operation=endpoint.operation)
    with _noting_refusals(service, caller, trace):
        _check_servable(service, caller)
        body = await read_body(request, endpoint.shape)
        _check_model(service.model, body.model)
        intake = await unless_disconnected(
            endpoint.take(body, caller, service.model),
            receive=request.receive,
            cancel_on_disconnect=_ends_with_client(service, caller),
        )
        if intake is None:
            return Response()  # which nobody reads
        if trace is not None:
            trace.ask(body, prompt_tokens=intake.prompt_tokens)
        if (rule := service.identities.rule_of(caller.tenant)) is not None:
            intake.check_fits_queue_of(rule)
        answer_format = endpoint.answer_format(_head(service, caller), body)
        reservation = await service.rate_gate.reserve(
            caller.tenant,
            intake.requests,
            prompt_tokens=await _tokens_to_compute(service, body, caller, intake),
        )
        answer = _begin(
            service,
            body,
            caller,
            intake=intake,
            reservation=reservation,
            answer_format=answer_format,
            trace=trace,
        )
    return await _respond(answer, request, is_stream=bool(body.stream))


async def _tokens_to_compute(
    service: Service, body: GenerationBody, caller: Caller, intake: Intake
) -> int:
    """Return how many tokens of the prompts the prefix cache lacks now.

    The engine is asked where the answer counts: that may take until the end of a step. Elsewhere
    all are said to be lacking.
    """
    if not service.rate_gate.limits_tokens(caller.tenant):
        return intake.prompt_tokens
    prompts = intake.requests[:: body.n]
    found = await service.look(lambda book, _: sum(map(book.cached_tokens, prompts)))
    return intake.prompt_tokens - found


def _begin(
    service: Service,
    body: GenerationBody,
    caller: Caller,
    *,
    intake: Intake,
    reservation: Reservation,
    answer_format: ResponseFormat,
    trace: RequestTrace | None,
) -> Answer:
    """Hand the requests to the engine, last of all: what fails before leaves nothing behind.

    Raises:
        ApiError: They were refused.
    """
    generation = Generation(
        caller.request_id,
        tenant=caller.tenant,
        arrived_at=caller.arrived_at,
        max_unread_events=_most_unread(service, body, intake),
        trace=trace,
    )
    tokenizer = service.model.tokenizer
    with ExitStack() as unless_begun:
        unless_begun.callback(service.rate_gate.settle, reservation, computed_tokens=0, outputs=())
        answer = Answer(
            generation=generation,
            generations=service.generations,
            texts=tuple(
                AnswerText(
                    tokenizer,
                    stops=intake.stops,
                    stop_token_ids=engine_request.stop_token_ids,
                    min_tokens=engine_request.sampling.min_tokens,
                )
                for engine_request in intake.requests
            ),
            choices_per_prompt=body.n,
            prompt_lengths=tuple(len(one.prompt_ids) for one in intake.requests),
            rate_gate=service.rate_gate,
            reservation=reservation,
            format=answer_format,
            includes_usage=body.includes_usage,
            cancel_on_disconnect=_ends_with_client(service, caller),
        )
        service.generations.begin(generation, intake.requests)
        unless_begun.pop_all()
    return answer


def _most_unread(service: Service, body: GenerationBody, intake: Intake) -> float:
    """Return how many events the client may leave unread, as `Generation` counts them."""
    if not body.stream:
        return math.inf
    events_per_token = 1 + (intake.requests[0].sampling.logprobs or 0)
    least = LEAST_UNREAD_TOKENS * len(intake.requests) * events_per_token
    return max(service.max_unread_events, least)


def _ends_with_client(service: Service, caller: Caller) -> bool:
    """Whether the caller's requests are cancelled when it hangs up."""
    rule = service.identities.rule_of(caller.tenant)
    return rule is None or rule.cancel_on_disconnect


async def _respond(answer: Answer, request: Request, *, is_stream: bool) -> Response:
    if is_stream:
        return EventStream(answer)
    try:
        content = await unless_disconnected(
            collect(answer),
            receive=request.receive,
            cancel_on_disconnect=answer.cancel_on_disconnect,
        )
    finally:
        answer.release()
    # Nobody reads the answer to a client that has hung up.
    return Response() if content is None else JsonResponse(content)


def _model_object(model: ServedModel) -> dict[str, object]:
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": "tidegate"}
