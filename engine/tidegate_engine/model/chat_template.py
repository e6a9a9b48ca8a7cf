"""Chats as prompts, by the Jinja template that comes with a model."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, LoopControlExtension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The messages can't be turned into a prompt: the model has no template, or it refuses them."""


class ChatTemplate:
    """A compiled template, with what `transformers` offers to templates.

    Raises:
        ChatTemplateError: It isn't valid Jinja.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        # Templates come with the model: they may compute, but not reach Python's objects.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _GenerationBlocks],
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template isn't valid: {error}") from error
        self._special_tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the prompt that asks for the next message of the assistant.

        Raises:
            ChatTemplateError: The template refuses these messages, or fails on them.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                **self._special_tokens,
            )
        # What a template can raise by computing on what it didn't expect.
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ChatTemplateError(f"messages: {error}") from error


class _GenerationBlocks(Extension):
    """`{% generation %}` marks the assistant's words for training; the text is what's inside."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(value: Any, **options: Any) -> str:  # noqa: ANN401 (any JSON value)
    # Jinja's own filter escapes characters of HTML, which models have never seen.
    return json.dumps(value, **{"ensure_ascii": False, **options})
