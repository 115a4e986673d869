"""docs/results.md: our numbers beside the paper's, and what could not be measured and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import paper_numbers as paper
from corp.io.tables import markdown_table
from corp.report.sweeps import kind

Read = Callable[[str], Any]
HEAD = """# The paper's tables and figures, made here

`python -m benchmarks.paper` writes this page from `benchmarks/results/paper_*.json`. "–" marks
what could not be measured.

Available were the weights of DeiT-Tiny (a public dump, not the official file), 1,000 unlabelled photographs for calibration,
1,000 labelled images for evaluation, and two CPU cores. The labelled images are probably from ImageNet's training split,
so the dense model scores 79.2 % on them, while the paper reports 72.0 % on the validation set: compare shares of the dense
score, not the scores. The standard error of an accuracy here is about 1.5 points.

Not available were the weights of DeiT-Small to -Huge, of ViT-Large and of all DINOv2 models except Small, ImageNet's validation set, 4,000 calibration
images and a GPU. So accuracy is measured for Tiny only; parameters, operations, latency and throughput come from the right shapes with
random weights, and times are those of two CPU cores, not of an RTX 3090.

Our rows use the paper's recipe (`corp.Recipe.paper(...)`, `--preset paper`) unless they name another one. The default recipe is better:
[past the paper](beyond.md).
"""


def compose(read: Read) -> str:
    parts = [
        HEAD,
        corp_full(read),
        curves(read),
        sizes(read),
        rankings(read),
        presets(read),
        quoted(),
        efficiency(read),
    ]
    parts += [runtime(read), redundancy(read), dinov2(read), language(read)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def section(title: str, text: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"## {title}\n\n{text.strip()}\n\n{markdown_table(columns, rows)}"


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def corp_full(read: Read) -> str:
    cost, found = read("cost")["deit"], read("accuracy")["curves"]
    dense = found["dense"]["top1"]
    ours = {"base": dense} | {kind(r): r["top1"] for r in found["rows"] if _is(r, 0.5, "full")}
    rows = []
    for size, cases in paper.CORP_FULL.items():
        for case, (top1, flops, params) in cases.items():
            here = cost[size]["both 0.0" if case == "base" else f"{case} 0.5"]
            known = size == "Tiny"
            rows.append(
                (
                    f"{size}, {'dense' if case == 'base' else case}",
                    f"{percent(ours[case])} ({ours[case] / dense:.2f})" if known else "–",
                    f"{top1:.1f} ({top1 / cases['base'][0]:.2f})",
                    f"{here['params'] / 1e6:.1f}",
                    f"{params:.1f}",
                    f"{here['macs'] / 1e9:.2f}",
                    f"{flops:.1f}",
                )
            )
    text = """
Top-1 (and its share of the dense top-1), parameters and operations at 50 %. The paper's "FLOPs" count the attention products
of the dense model twice ([benchmarking.md](benchmarking.md) shows why we think so); ours are multiply-adds, counted in the same way
before and after. Two cells of the paper cannot be right: "Base, both" repeats the MLP row (58.2 M and 72.0 %), while its own
efficiency table has 51.2 M, which is the count after removing both."""
    columns = ("DeiT", "top-1 here", "top-1 paper", "M params here", "paper", "GMACs here", "GFLOPs paper")
    return section("Accuracy at 50 % (tab:corp_full)", text, columns, rows)


def _is(row: dict[str, Any], sparsity: float, compensate: str) -> bool:
    return max(row["mlp"], row["attn"]) == sparsity and row["compensate"] == compensate


def curves(read: Read) -> str:
    found = read("accuracy")["curves"]
    shares = sorted({max(row["mlp"], row["attn"]) for row in found["rows"]})
    by_case = {(kind(r), r["compensate"], max(r["mlp"], r["attn"])): r for r in found["rows"]}
    both = dict(zip(paper.SPARSITIES, paper.EFFICIENCY["Tiny"], strict=True))
    rows = []
    for what in ("mlp", "attn", "both"):
        for how in ("full", "none"):
            rows.append((f"{what}, {how}", *(percent(by_case[what, how, s]["top1"]) for s in shares)))
    rows.append(("both, full: share of dense", *(_share(by_case["both", "full", s], found) for s in shares)))
    rows.append(("the same in the paper", *(f"{both[s][0] / both[0.0][0]:.2f}" for s in shares)))
    text = f"""
