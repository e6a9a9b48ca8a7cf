"""The OpenAI-compatible HTTP API of one engine."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tidegate_engine.bridge import engine_stats
from tidegate_engine.server.caller import Caller
from tidegate_engine.server.edge import Edge
from tidegate_engine.server.errors import (
    ApiError,
    EngineDrainingError,
    QueueFullError,
    TenantStoppedError,
    answer_api_error,
    answer_defect,
    answer_http_exception,
    answer_validation_error,
)
from tidegate_engine.server.generation import Generation
from tidegate_engine.server.intake import Intake, take_chat, take_completion
from tidegate_engine.server.json_response import JsonResponse
from tidegate_engine.server.render import (
    ChatFormat,
    CompletionFormat,
    ResponseFormat,
    ResponseHead,
)
from tidegate_engine.server.schema import ChatBody, CompletionBody, GenerationBody
from tidegate_engine.server.served_model import ServedModel
from tidegate_engine.server.service import Service
from tidegate_engine.server.stream import Answer, EventStream, collect, unless_disconnected
from tidegate_engine.server.text import AnswerText
from tidegate_policies.snapshot import StopPolicy

SCRAPE_PATIENCE_SECONDS = 2.0
"""How long a scrape waits for the step in flight; then it gets the last count."""


def create_app(service: Service) -> FastAPI:
    """Build the API over `service`."""
    # No documentation pages: they would load scripts from elsewhere.
    app = FastAPI(title="Tidegate engine", docs_url=None, redoc_url=None)
    app.add_middleware(Edge, clock=service.clock)
    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(RequestValidationError, answer_validation_error)
    app.add_exception_handler(HTTPException, answer_http_exception)
    app.add_exception_handler(Exception, answer_defect)
    _add_generation(app, service)
    _add_requests(app, service)
    _add_operations(app, service)
    return app


def _identify(service: Service) -> Callable[[Request], Awaitable[Caller]]:
    # Asynchronous, so that it runs in the event loop, where keys are replaced, not in a thread.
    async def identify(request: Request) -> Caller:
        tenant = service.identities.tenant_of(request.headers.get("authorization"))
        return Caller.of(request, tenant=tenant)

    return identify


def _add_generation(app: FastAPI, service: Service) -> None:
    identify = _identify(service)

    @app.post("/v1/completions")
    async def complete(
        body: CompletionBody, request: Request, caller: Annotated[Caller, Depends(identify)]
    ) -> Response:
        _check_servable(service, body, caller)
        intake = await take_completion(body, caller=caller, model=service.model)
        response_format = CompletionFormat(
            _head(service, caller),
            wants_logprobs=body.logprobs is not None,
            includes_usage=body.includes_usage,
        )
        # While a long prompt was encoded, nobody watched the connection.
        if _ends_with_client(service, caller) and await request.is_disconnected():
            return Response()
        answer = await _begin(service, body, caller, intake=intake, response_format=response_format)
        return await _respond(answer, request, is_stream=bool(body.stream))

    @app.post("/v1/chat/completions")
    async def chat(
        body: ChatBody, request: Request, caller: Annotated[Caller, Depends(identify)]
    ) -> Response:
        _check_servable(service, body, caller)
        intake = await take_chat(body, caller=caller, model=service.model)
        response_format = ChatFormat(
            _head(service, caller),
            wants_logprobs=bool(body.logprobs),
            includes_usage=body.includes_usage,
        )
        # While a long prompt was encoded, nobody watched the connection.
        if _ends_with_client(service, caller) and await request.is_disconnected():
            return Response()
        answer = await _begin(service, body, caller, intake=intake, response_format=response_format)
        return await _respond(answer, request, is_stream=bool(body.stream))


def _add_requests(app: FastAPI, service: Service) -> None:
    identify = _identify(service)

    @app.delete("/v1/requests/{request_id}")
    async def cancel(request_id: str, caller: Annotated[Caller, Depends(identify)]) -> Response:
        if not await service.generations.cancel(request_id, tenant=caller.tenant):
            raise ApiError(
                404,
                "request_not_found",
                f"No running request {request_id!r} of yours.",
                param="request_id",
            )
        return JsonResponse({"id": request_id, "object": "request", "cancelled": True})

    @app.get("/v1/models", dependencies=[Depends(identify)])
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [_model_object(service.model)]})

    @app.get("/v1/models/{name:path}", dependencies=[Depends(identify)])
    async def model(name: str) -> Response:
        _check_model(service.model, name)
        return JsonResponse(_model_object(service.model))


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/healthz")
    async def healthz() -> Response:
        is_alive = service.engine.is_alive
        return JsonResponse({"alive": is_alive}, status_code=200 if is_alive else 503)

    @app.get("/readyz")
    async def readyz() -> Response:
        lacking = _what_readiness_lacks(service)
        content = {"ready": not lacking, "lacking": lacking}
        return JsonResponse(content, status_code=503 if lacking else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        stats = await engine_stats(service.engine, patience_seconds=SCRAPE_PATIENCE_SECONDS)
        body = service.metrics.render(stats)
        return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})


def _what_readiness_lacks(service: Service) -> Sequence[str]:
    conditions = {
        "engine": service.engine.is_alive,
        "policy": service.board.in_force is not None,
        "not draining": not service.generations.is_draining,
    }
    return [name for name, holds in conditions.items() if not holds]


def _check_servable(service: Service, body: GenerationBody, caller: Caller) -> None:
    """Refuse before the prompt is encoded: that is the expensive part.

    The queue is that of the last count, about a second old; a retry is told to come no sooner.
    """
    if service.generations.is_draining:
        raise EngineDrainingError
    _check_model(service.model, body.model)
    rule = service.identities.rule_of(caller.tenant)
    if rule is not None and rule.stop in {StopPolicy.DRAIN, StopPolicy.CANCEL}:
        raise TenantStoppedError
    if service.engine.last_stats.scheduler.waiting >= service.max_waiting:
        raise QueueFullError(service.max_waiting)


def _check_model(model: ServedModel, name: str) -> None:
    if name != model.name:
        raise ApiError(
            404,
            "model_not_found",
            f"The model {name!r} is not served here; {model.name!r} is.",
            param="model",
        )


def _head(service: Service, caller: Caller) -> ResponseHead:
    return ResponseHead(
        generation_id=caller.request_id,
        model=service.model.name,
        created=int(service.wall_clock()),
    )


async def _begin(
    service: Service,
    body: GenerationBody,
    caller: Caller,
    *,
    intake: Intake,
    response_format: ResponseFormat,
) -> Answer:
    generation = Generation(
        caller.request_id,
        tenant=caller.tenant,
        arrived_at=caller.arrived_at,
        max_unread_events=service.max_unread_events,
    )
    service.generations.begin(generation, intake.requests)
    tokenizer = service.model.tokenizer
    return Answer(
        generation=generation,
        generations=service.generations,
        texts=tuple(
            AnswerText(tokenizer, stops=intake.stops, stop_token_ids=request.stop_token_ids)
            for request in intake.requests
        ),
        format=response_format,
        prompt_tokens=intake.prompt_tokens,
        includes_usage=body.includes_usage,
        cancel_on_disconnect=_ends_with_client(service, caller),
    )


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
