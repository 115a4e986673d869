"""Train a small OPT on short stories: a model of OPT's classes whose perplexity can be measured without OPT's weights.

Needs CORP_ASSETS (language/text/tinystories.txt). Writes a folder for transformers' from_pretrained, with a tokenizer
trained on the same stories and the two halves of the split: train.txt (to calibrate on) and held-out.txt (to judge on).

    CORP_ASSETS=... python scripts/train_opt.py --out ~/.cache/corp/opt-stories
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import corp  # noqa: F401  (first: it makes transformers importable where torchvision does not match torch)

# isort: split
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

DEFAULT_OUT = Path.home() / ".cache" / "corp" / "opt-stories"
SEPARATOR = "<|endoftext|>"
SEED = 0
HELD_OUT = 0.1
VOCABULARY = 4096
CONTEXT = 256
BATCH_SIZE = 8
PEAK_LR = 2e-3
WARMUP = 0.06
WEIGHT_DECAY = 0.1


def main() -> None:
    """Split, train the tokenizer and the model, save both, and say what the perplexity is on unseen stories."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help="of 2,048 tokens each (default 800)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1, which is reproducible)")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)

    train_stories, held_out = split(read_stories())
    tokenizer = train_tokenizer(train_stories)
    seen, unseen = encode(tokenizer, train_stories), encode(tokenizer, held_out)
    model = build(tokenizer)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.2f} M parameters, {sum(map(len, seen))} tokens of {len(seen)} stories")
    print(f"held-out perplexity of the unigram model: {unigram_perplexity(seen, unseen):.1f}")
    started = time.perf_counter()
    train(model, torch.cat(seen), args.steps)
    print(f"trained {args.steps} steps in {time.perf_counter() - started:.0f} s")
    print(f"held-out perplexity of the model: {perplexity(model, unseen):.2f}")

    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    for name, stories in (("train.txt", train_stories), ("held-out.txt", held_out)):
        (args.out / name).write_text(f"\n{SEPARATOR}\n".join(stories), encoding="utf-8")
    print(f"wrote {args.out}")


def read_stories() -> list[str]:
    assets = os.environ.get("CORP_ASSETS", "")
    path = Path(assets, "language", "text", "tinystories.txt")
    if not assets or not path.is_file():
        sys.exit("CORP_ASSETS does not point at a folder with language/text/tinystories.txt")
    stories = path.read_text(encoding="utf-8").split(SEPARATOR)[:-1]  # the file ends in the middle of its last story
    return [story.strip() for story in stories if story.strip()]


def split(stories: list[str]) -> tuple[list[str], list[str]]:
    """Train and held-out, drawn: blocks of the file differ, so its last part would not be like the rest."""
    order = torch.randperm(len(stories), generator=torch.Generator().manual_seed(SEED)).tolist()
    cut = round(len(stories) * (1 - HELD_OUT))
    return [stories[i] for i in order[:cut]], [stories[i] for i in order[cut:]]


def train_tokenizer(stories: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with OPT's special tokens; as in OPT, </s> goes before every text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>"]  # OPT's order, so its configuration's ids hold
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(stories, trainer)
    core.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A </s> $B", special_tokens=[("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="</s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=CONTEXT,
    )


def encode(tokenizer: PreTrainedTokenizerFast, stories: list[str]) -> list[Tensor]:
    """</s> and the story, per story."""
    return [torch.tensor(tokenizer(story, verbose=False)["input_ids"]) for story in stories]


def build(tokenizer: PreTrainedTokenizerFast) -> OPTForCausalLM:
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=len(tokenizer),
            hidden_size=256,
            word_embed_proj_dim=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            ffn_dim=1024,
            max_position_embeddings=CONTEXT,
            dropout=0.0,
            attention_dropout=0.0,
        )
    )


def train(model: OPTForCausalLM, stream: Tensor, steps: int) -> None:
    """AdamW with a warm-up and a cosine schedule over windows of the stream; its epochs are cut at other places."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step / steps))
    batches = endless_batches(stream)
    model.train()
    for step in range(steps):
        batch = next(batches)  # (B, T)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    model.eval()


def endless_batches(stream: Tensor) -> Iterator[Tensor]:
    while True:
        first = int(torch.randint(CONTEXT, ()))
        count = (len(stream) - first) // CONTEXT
        windows = stream[first : first + count * CONTEXT].view(count, CONTEXT)
        for rows in torch.randperm(count).split(BATCH_SIZE):
            if len(rows) == BATCH_SIZE:
                yield windows[rows]


def lr_factor(progress: float) -> float:
    """Scale of the peak learning rate after this fraction of all steps: a linear rise, then half a cosine."""
    if progress < WARMUP:
        return progress / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))


@torch.no_grad()
def perplexity(model: OPTForCausalLM, stories: list[Tensor]) -> float:
    """exp(total NLL / total tokens) of </s> and one story at a time, at most as long as the context."""
    total, tokens = 0.0, 0
    for story in stories:
        story = story[None, :CONTEXT]
        total += float(model(input_ids=story, labels=story).loss) * (story.shape[1] - 1)
        tokens += story.shape[1] - 1
    return math.exp(total / tokens)


def unigram_perplexity(seen: list[Tensor], unseen: list[Tensor]) -> float:
    """What knowing only how often every token occurs gives: the number to be far below."""
    counts = torch.bincount(torch.cat(seen), minlength=VOCABULARY).double() + 1
    log_p = (counts / counts.sum()).log()
    return math.exp(-float(log_p[torch.cat([story[1:CONTEXT] for story in unseen])].mean()))


if __name__ == "__main__":
    main()
