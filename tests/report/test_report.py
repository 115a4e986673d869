"""The report page: everything is on it, nothing on it is trusted, and a real browser shows it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import Result

import corp
from corp.cli.report import demo_study, sweep_study
from corp.errors import CorpWarning, StorageError
from corp.planning.plan import Plan
from corp.recipe import PRESETS, Recipe
from corp.report import remake, svg
from corp.report.html import PAGE, page
from tests.helpers import command, few_digits
from tests.helpers.models import images, vit
from tests.helpers.report_pages import DEMO, EVIL, SWEEP, Page, evil_run, plan, run, site

TITLES = ["rho², MLP", "rho², Attention", "Predicted error, MLP", "Predicted error, Attention"]


def test_the_page_shows_summary_figures_widths_environment_and_how_to_make_it_again() -> None:
    parsed = Page(page([run()]))
    text = {tag: " ".join(parts) for tag, parts in parsed.text.items()}
    assert "vit_x" in text["h1"]
    # 1 - 1/4 of the parameters; (0.1 + 0.3) / 10 and (3 + 5) / 10 over two MLPs; (1.5 + 0.5) / 20 over two attentions.
    for number in ("−75.0%", "4.000 M → 1.000 M", "2.00%", "40.00% without", "5.00%", "15.00% without", "9.8.7"):
        assert number in text["dd"]
    assert "50% of the MLP channels and 50% of the Q/K dimensions removed, with 64 unlabelled samples" in text["p"]
    assert {"abc123", "[0.5]", "in1k", "blocks.1.mlp"} <= {*parsed.text["dd"], *parsed.text["td"]}
    assert "corp.prune(model, batches, corp.Recipe.paper(mlp=0.5, attn=0.5))" in text["code"]


def test_every_figure_has_a_title_and_a_text_alternative() -> None:
    parsed = Page(page([run()]))
    assert parsed.text["b"] == TITLES
    drawings = parsed.all("svg", role="img")
    assert len(drawings) == len(parsed.all("figure")) == len(TITLES)
    assert all(len(drawing["aria-label"] or "") > 30 for drawing in drawings)
    assert "blocks.0.mlp: 1.00% against 30.00%" in (drawings[2]["aria-label"] or "")
    assert len(parsed.all("rect", **{"class": "bar1"})) == 4 + 2  # hatched: four sites, two keys
    assert "hatch" in {pattern["id"] for pattern in parsed.all("pattern")}


def test_the_page_asks_nothing_of_the_network() -> None:
    text = page([run(), run("other")], [sweep_study("s.json", SWEEP), demo_study(DEMO)])
    assert "://" not in text
    assert "@import" not in text
    assert set(re.findall(r"url\(([^)]*)\)", text)) == {"#hatch"}
    for _, attrs in Page(text).tags:
        assert not {"src", "href", "xlink:href", "action", "data", "srcset"} & attrs.keys()
    assert "default-src 'none'" in (Page(text).all("meta")[1]["content"] or "")


def test_nothing_from_files_becomes_markup() -> None:
    rows = [{**SWEEP[0], "rank": EVIL, EVIL: EVIL}, {**SWEEP[1], "compensate": EVIL}]
    studies = [sweep_study(EVIL, rows), demo_study({**DEMO, "model": EVIL, "images": EVIL})]
    for runs in ([evil_run()], [evil_run(), run(command=EVIL)]):
        text = page(runs, studies)
        parsed, harmless = Page(text), Page(page([run()] * len(runs), [sweep_study("s", SWEEP), demo_study(DEMO)]))
        assert "<script>alert" not in text
        assert parsed.text["script"] == [PAGE.read_text().split("<script>")[1].split("</script>")[0]]
        assert {tag for tag, _ in parsed.tags} <= {tag for tag, _ in harmless.tags}
        assert not [name for _, attrs in parsed.tags for name in attrs if name.startswith("on") or "alert" in name]
        for tag in ("h1", "h2", "title", "td", "th", "dd", "dt", "code", "text")[len(runs) - 1 :]:
            assert any("alert(1)" in content for content in parsed.text[tag]), tag
        assert sum(EVIL in value for _, attrs in parsed.tags for value in attrs.values() if value) >= 6


def test_the_page_is_ascii_whatever_the_names() -> None:
    assert page([run("ρ – 名前 \udcff")]).isascii()


def test_absurd_numbers_stay_within_the_drawing() -> None:
    sites = (site("a", "mlp", [(1e308, 1.7e308, -3.0)]), site("b", "attn", [(0.0, 0.0, -2.0), (0.0, 0.0, 5.0)]))
    huge = Plan(Recipe.paper(mlp=0.5), sites)
    for _, attrs in Page(page([run(planned=huge)])).tags:
        for key in {"x", "y", "width", "height", "d", "viewbox"} & attrs.keys():
            assert not re.search(r"nan|inf|e\+", attrs[key] or "", re.IGNORECASE)
        assert 0 <= float(attrs.get("width") or "0") <= svg.WIDTH


def test_a_plan_that_removes_nothing_has_a_page() -> None:
    parsed = Page(page([run(planned=Plan(Recipe.paper(), ()))]))
    assert "Nothing was removed" in " ".join(parsed.text["p"])
    assert "b" not in parsed.text


def test_several_runs_are_compared_first() -> None:
    parsed = Page(page([run("first"), run("second")]))
    assert parsed.text["h1"] == ["2 pruned models"]
    assert parsed.text["h2"] == ["first", "second"]
    assert parsed.text["td"][:4] == ["first", "vit_x", "1 000 000", "25.0%"]


def test_sweeps_become_one_line_per_setting_in_order_of_sparsity() -> None:
    study = sweep_study("s.json", SWEEP)
    assert [chart.title for chart in study.charts] == [
        "Same answer as the dense model",
        "Distance from the dense model",
    ]
    _, *lines_said = re.split(r"\. |; ", study.charts[0].drawing.attrib["aria-label"])
    assert [line.partition(":")[0] for line in lines_said] == ["compensation full", "compensation none"]
    assert lines_said[0] == "compensation full: 10% removed 90%, 20% removed 80%, 30% removed 70%"
    parsed = Page(page([], [study]))
    lines = [(d["class"], d["stroke-dasharray"]) for d in parsed.all("path") if "stroke-dasharray" in d]
    assert len(set(lines)) == 2
    assert len({dash for _, dash in lines}) == 2  # told apart without colour


def test_the_demo_becomes_accuracy_curves() -> None:
    chart = demo_study(DEMO).charts[0]
    said = re.findall(r"0% removed 98%, 50% removed (\d+%)", chart.drawing.attrib["aria-label"])
    assert said == ["90%", "50%", "40%"]


@pytest.mark.parametrize("high", [0.003, 0.07, 0.3, 1.0, 1.4, 7.0, 123.0, 0.0, float("inf")])
def test_ticks_are_few_and_reach_the_top(high: float) -> None:
    found = svg.ticks(high)
    assert 3 <= len(found) <= 8
    assert found[0] == 0
    assert found[-1] >= high * (1 - 1e-9) or high == float("inf")


def test_the_lines_that_make_it_again_give_the_same_recipe() -> None:
    odd = {"intercept": True, "round_to": {"mlp": 4}, "skip": ("a b*", "'"), "overrides": {"x:y": {"attn": 0.1}}}
    recipe = Recipe.paper(mlp=0.4, **odd)
    identity = {"architecture": "vit_x", "tag": None}
    lines = remake.python_lines("out", identity, plan(recipe=recipe))
    assert _recipe_in(lines) == recipe


@pytest.mark.parametrize("preset", PRESETS)
def test_any_preset_is_made_again(preset: str) -> None:
    recipe = Recipe.preset(preset, mlp=0.5, equal_heads=True)
    identity = {"architecture": "vit_x", "tag": None}
    assert _recipe_in(remake.python_lines("out", identity, plan(recipe=recipe))) == recipe


def _recipe_in(lines: str) -> Recipe:
    """The recipe that a program of three lines makes."""
    call = re.search(r"batches, (corp\.Recipe.*\))\)  #", lines)
    assert call is not None
    recipe: Recipe = eval(call[1], {"corp": corp})
    return recipe


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "pruned"
    result = corp.prune(vit(), images(), Recipe.paper(mlp=0.5, attn=0.5, compensate="none"))
    with pytest.warns(CorpWarning, match="needs the dense model"):
        corp.save(result, folder)
    return folder


def call(*args: object) -> Result:
    return command.run("report", *args)


def test_saving_writes_the_page_that_the_command_writes(saved: Path, tmp_path: Path) -> None:
    made = call(saved, "-o", tmp_path / "page.html")
    assert made.exit_code == 0, made.output
    assert (tmp_path / "page.html").read_text() == (saved / "report.html").read_text()


def test_runs_sweeps_and_demos_go_on_one_page(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps({"format": "corp-sweep", "rows": SWEEP}))
    (tmp_path / "demo.json").write_text(json.dumps(DEMO))
    made = call(saved, tmp_path / "sweep.json", tmp_path, "-o", tmp_path / "page.html", "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["runs"] == ["pruned"]
    titles = Page((tmp_path / "page.html").read_text()).text["h2"]
    assert {"Layer by layer", "Sweep: sweep.json", "Accuracy against sparsity", "Widths"} <= set(titles)


def test_the_demo_writes_a_page_with_curves_and_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corp.cli.demo.SPARSITIES", (0.5,))
    few_digits.use(monkeypatch)
    made = command.run("demo", "-o", tmp_path / "demo")
    assert made.exit_code == 0, made.output
    parsed = Page((tmp_path / "demo" / "report.html").read_text())
    assert {*TITLES, "Accuracy without any training after pruning"} == set(parsed.text["b"])
    assert "corp demo" in parsed.text["code"]
    assert (tmp_path / "demo" / "demo.svg").read_bytes().startswith(b"<svg")
    row = json.loads((tmp_path / "demo" / "demo.json").read_text())["rows"][0]
    assert row["corp"] > row["paper"] > row["none"]  # the default is what the page shows, beside the paper's recipe


def test_an_existing_page_is_kept_unless_told(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    out.write_text("mine")
    refused = call(saved, "-o", out)
    assert refused.exit_code == 1
    assert "--overwrite" in refused.output
    assert out.read_text() == "mine"
    assert call(saved, "-o", tmp_path, "--overwrite").exit_code == 1
    assert call(saved, "-o", out, "--overwrite").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_what_is_not_a_run_is_refused_by_name(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "text.json").write_text("hello")
    shutil.copytree(saved, tmp_path / "uncounted")
    (tmp_path / "uncounted" / "report.json").write_text('{"params": {"before": true, "after": -1}}')
    cases = {"folder": "has no corp.json", "notes.json": "neither a sweep", "text.json": "not valid JSON"}
    for name, message in {**cases, "missing": "cannot read", "uncounted": "does not count the parameters"}.items():
        result = call(saved, tmp_path / name, "-o", tmp_path / "page.html")
        assert result.exit_code == 1
        assert name in result.output
        assert message in result.output
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("rows", [[], [1], [{"mlp": 0.5}]])
def test_lists_that_are_not_sweeps_are_refused(rows: list[object]) -> None:
    with pytest.raises(StorageError, match="corp sweep's rows"):
        sweep_study("x.json", rows)
