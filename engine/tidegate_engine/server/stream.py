"""Answers on their way to the client: in one piece, or as server-sent events.

Both watch for a client that hangs up while they wait, so that nothing is computed for nobody.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidegate_engine.core.request import FinishReason
from tidegate_engine.events import CancelCause
from tidegate_engine.fleet.rates import Reservation
from tidegate_engine.server.errors import ApiError
from tidegate_engine.server.generation import Generation
from tidegate_engine.server.generations import Generations
from tidegate_engine.server.rate_gate import RateGate
from tidegate_engine.server.render import (
    FinishedChoice,
    Json,
    ResponseFormat,
    Written,
    usage_of,
)
from tidegate_engine.server.text import AnswerText, TextDelta

T = TypeVar("T")
Message = MutableMapping[str, Any]
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A running generation and how its client wants to read it.

    Attributes:
        texts: One for each choice; those of one prompt stand together.
        choices_per_prompt: How many that are.
        prompt_lengths: Tokens of each choice's prompt.
        reservation: What was set aside for it of its tenant's rate limits.
        cancel_on_disconnect: Whether a client that hangs up ends the generation.
    """

    generation: Generation
    generations: Generations
    texts: tuple[AnswerText, ...]
    choices_per_prompt: int
    prompt_lengths: tuple[int, ...]
    rate_gate: RateGate
    reservation: Reservation
    format: ResponseFormat
    includes_usage: bool
    cancel_on_disconnect: bool

    async def deltas(self) -> AsyncIterator[list[tuple[int, TextDelta]]]:
        """Yield (choice, text) pairs as they come, until every choice has ended.

        Raises:
            ApiError: The generation was ended early.
        """
        ended: set[int] = set()
        async for outputs in self.generation.outputs():
            deltas: list[tuple[int, TextDelta]] = []
            for index, output in outputs:
                # Behind a stop string may come tokens that were already being computed.
                if index in ended:
                    continue
                delta = self.texts[index].push(output)
                deltas.append((index, delta))
                if delta.finish_reason is not None:
                    ended.add(index)
                    self.generations.finish_choice(self.generation, index)
            yield deltas

    @property
    def usage(self) -> Json:
        """The token counts so far.

        A prompt counts once, however many choices it has, and so does what its first one found of
        it in the prefix cache: the others find what the first has computed.
        """
        firsts = range(0, len(self.texts), self.choices_per_prompt)
        return usage_of(
            prompt_tokens=sum(self.prompt_lengths[index] for index in firsts),
            cached_tokens=sum(self.generation.cached_tokens.get(index, 0) for index in firsts),
            output_tokens=sum(text.num_tokens for text in self.texts),
        )

    def release(self) -> None:
        """Forget the generation: what still runs of it is cancelled, what it used is charged."""
        self.generations.end(self.generation, cause=CancelCause.DISCONNECT, on_left=self._settle)

    def _settle(self) -> None:
        generation = self.generation
        self.rate_gate.settle(
            self.reservation,
            computed_tokens=sum(
                min(read, self.prompt_lengths[index]) - generation.cached_tokens.get(index, 0)
                for index, read in generation.read_tokens.items()
            ),
            outputs=[*generation.num_outputs.values()],
        )


async def collect(answer: Answer) -> Json:
    """Return the whole answer once it is complete.

    Raises:
        ApiError: The generation was ended early.
    """
    pieces: list[list[str]] = [[] for _ in answer.texts]
    logprobs: list[list[Written]] = [[] for _ in answer.texts]
    reasons = [FinishReason.LENGTH for _ in answer.texts]
    async for deltas in answer.deltas():
        for index, delta in deltas:
            pieces[index].append(delta.text)
            logprobs[index] += map(answer.format.write, delta.logprobs)
            reasons[index] = delta.finish_reason or reasons[index]
    choices = [
        FinishedChoice("".join(text), tuple(tokens), reason)
        for text, tokens, reason in zip(pieces, logprobs, reasons, strict=True)
    ]
    return answer.format.whole(choices, answer.usage)


async def unless_disconnected(
    work: Coroutine[Any, Any, T], *, receive: Receive, cancel_on_disconnect: bool
) -> T | None:
    """Wait for `work` while watching the connection.

    Args:
        work: Cancelled when the client hangs up, if that is to be so; else waited for all the same.
        receive: The request's, its body already read.
        cancel_on_disconnect: See `work`.

    Returns:
        The result; None when the client has hung up and the work was cancelled.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and cancel_on_disconnect:
            return None
        return await working
    finally:
        await _cancel(working, watching)


class EventStream(Response):
    """An answer as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer) -> None:
        super().__init__(headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send until the answer is complete or the client hangs up.

        Raises:
            ApiError: The generation was ended early, and nothing was sent.
        """
        try:
            await unless_disconnected(
                self._send_all(send),
                receive=receive,
                cancel_on_disconnect=self._answer.cancel_on_disconnect,
            )
        finally:
            self._answer.release()

    async def _send_all(self, send: Send) -> None:
        """Send the events. The head waits for the first: until then, the status can tell an error.

        Raises:
            ApiError: The generation was ended early, and nothing was sent.
        """
        has_begun = False
        try:
            async for body in self._events():
                if not has_begun:
                    await self._send_head(send)
                    has_begun = True
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        except ApiError as error:
            if not has_begun:
                raise
            body = _event(error.body())  # and no `[DONE]` behind it
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_head(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )

    async def _events(self) -> AsyncIterator[bytes]:
        """Yield the events, those of one step together.

        Raises:
            ApiError: The generation was ended early.
        """
        answer = self._answer
        openings = [answer.format.opening(index) for index in range(len(answer.texts))]
        head = b"".join(_event(opening) for opening in openings if opening is not None)
        async for deltas in answer.deltas():
            yield head + b"".join(
                _event(answer.format.chunk(index, delta))
                for index, delta in deltas
                if delta.text or delta.logprobs or delta.finish_reason is not None
            )
            head = b""
        tail = _event(answer.format.usage_chunk(answer.usage)) if answer.includes_usage else b""
        yield tail + _DONE


def _event(content: object) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


async def _disconnect(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel what still runs and wait until it has cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