DeiT-Tiny, dense {percent(found["dense"]["top1"])} %. The paper's figure shows Large and Huge; Tiny's joint curve is in its
efficiency table (last row). `corp sweep MODEL --calib DATA --data LABELLED --kinds mlp,attn,both --compensate full,none -o OUT`
draws it for any model.

![accuracy against sparsity](figures/curves-sparsity.svg)"""
    return section("Accuracy against sparsity (fig:acc_sparsity)", text, ("", *(f"{s:.0%}" for s in shares)), rows)


def _share(row: dict[str, Any], found: dict[str, Any]) -> str:
    return f"{row['top1'] / found['dense']['top1']:.2f}"


def sizes(read: Read) -> str:
    found = read("accuracy")["sizes"]
    ours = {row["samples"]: row for row in found["rows"]}
    rows = []
    for size, numbers in paper.CALIBRATION.items():
        row = ours.get(size)
        here = (percent(row["top1"]), _share(row, found), f"{row['kl']:.3f}") if row else ("–", "–", "–")
        rows.append((str(size), *here, f"{numbers['Tiny']:.2f}", f"{numbers['Tiny'] / 72.02:.2f}"))
    text = """
50 % of both, DeiT-Tiny, from one pass over the data (`--calib-sizes 100,500,1000`); there are 1,000 images here. The weights of larger
DeiTs were not available."""
    columns = ("images", "top-1 here", "share of dense", "KL from dense", "paper, Tiny", "share of dense")
    return section("Calibration size (tab:calib_sweep)", text, columns, rows)


def rankings(read: Read) -> str:
    found = read("accuracy")["rankings"]["rows"]
    names = dict.fromkeys(row["rank"] for row in found)
    cells = {(row["rank"], row["compensate"]): row for row in found}
    rows = [
        (name, *(f"{percent(cells[name, how]['top1'])} ({cells[name, how]['kl']:.2f})" for how in ("none", "full")))
        for name in names
    ]
    text = """
50 % of both, DeiT-Tiny: top-1 % (KL from dense). Attention has one ranking; the names are those of the MLP's rankings. The paper shows
a figure without numbers; its two findings hold here: compensation matters more than the ranking, and combined is among the best.

![rankings](figures/rankings-ranking.svg)"""
    return section("Ranking ablation (fig:ranking_ablation)", text, ("ranking", "no compensation", "compensated"), rows)


def presets(read: Read) -> str:
    found = read("accuracy")["presets"]
    shares = sorted({row["mlp"] for row in found["rows"]})
    cells = {(row["preset"], row["mlp"]): row for row in found["rows"]}
    names = {"paper": "corp", "grail": "GRAIL's way", "vbp": "VBP's way"}
    rows = [(label, *(percent(cells[name, s]["top1"]) for s in shares)) for name, label in names.items()]
    text = f"""
MLP channels only, DeiT-Tiny, dense {percent(found["dense"]["top1"])} %, the same statistics for all three; each is a preset of
the same pipeline, without fine-tuning. Here GRAIL's method (uncentred ridge, ranking by E[x²]^½·‖W‖) is ahead of the paper's recipe by 1 to 4
points (standard error 1.5); `rank="exact"`, which is not in the paper, is ahead of both: 73.0 at 30 %, 60.5 at 50 %. The paper at 50 % on DeiT-Base: CORP 72.0, GRAIL 68.6, VBP 66.4. More peers, equal
MACs (fig:deit_full_benchmark) and Torch-Pruning: [benchmarks/results/peers.md](../benchmarks/results/peers.md).

