"""Conversations as texts: records of messages, or of a prompt and its answer, through a tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from corp.data.files import Documents, JsonLines
from corp.data.tables import Column
from corp.errors import DataError

Message: TypeAlias = dict[str, str]
LISTS = ("messages", "conversations", "conversation")
PAIRS = (
    ("prompt", "answer"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
)
ROLES = {"human": "user", "gpt": "assistant"}  # names in some collections


class Chats(Documents):
    """Every record of a source as one text, in the form in which the model sees a conversation."""

    def __init__(self, source: JsonLines | Column, template: Callable[[list[Message]], str]) -> None:
        self.source, self.template, self.path = source, template, source.path

    def __len__(self) -> int:
        return len(self.source)

    def read(self, number: int) -> str:
        messages = messages_of(self.source.record(number), self.source.where(number))
        try:
            return self.template(messages)
        except Exception as error:  # templates raise their own errors
            raise DataError(f"{self.source.where(number)}: the chat template refuses it: {error}") from error


def template_of(tokenizer: Any) -> Callable[[list[Message]], str]:
    """The function from messages to the text that the model was trained on, including special tokens."""
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the tokenizer has no chat template (chat_template.jinja, or an entry of tokenizer_config.json); "
            "calibrate on plain texts, or take the tokenizer of the instruct model"
        )

    def template(messages: list[Message]) -> str:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
        return text

    return template


def messages_of(record: Mapping[str, Any], where: str) -> list[Message]:
    """The conversation in a record: its list of messages, or two: the user's prompt and the assistant's answer."""
    for name in LISTS:
        if isinstance(record.get(name), list):
            return [_message(entry, where) for entry in record[name]]
    for asked, answered in PAIRS:
        if isinstance(record.get(asked), str) and isinstance(record.get(answered), str):
            user, assistant = record[asked], record[answered]
            return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    raise DataError(
        f"{where} holds no conversation: it needs {LISTS[0]!r}, a list of roles and contents, or two fields such as "
        f"{PAIRS[0][0]!r} and {PAIRS[0][1]!r}; it has {', '.join(map(repr, record)) or 'nothing'}"
    )


def _message(entry: Any, where: str) -> Message:
    """A message with role and content, which may also be called from and value."""
    fields = entry if isinstance(entry, Mapping) else {}
    role, content = (fields.get(a, fields.get(b)) for a, b in (("role", "from"), ("content", "value")))
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(f"{where}: a message needs a role and a content, both text: {str(entry)[:80]}")
    return {"role": ROLES.get(role, role), "content": content}
