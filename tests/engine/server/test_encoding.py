"""Long texts of one tenant don't hold up another's."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from tidegate_engine.server.caller import Caller
from tidegate_engine.server.encoding import Encoders
from tidegate_engine.server.errors import ApiError
from tidegate_engine.server.intake import ENCODE_INLINE_CHARS, take_chat, take_completion
from tidegate_engine.server.schema import ChatBody, CompletionBody
from tidegate_testing.engines import MODEL, HeldTokenizer, a_served_model

CALLER = Caller(tenant="acme", request_id="g", arrived_at=0.0)


class Desk:
    """Texts that are encoded, by name, each until it is told to end."""

    def __init__(self) -> None:
        self.encoders = Encoders()
        self.begun: list[str] = []
        self.ends: dict[str, threading.Event] = {}
        self._news = threading.Condition()

    def bring(self, tenant: str, name: str) -> "asyncio.Task[str]":
        self.ends[name] = threading.Event()
        return asyncio.create_task(self.encoders.run(tenant, self._work(name)))

    def _work(self, name: str) -> Callable[[], str]:
        def work() -> str:
            with self._news:
                self.begun.append(name)
                self._news.notify_all()
            self.ends[name].wait(timeout=30)
            return name

        return work

    async def until_begun(self, *names: str) -> None:
        def wait() -> bool:
            with self._news:
                return self._news.wait_for(lambda: set(names) <= set(self.begun), timeout=30)

        assert await asyncio.to_thread(wait)

    def end_all(self) -> None:
        for end in self.ends.values():
            end.set()


async def test_a_tenants_texts_wait_for_each_other_and_nobody_else_for_all_of_them() -> None:
    desk = Desk()
    texts = [desk.bring("acme", f"acme{number}") for number in range(20)]
    await desk.until_begun("acme0")
    texts.append(desk.bring("zeta", "zeta"))
    await desk.until_begun("zeta")
    assert desk.begun == ["acme0", "zeta"]
    desk.end_all()
    names = await asyncio.gather(*texts)
    assert names[-1] == "zeta"
    assert [name for name in desk.begun if name != "zeta"] == names[:-1]


async def test_tenants_take_turns() -> None:
    desk = Desk()
    texts = [desk.bring(tenant, f"{tenant}{number}") for tenant in "abcd" for number in range(2)]
    await desk.until_begun("a0", "b0")
    desk.end_all()
    await asyncio.gather(*texts)
    assert sorted(desk.begun[:4]) == ["a0", "b0", "c0", "d0"]


async def test_who_leaves_while_waiting_is_never_encoded_and_keeps_nobody_out() -> None:
    desk = Desk()
    first, left, other = desk.bring("a", "a0"), desk.bring("a", "a1"), desk.bring("b", "b0")
    await desk.until_begun("a0", "b0")
    left.cancel()
    desk.end_all()
    assert [await first, await other] == ["a0", "b0"]
    assert left.cancelled()
    assert sorted(desk.begun) == ["a0", "b0"]
    assert await desk.encoders.run("a", lambda: "next") == "next"


async def test_who_leaves_while_being_encoded_keeps_the_thread_until_it_is_free() -> None:
    desk = Desk()
    left = desk.bring("a", "a0")
    await desk.until_begun("a0")
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    later = desk.bring("a", "a1")
    other = desk.bring("b", "b0")
    await desk.until_begun("b0")
    assert desk.begun == ["a0", "b0"]
    desk.end_all()
    assert [await later, await other] == ["a1", "b0"]


async def test_a_text_that_fails_gives_its_turn_on() -> None:
    encoders = Encoders()

    def fail() -> None:
        raise ValueError("no text")

    for _ in range(5):
        with pytest.raises(ValueError, match="no text"):
            await encoders.run("a", fail)
    assert await encoders.run("a", lambda: 1) == 1


async def test_a_text_that_is_too_long_however_it_is_cut_is_not_encoded() -> None:
    tokenizer = HeldTokenizer()
    model = a_served_model(tokenizer=tokenizer, max_context_tokens=5000)
    body = CompletionBody.model_validate({"model": MODEL, "prompt": ["a", "x" * 5001]})
    with pytest.raises(ApiError, match=r"5001 characters.*5000") as caught:
        await take_completion(body, caller=CALLER, model=model)
    assert (caught.value.code, caught.value.param) == ("prompt_too_long", "prompt")
    assert not tokenizer.begun.is_set()
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 5001}]}
    with pytest.raises(ApiError) as caught:
        await take_chat(ChatBody.model_validate(chat), caller=CALLER, model=model)
    assert (caught.value.code, caught.value.param) == ("prompt_too_long", "messages")
    assert ENCODE_INLINE_CHARS < 5001
