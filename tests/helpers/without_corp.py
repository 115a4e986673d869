"""Run by test_export in a process of its own, which cannot import corp: load what was exported, compare.

Arguments: the file that makes a torchvision importable which does not fit torch (it stands alone), then folders, each
with expected.safetensors beside what timm or transformers saved.
"""

from __future__ import annotations

import runpy
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class Blocker(MetaPathFinder):
    def find_spec(self, fullname: str, *_: Any) -> None:
        if fullname.partition(".")[0] == "corp":
            raise ModuleNotFoundError("corp is blocked here", name="corp")


def largest_difference(folder: Path) -> float:
    """Over the outputs that were expected; generated tokens must be the same."""
    from safetensors.torch import load_file

    saved = load_file(folder / "expected.safetensors")
    inputs = {key.removeprefix("in."): value for key, value in saved.items() if key.startswith("in.")}
    if (folder / "auto.txt").read_text() == "timm":
        import timm

        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        return float((model(inputs["input"]) - saved["out.states"]).abs().max())
    import transformers

    auto = getattr(transformers, (folder / "auto.txt").read_text())
    model = auto.from_pretrained(folder, dtype="auto").eval()
    outputs = model(**inputs)
    found = outputs["logits"] if "logits" in outputs else outputs["last_hidden_state"]
    if "out.tokens" in saved:
        tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        assert tokens.tolist() == saved["out.tokens"].tolist(), f"{folder}: other tokens are generated"
    real = inputs["attention_mask"].bool() if "attention_mask" in inputs else slice(None)
    return float((found - saved["out.states"])[real].abs().max())


def main(torchvision: str, *folders: str) -> None:
    sys.meta_path.insert(0, Blocker())
    try:
        import corp  # noqa: F401
    except ModuleNotFoundError:
        pass
    else:
        raise SystemExit("corp can be imported: this proves nothing")
    import torch

    cure = runpy.run_path(torchvision)  # kept: what it declares lives as long as it does
    cure["make_importable"]()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    for folder in folders:
        print(Path(folder).name, largest_difference(Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