![presets](figures/presets-sparsity.svg)"""
    return section("Against GRAIL and VBP (fig:deit_mlp_benchmark)", text, ("", *(f"{s:.0%}" for s in shares)), rows)


def quoted() -> str:
    snows = markdown_table(
        ("method", "scope", "sparsity", "top-1", "change"),
        [(a, b, c, f"{d:.2f}", f"{e:.2f}") for a, b, c, d, e in paper.SNOWS],
    )
    dcvit = markdown_table(
        ("method", "FLOPs removed, %", "top-1", "change"),
        [(a, f"{b:.1f}", f"{c:.2f}", f"{d:.2f}") for a, b, c, d in paper.DCVIT],
    )
    return f"""## SNOWS and DC-ViT: quoted from the paper, not run here (tab:snows_grail, tab:dcvit_compare)

Both need other methods (2:4 sparse kernels; fine-tuning by feature mimicking) and weights of ViT-Large and ViT-Base that were
not available. The numbers are the paper's.

{snows}

{dcvit}"""


def efficiency(read: Read) -> str:
    cost, speed = read("cost")["deit"], read("speed")
    rows = []
    for size in paper.MODELS:
        timed = {row["sparsity"]: row for row in speed["models"].get(size, {"rows": []})["rows"]}
        published = dict(zip(paper.SPARSITIES, paper.EFFICIENCY[size], strict=True))
        for s, (_, flops, latency, rate) in published.items():
            here, dense = cost[size][f"both {s}"], cost[size]["both 0.0"]
            row = timed.get(s, {})
            rows.append(
                (
                    f"{size}, {s:.0%}",
                    f"{here['params'] / 1e6:.1f}",
                    f"{here['macs'] / 1e9:.2f}",
                    f"{flops:.1f}",
                    f"{dense['macs'] / here['macs']:.2f}",
                    _ratio(row.get("latency")),
                    f"{published[0.0][2] / latency:.2f}",
                    _ratio(row.get("throughput")),
                    f"{rate / published[0.0][3]:.2f}",
                )
            )
    batches = ", ".join(f"{size} {found['batch']}" for size, found in speed["models"].items() if found["batch"] > 1)
    text = f"""
Both removed. Parameter counts equal the paper's in all 40 cells ([params.md](../benchmarks/results/params.md)). Speed-ups are
ratios to the dense model, medians of interleaved rounds with the interval that contains the median in 95 % of cases;
{speed["threads"]} CPU threads, float32, batch for throughput: {batches}. The paper's are from an RTX 3090, so the two columns
describe two machines. At batch 1 the paper's DeiT-T, -S and -B get slower at every sparsity; here none does beyond the noise
(1.00 within its interval), and from 40 % on all are faster."""
    columns = (
        "DeiT, removed", "M params", "GMACs", "GFLOPs paper", "ideal ×", "latency × here", "paper", "throughput × here", "paper",
    )  # fmt: skip
    return section("Efficiency (tab:efficiency_all, tab:efficiency_huge)", text, columns, rows)


def _ratio(found: dict[str, Any] | None) -> str:
    if not found:
        return "–"
    ratio = found["ratio"]
    return f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def runtime(read: Read) -> str:
    rows = []
    found = read("runtime")
    for size, (calibrate, rank, compensate) in paper.RUNTIME.items():
        row = found.get(size)
        here = ("–",) * 4
        if row:
            per_image = 1e3 * row["calibrate"] / row["images"]
            whole = row["rank"] + row["compensate"]
            here = (f"{per_image:.0f}", f"{row['rank']:.2f}", f"{row['compensate']:.2f}", f"{whole:.1f}")
        rows.append((size, *here, f"{1e3 * calibrate / 4000:.0f}", f"{rank:.2f}", f"{compensate:.2f}"))
    text = """
