"""Chat templates: messages of roles and contents -> the text that a model was trained on.

A template is a Jinja program that comes with a model. It is rendered as `transformers` renders it
(blocks trimmed, `raise_exception`, a `tojson` that keeps characters), in Jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

Messages = Sequence[Mapping[str, str]]
"""Each with `role` ("system", "user", "assistant") and `content`."""


class ChatTemplate:
    """A compiled template. `bos_token` and `eos_token` are what it may write by these names.

    Raises:
        ValueError: for a template that is no Jinja.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        if not isinstance(source, str):
            raise ValueError(f"source: expected the text of a chat template, got {source!r}")
        self.source = source
        self.names = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self.template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"source: the chat template cannot be read: {error}") from error

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """The text of `messages`; with `add_generation_prompt` a reply may follow at once.

        Raises:
            ValueError: for no messages, one without a role or a content, or messages that the
                template refuses.
        """
        check_messages(messages)
        plain = [dict(message) for message in messages]
        try:
            return self.template.render(
                messages=plain, add_generation_prompt=add_generation_prompt, **self.names
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"messages: the chat template refuses them: {error}") from error


def check_messages(messages: Messages) -> None:
    """ValueError that names the first message which is none."""
    if isinstance(messages, (str, Mapping)) or not messages:
        raise ValueError(f"messages: expected a list of at least one, got {messages!r}")
    for i, message in enumerate(messages):
        fits = isinstance(message, Mapping) and {"role", "content"} <= message.keys()
        if not fits or not all(isinstance(value, str) for value in message.values()):
            raise ValueError(f"messages[{i}]: expected texts `role` and `content`, got {message!r}")


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
