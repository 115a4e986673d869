"""Texts into batches: every source, packing, windows, padding; deterministic, bounded, and errors that say where."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from corp.data import text
from corp.data.documents import drawn, in_order, open_documents
from corp.errors import DataError
from tests.helpers.hf_folders import WORDS, sentences, tokenizer

EOS, BOS = 1, 3


def documents(path: Path, field: str = "text", *, lines: bool = False, piece: int = 1 << 20) -> list[str]:
    return [doc for doc, _ in in_order(open_documents([path], field=field, lines=lines, piece=piece))]


def rows(batches: text.TextBatches) -> list[list[int]]:
    """The real tokens of every sequence, read off the batches."""
    return [
        ids[mask.bool()].tolist()
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    path = tmp_path / "stories.txt"
    path.write_text("\n<|endoftext|>\n".join(sentences(9)))
    return path


def test_plain_text_is_split_at_separators_and_stripped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n<|endoftext|>\nthree<|endoftext|>\n \n")
    assert documents(tmp_path / "a.txt") == ["one\ntwo", "three"]


def test_plain_text_without_separators_is_one_document_or_one_per_line(tmp_path: Path) -> None:
    (tmp_path / "a.raw").write_text("one\n\ntwo\n")
    assert documents(tmp_path / "a.raw") == ["one\n\ntwo\n"]
    assert documents(tmp_path / "a.raw", lines=True) == ["one", "two"]


@pytest.mark.parametrize("content", ["wörter über wörter\n" * 9, "wörter über " * 20, "ö" * 50])
def test_pieces_of_a_text_add_up_to_it_and_only_the_first_begins_it(tmp_path: Path, content: str) -> None:
    path = tmp_path / "long.txt"
    path.write_text(content, encoding="utf-8")
    (source,) = open_documents([path], field="", lines=False, piece=31)
    pieces = [source.read(i) for i in range(len(source))]
    assert "".join(pieces) == content
    assert len(pieces) > 2
    assert max(len(piece.encode()) for piece in pieces) <= 32
    assert [source.begins(i) for i in range(len(pieces))] == [True] + [False] * (len(pieces) - 1)


def test_jsonl_and_its_complaints(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "eins \\ud83d"}\n\n{"body": "zwei", "id": 3}\nnonsense\n[1]\n')
    source = open_documents([path], field="text", lines=False, piece=9)[0]
    assert source.read(0) == "eins ?"  # half a character is not handed on
    with pytest.raises(DataError, match=r"a.jsonl, line 3 has no field 'text'; it has 'body', 'id'; .*field=NAME"):
        source.read(1)
    with pytest.raises(DataError, match="line 4: not JSON"):
        source.read(2)
    with pytest.raises(DataError, match="line 5: expected a JSON object, found a list"):
        source.read(3)
    with pytest.raises(DataError, match="'id' holds a int, not text"):
        open_documents([path], field="id", lines=False, piece=9)[0].read(1)


def test_tables_by_header_and_by_number(tmp_path: Path) -> None:
    quoted = tmp_path / "a.csv"
    quoted.write_text('id,text\n1,"über, und\nzwei Zeilen"\n2,kurz\n', encoding="utf-8")
    assert documents(quoted) == ["über, und\nzwei Zeilen", "kurz"]
    tabs = tmp_path / "b.csv"  # tab-separated whatever it is called; one quotation mark alone is text
    tabs.write_text('x\t"erst\ny\tzweit\n')
    assert documents(tabs, "2") == ['"erst', "zweit"]
    with pytest.raises(DataError, match=r"b.csv, line 1 has no field 'text'; it has 'x', '\"erst'.*number \(from 1\)"):
        documents(tabs)
    tabs.write_text("x\tone\ny\n")
    with pytest.raises(DataError, match="line 2: the row has 1 columns, so there is no column 2"):
        documents(tabs, "2")


def test_folders_hold_files_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("plain")
    (tmp_path / "b.jsonl").write_text('{"text": "json"}')
    (tmp_path / "README.md").write_text("not data")
    assert documents(tmp_path) == ["json", "plain"]


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file or folder"):
        documents(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no texts in"):
        documents(tmp_path)
    (tmp_path / "a.doc").write_text("x")
    with pytest.raises(DataError, match=r"not '\.doc'"):
        documents(tmp_path / "a.doc")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="there is no text in"):
        documents(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes(b"abc \xe9 def")
    with pytest.raises(DataError, match="byte 4 is not UTF-8"):
        documents(tmp_path / "latin.txt")


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = pyarrow.table({"text": [f"doc {i}" for i in range(10)], "n": list(range(10))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    assert documents(tmp_path / "a.parquet") == [f"doc {i}" for i in range(10)]
    sources = open_documents([tmp_path], field="text", lines=False, piece=9)
    assert sorted(drawn(sources, 0)) == sorted(documents(tmp_path))
    with pytest.raises(DataError, match="has no field 'body'; it has 'text', 'n'"):
        documents(tmp_path / "a.parquet", "body")


def test_parquet_with_text_that_is_none(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    damaged = pa.array([b"fine", b"\xe1("], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": damaged}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet cannot be read as parquet: .*codec"):
        documents(tmp_path / "a.parquet")


def test_saved_dataset(tmp_path: Path) -> None:
    datasets, pyarrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    # With a fingerprint given, the library need not pickle the table to make one: pyarrow 26 cannot be pickled so.
    rows = datasets.Dataset(pyarrow.table({"text": ["one", "two"]}), fingerprint="0123456789abcdef")
    rows.save_to_disk(str(tmp_path / "set"))
    assert documents(tmp_path / "set") == ["one", "two"]
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "sets"))
    with pytest.raises(DataError, match=r"several splits; give one of them, e\.g\. .*train"):
        documents(tmp_path / "sets")


@pytest.mark.parametrize(("module", "name"), [("pyarrow.parquet", "a.parquet"), ("datasets", "set")])
def test_missing_libraries_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    if name == "set":
        (tmp_path / name).mkdir()
        (tmp_path / name / "dataset_info.json").write_text("{}")
    else:
        (tmp_path / name).write_bytes(b"PAR1")
    with pytest.raises(DataError, match=f"pip install {module.partition('.')[0]}"):
        documents(tmp_path / name)


def test_drawing_is_a_permutation_that_the_seed_decides(tmp_path: Path) -> None:
    lines = [f"doc {i}" for i in range(600)]  # more than two blocks, in two files
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines[:250]))
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines[250:]))
    sources = open_documents([tmp_path], field="text", lines=False, piece=9)
    first = list(drawn(sources, 1))
    assert sorted(first) == sorted(lines)
    assert first != lines
    assert first == list(drawn(sources, 1)) != list(drawn(sources, 2))


def test_packing_joins_documents_with_eos_and_takes_no_more_than_is_needed(stories: Path) -> None:
    calls = []

    class Counting:
        bos_token_id, eos_token_id, pad_token_id = BOS, EOS, 0

        def __init__(self) -> None:
            self.inner = tokenizer()

        def __len__(self) -> int:
            return len(self.inner)

        def __call__(self, *args: object, **kwargs: object) -> object:
            calls.append(args)
            return self.inner(*args, **kwargs)

    batches = text.packed([stories], Counting(), length=10, samples=3, seed=0, batch_size=2)
    assert (batches.samples, len(batches), batches.tokens) == (3, 2, 30)
    assert len(calls) == 3  # 13 tokens each and EOS between: three documents fill thirty, the others are not touched
    flat = [token for row in rows(batches) for token in row]
    assert [i for i, token in enumerate(flat) if token == BOS] == [0, 14, 28]
    assert [i for i, token in enumerate(flat) if token == EOS] == [13, 27]
    assert all(bool((batch["attention_mask"] == 1).all()) for batch in batches)


def test_one_token_between_documents_where_bos_and_eos_are_the_same(stories: Path) -> None:
    batches = text.packed([stories], tokenizer(bos="</s>"), length=30, samples=1, seed=0)
    assert [i for i, token in enumerate(rows(batches)[0]) if token == EOS] == [0, 13, 26]


def test_text_that_does_not_suffice_gives_fewer_sequences(stories: Path) -> None:
    assert text.packed([stories], tokenizer(), length=50, samples=100, seed=0).samples == 9 * 14 // 50
    short = text.packed([stories], tokenizer(), length=500, samples=100, seed=0)
    assert (short.samples, short.tokens) == (1, 9 * 14 - 1)


def test_a_document_per_sequence_is_cut_and_padded(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat\n\nthe dog sat on the mat\na\n")
    batches = text.one_per_document([tmp_path / "a.txt"], tokenizer(), length=5, samples=None, seed=0)
    (batch,) = batches
    assert batch["attention_mask"].sum(1).tolist() == [3, 5, 2]
    ids = {word: 4 + i for i, word in enumerate(WORDS)}
    assert rows(batches)[0] == [BOS, ids["the"], ids["cat"]]
    assert rows(batches)[1] == [BOS, ids["the"], ids["dog"], ids["sat"], ids["on"]]
    assert bool((batch["input_ids"][batch["attention_mask"] == 0] == 0).all())
    two = text.one_per_document([tmp_path / "a.txt"], tokenizer(), length=5, samples=2, seed=0)
    assert two.samples == 2


def test_bos_is_put_where_the_tokenizer_does_not(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the dog sat on the mat\n")
    make = {"length": 4, "samples": None, "seed": 0}
    plain, with_bos = tokenizer(bos=None), tokenizer()
    assert rows(text.one_per_document([tmp_path / "a.txt"], plain, **make))[0][0] != BOS
    wanted = rows(text.one_per_document([tmp_path / "a.txt"], with_bos, **make))
    assert rows(text.one_per_document([tmp_path / "a.txt"], plain, **make, bos=True)) == wanted
    assert rows(text.one_per_document([tmp_path / "a.txt"], with_bos, **make, bos=True)) == wanted


def test_windows_cover_the_text_in_order_and_leave_out_the_tail(tmp_path: Path) -> None:
    words = sentences(1, 46)[0]
    (tmp_path / "a.raw").write_text(words)
    whole = tokenizer()(words)["input_ids"]  # 47 with BOS
    batches = text.windows([tmp_path / "a.raw"], tokenizer(), length=10)
    assert rows(batches) == [whole[i : i + 10] for i in (0, 10, 20, 30)]
    judged = [target[target != text.IGNORED].tolist() for _, targets in batches.scored() for target in targets]
    assert judged == [row[1:] for row in rows(batches)]
    assert rows(text.windows([tmp_path / "a.raw"], tokenizer(), length=60)) == [whole]  # the only one stays


def test_overlapping_windows_judge_every_token_but_the_first_once(tmp_path: Path) -> None:
    words = sentences(1, 46)[0]
    (tmp_path / "a.raw").write_text(words)
    whole = tokenizer()(words)["input_ids"]
    batches = text.windows([tmp_path / "a.raw"], tokenizer(), length=10, stride=4, batch_size=3)
    assert rows(batches)[1] == whole[4:14]
    judged = [target[target != text.IGNORED].tolist() for _, targets in batches.scored() for target in targets]
    assert [token for row in judged for token in row] == whole[1:]
    assert len(judged[0]) == 9
    assert len(judged[1]) == 4
    for (batch, targets), start in zip(batches.scored(), range(0, 99, 3), strict=False):
        for row in range(len(targets)):  # the target of a position is the token after it
            at = (targets[row] != text.IGNORED).nonzero()[:, 0]
            assert targets[row, at].tolist() == [whole[(start + row) * 4 + int(i) + 1] for i in at]
            assert batch["input_ids"][row, at].tolist() == [whole[(start + row) * 4 + int(i)] for i in at]


def test_a_large_text_in_pieces_gives_the_tokens_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.raw").write_text("\n".join(sentences(20)))
    whole = rows(text.windows([tmp_path / "a.raw"], tokenizer(), length=10))
    monkeypatch.setattr(text, "WHOLE_PIECE", 100)
    assert rows(text.windows([tmp_path / "a.raw"], tokenizer(), length=10)) == whole


def test_single_batches_are_those_of_the_whole_pass(stories: Path) -> None:
    batches = text.packed([stories], tokenizer(), length=10, samples=8, seed=0, batch_size=3)
    everything = list(batches)
    picked = list(batches.indexed(lambda i: i == 1))
    assert [(index, start) for index, start, _ in picked] == [(1, 3)]
    assert torch.equal(picked[0][2]["input_ids"], everything[1]["input_ids"])
    assert len(list(batches)) == 3  # more than once


def test_the_fingerprint_is_of_what_the_model_sees(stories: Path) -> None:
    def fingerprint(**changes: int) -> str:
        return text.packed([stories], tokenizer(), **{"length": 10, "samples": 5, "seed": 0, **changes}).fingerprint()

    assert fingerprint() == fingerprint()
    assert len({fingerprint(), fingerprint(seed=1), fingerprint(length=9), fingerprint(samples=4)}) == 4
    stories.write_text(stories.read_text().replace("cat", "dog"))
    changed = fingerprint()
    stories.write_text(stories.read_text().replace("dog", "cat"))
    assert changed != fingerprint()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"length": 1}, "length=1"), ({"samples": 0}, "samples=0"), ({"batch_size": -1}, "batch_size=-1")],
)
def test_numbers_that_make_no_sense(stories: Path, changes: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        text.packed([stories], tokenizer(), **{"length": 10, "samples": 5, "seed": 0, **changes})


def test_strides_that_leave_out_text_are_refused(stories: Path) -> None:
    with pytest.raises(DataError, match="leaves out text"):
        text.windows([stories], tokenizer(), length=10, stride=11)


def test_white_space_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "  "}\n')
    with pytest.raises(DataError, match="only white space"):
        text.packed([tmp_path], tokenizer(), length=10, samples=5, seed=0)


def test_parts_are_disjoint_drawn_by_the_seed_and_add_up(stories: Path) -> None:
    whole = text.packed([stories], tokenizer(), length=8, samples=6, seed=0, batch_size=2)
    parts = whole.parts([2, 5], seed=1)
    assert [part.samples for part in parts] == [2, 3]
    together = [row for part in parts for row in rows(part)]
    assert len({*map(tuple, together)} & {*map(tuple, rows(whole))}) == 5
    assert together == [row for part in whole.parts([2, 5], seed=1) for row in rows(part)]
    assert together != [row for part in whole.parts([2, 5], seed=2) for row in rows(part)]
    assert whole.samples == 6
