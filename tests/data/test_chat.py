"""Conversations through a tokenizer's chat template: every kind of record and file, and complaints that say where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corp.data import text
from corp.data.chat import messages_of
from corp.errors import DataError
from tests.helpers.hf_folders import tokenizer

TEMPLATE = "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} </s>{% endfor %}"
RECORDS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]},
    {"prompt": "a dog", "answer": "ran"},
    {"conversations": [{"from": "human", "value": "it was"}, {"from": "gpt", "value": "happy"}]},
]
TEXTS = [["the cat", "sat"], ["a dog", "ran"], ["it was", "happy"]]


def chatty() -> Any:
    tok = tokenizer()
    tok.chat_template = TEMPLATE
    return tok


def expected(tok: Any) -> list[list[int]]:
    """Token ids of every conversation, written out by hand."""
    words = [
        ["<s>", "user", *asked.split(), "</s>", "<s>", "assistant", *answered.split(), "</s>"]
        for asked, answered in TEXTS
    ]
    return [tok.convert_tokens_to_ids(line) for line in words]


def sequences(batches: text.TextBatches) -> list[list[int]]:
    return [batches.ids[span.start : span.end].tolist() for span in batches.spans]


def write(folder: Path, kind: str) -> Path:
    if kind == "jsonl":
        path = folder / "chats.jsonl"
        path.write_text("\n".join(map(json.dumps, RECORDS)))
        return path
    rows = [{"messages": messages_of(record, "")} for record in RECORDS]
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as parquet

        parquet.write_table(pa.Table.from_pylist(rows), folder / "chats.parquet", row_group_size=2)
        return folder / "chats.parquet"
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    return folder / "saved"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_template_decides_every_token(kind: str, tmp_path: Path) -> None:
    """No special tokens but the template's own: not the tokenizer's BOS, not EOS between documents."""
    tok, path = chatty(), write(tmp_path, kind)
    alone = text.one_per_document([path], tok, length=64, samples=None, seed=0, chat=True)
    assert sequences(alone) == expected(tok)
    (packed,) = sequences(text.packed([path], tok, length=64, samples=1, seed=0, chat=True))
    assert len(packed) == sum(map(len, expected(tok)))
    for one in expected(tok):
        assert any(packed[start : start + len(one)] == one for start in range(len(packed)))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, r"line 1 holds no conversation: it needs 'messages'.* it has 'text'"),
        ({"messages": ["hello"]}, r"line 1: a message needs a role and a content, both text: hello"),
        ({"messages": [{"role": "user", "content": None}]}, "a message needs a role and a content"),
        ({"prompt": "x"}, "holds no conversation"),
    ],
)
def test_records_that_are_no_conversation(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match=message):
        text.one_per_document([path], chatty(), length=64, samples=None, seed=0, chat=True)


def test_what_cannot_be_a_chat(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl")
    with pytest.raises(DataError, match=r"the tokenizer has no chat template \(chat_template.jinja"):
        text.packed([path], tokenizer(), length=8, samples=1, seed=0, chat=True)
    plain = tmp_path / "a.txt"
    plain.write_text("the cat")
    with pytest.raises(DataError, match=r"conversations are read from .jsonl and .parquet"):
        text.packed([plain], chatty(), length=8, samples=1, seed=0, chat=True)
    strict = chatty()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"line 1: the chat template refuses it: roles must alternate"):
        text.one_per_document([path], strict, length=8, samples=None, seed=0, chat=True)
