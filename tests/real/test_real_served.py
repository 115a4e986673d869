"""The story model in the programs that people use: llama.cpp's perplexity is torch's, and lm-eval runs a task."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import corp
from corp import CorpError, Recipe
from corp.adapters import hf_models
from corp.calibration.settings import Settings
from corp.data import text
from corp.data.documents import in_order, open_documents
from corp.evaluate.tasks import run_tasks
from corp.storage import folder as storage
from corp.storage.export import llama_cpp
from tests.helpers.llama import greedy, score

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def stories(assets: Path) -> list[str]:
    file = assets / "language" / "text" / "tinystories.txt"
    return [story for story, _ in in_order(open_documents([file], field="", lines=True, piece=1))][:-1]


@pytest.mark.skipif(not llama_cpp.available(), reason="llama.cpp comes with the package xllamacpp")
@pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")  # 40 stories are few, and it says so
def test_llama_cpp_tells_the_same_stories(assets: Path, stories: list[str], tmp_path: Path) -> None:
    """Every layer with its own width, pairs and values pruned too: perplexity to four digits, greedy tokens alike."""
    source = str(assets / "language" / "stories15M")
    model, tokenizer = hf_models.create(source), hf_models.tokenizer(source)
    batches = text.of_texts(stories[:40], tokenizer, length=256, batch_size=8, bos=True)
    overrides = {f"model.layers.{i}.*": {"mlp": 0.1 + 0.05 * i} for i in range(6)}
    stats = corp.calibrate(model, batches, settings=Settings("all"))
    result = corp.apply(model, stats, corp.plan(model, stats, Recipe(mlp=0.1, attn=0.25, vo=0.25, overrides=overrides)))
    corp.save(result, tmp_path / "small", companions=[source])
    made = storage.export(tmp_path / "small", tmp_path / "out", to="gguf")
    assert made.difference is not None
    assert made.difference < 1e-5
    llama = llama_cpp.Llama(tmp_path / "out" / "model.gguf")
    pruned: Any = result.model
    scored, exact = [], []
    for story in stories[100:102]:
        ids = tokenizer(story)["input_ids"][:24]
        scored += score(llama, ids)
        with torch.no_grad():
            found = pruned(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        exact += found.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    perplexities = [math.exp(-sum(each) / len(each)) for each in (scored, exact)]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=5e-5)  # four digits; two float32 programs
    prompt = tokenizer("Once upon a time, there was a little dog named Max.")["input_ids"]
    told = pruned.generate(input_ids=torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :]
    assert greedy(llama, prompt, 24) == told.tolist()


@pytest.mark.filterwarnings("ignore")  # of lm-eval and what it imports
def test_lm_eval_runs_a_task_over_local_data(
    assets: Path, stories: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of four sentences goes on with the story: the model knows, and no longer does without its MLPs."""
    pytest.importorskip("lm_eval", reason="pip install lm-eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    halves = [story.split(". ", 3) for story in stories[200:300]]
    usable = [(". ".join(half[:3]) + ".", half[3][:120]) for half in halves if len(half) == 4][:24]
    records = [
        {"context": context, "choices": [usable[(i + k) % len(usable)][1] for k in range(4)], "label": 0}
        for i, (context, _) in enumerate(usable)
    ]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "next_sentence.yaml").write_text(
        f"""task: next_sentence
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "test.jsonl"}}}, cache_dir: {tmp_path / "cache"}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}]
"""
    )
    source = str(assets / "language" / "stories15M")
    model, tokenizer = hf_models.create(source), hf_models.tokenizer(source)
    (found,) = run_tasks(model, tokenizer, [str(tmp_path / "next_sentence.yaml")]).values()
    assert found["acc"] >= 0.75  # one in four by chance
    for content, message in (("group: x", "no entry 'task'"), ("task: [", "is not YAML")):
        (tmp_path / "odd.yaml").write_text(content)
        with pytest.raises(CorpError, match=message):
            run_tasks(model, tokenizer, [str(tmp_path / "odd.yaml")])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "down_proj" in name:
                parameter.zero_()
    (blind,) = run_tasks(model, tokenizer, [str(tmp_path / "next_sentence.yaml")]).values()
    assert blind["acc"] < found["acc"]