Calibration in milliseconds per image (all tokens; the paper's seconds are for 4,000 images), ranking and compensation in
seconds, 50 % of both, random weights. Ours are from two CPU cores, the paper's from an RTX 3090. The CPU needs only a few times as long
because the one-pass calibration costs about two forward passes, and the paper's about sixty. Large and Huge would run the same code, but not in
reasonable time on two cores."""
    columns = ("DeiT", "ms/image", "rank", "compensate", "rank + compensate", "paper: ms/image", "rank", "compensate")
    return section("Runtime (tab:runtime)", text, columns, rows)


def redundancy(read: Read) -> str:
    rows = []
    for number, row in enumerate(read("redundancy")):
        rank, k95, sparsity = paper.REDUNDANCY[number]
        dim = row["dim"]
        here = (str(dim), f"{row['effective_rank'] / dim:.3f}", f"{row['k95_channels'] / dim:.3f}")
        more = (f"{row['k95_eigenvalues'] / dim:.3f}", f"{row['sparsity']:.2f}")
        rows.append((row["site"], *here, *more, f"{rank:.3f}", f"{k95:.3f}", f"{sparsity:.2f}"))
    text = """
DeiT-Tiny here (width 768), DeiT-Base in the paper (width 3,072): a narrower model has less to spare, in every layer.
`corp analyze MODEL --calib DATA` makes the table for any model, also for queries and keys."""
    columns = (
        "layer", "width", "effective rank ratio", "k95 by channels", "k95 by eigenvalues", "sparsity",
        "paper, Base: rank ratio", "k95", "sparsity",
    )  # fmt: skip
    return section("Redundancy (tab:mlp_redundancy)", text, columns, rows)


def dinov2(read: Read) -> str:
    counts = read("cost")["dinov2"]
    rows = [
        (size, f"{counts[size][0] / 1e6:.1f} → {counts[size][1] / 1e6:.1f}", f"{before:.1f} → {after:.1f}")
        for size, (_, before, after) in paper.DINOV2.items()
    ]
    text = """
NYU Depth and ADE20K were not available, so the paper's RMSE, δ1 and mIoU cannot be compared. A DINOv2-S (from a public package, not the
official file) and CamVid's labelled street scenes were: [dense prediction](dense.md#what-limits-it) has the mIoU of pruned backbones
under unchanged heads, and `python -m benchmarks.dinov2` runs the whole experiment.
At 0.617 of the MACs merged tokens keep 98.5 % of the dense mIoU, widths alone 95.9 % (head on the last block; 98.8 and 97.4 % on the last four); at 0.5 widths alone
keep 91.0 % (96.5 %). The paper's recipe at 50 %, which leaves 0.628 of the MACs, keeps 82.0 % (83.2 %), and 6.4 % (34.0 %) without compensation.
Parameters (million): removing 50 % of MLP and Q/K leaves fewer than the paper reports. From each of the four models the paper removed
0.84 times as many, which corresponds to 42 % of both, although it says 50 %."""
    return section("DINOv2 (tab:dinov2_results)", text, ("DINOv2", "here", "paper"), rows)


def language(read: Read) -> str:
    found = read("opt")
    printed = {"dense": ("14.60", "1.42", "6.19"), "MLP": ("19.36", "1.18", "5.20"), "Q/K": ("18.53", "1.31", "5.50")}
    printed |= {"both": ("25.41", "1.06", "4.51"), "9 of 32 heads": ("–", "1.31", "5.50")}
    rows = []
    for name, row in found.items():
        perplexity, params, flops = printed[name]
        here = f"{row['params'] / 1e9:.3f}", f"{row['twice'] / 1e9:.2f}", f"{row['flops'] / 1e12:.2f}"
        rows.append((name, *here[:2], params, here[2], flops, perplexity))
    text = """
OPT's weights were not available, so the perplexities are the paper's; with the weights, the experiment is one command
([language.md](language.md)), and a small OPT, MiniLM and a Llama of stories are measured in
[benchmarks/results/language.md](../benchmarks/results/language.md). Parameters in billions at 30 %, TFLOPs of 2,048 tokens. The paper
counts the tied output embedding twice (the model has 1.316 B parameters, not 1.42).

Its MLP row equals the result of removing 30 % of the MLP channels. Its attention row does not equal that of removing 30 % of Q/K (1.36 B, 5.83
TFLOPs). It equals, in parameters and in operations, that of removing 9 of the 32 heads entirely (queries, keys, values and their output columns; or 18 of the 64
dimensions of all four in every head); 9 is 0.3 · 32 rounded down. "Both" is that and the MLP."""
    columns = ("removed", "B params here", "embedding twice", "paper", "TFLOPs here", "paper", "perplexity, paper")
    return section("OPT-1.3B (tab:opt_efficiency)", text, columns, rows)
