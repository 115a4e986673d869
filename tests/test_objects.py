"""What objects look like in a terminal and in a notebook, and the examples in docstrings."""

from __future__ import annotations

import doctest
import io

import pytest
from rich.console import Console

import corp
import corp.api
from corp.io.observer import Bars, Observer, duration
from corp.io.tables import html_table
from corp.measure.comparison import compare
from corp.measure.estimate import Estimate, Stage
from corp.steps.allocation.search import most_trials
from corp.steps.allocation.split import MOST_OUTPUT, MOST_QUERIES, OUTPUT_STEP, QUERY_STEP, SPREADS, WAYS
from corp.steps.allocation.trials import climb
from tests.helpers import few_digits
from tests.helpers.models import images, vit


def test_the_example_of_prune_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    few_digits.use(monkeypatch)
    found = doctest.DocTestFinder().find(corp.api.prune, "prune", globs={})
    assert sum(len(test.examples) for test in found) >= 4
    for test in found:
        assert doctest.DocTestRunner().run(test).failed == 0


def test_objects_print_as_short_tables() -> None:
    model, data = vit().double(), images()
    stats = corp.calibrate(model, data, origin={"data": "<photos>"})
    result = corp.prune(model, data, corp.Recipe.paper(mlp=0.5), stats=stats)
    for thing, words in (
        (corp.Recipe.paper(mlp=0.5), ("paper", "mlp", "0.5")),
        (corp.find_sites(model), ("sites", "mlp")),
        (stats, ("samples", "data")),
        (result.plan, ("sites change", "rho²")),
        (result, ("parameters", "ratio")),
    ):
        text, page = str(thing), thing._repr_html_()
        assert all(word in text and word in page for word in words), text
        assert len(text) < 2500
        assert page.count("<table>") == 1
    assert "&lt;photos&gt;" in stats._repr_html_()
    assert "Linear(" not in repr(result)
    assert repr(corp.Recipe(mlp=0.5)).startswith("Recipe(mlp=0.5")


def test_cells_of_html_are_escaped() -> None:
    assert html_table(("a",), [("<b>",)]) == "<table><tr><th>a</th></tr><tr><td>&lt;b&gt;</td></tr></table>"


def test_a_model_agrees_with_itself() -> None:
    model, data = vit().double(), images()
    found = compare(model, model, data, None)
    assert found.agreement.value == 1
    assert found.divergence.value == pytest.approx(0, abs=1e-6)
    assert found.speed_up.low <= found.speed_up.value <= found.speed_up.high
    assert found.samples == sum(map(len, data))
    with pytest.raises(corp.CorpError, match="nothing to compare"):
        compare(model, model, [], None)


class Notes(Observer):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def test_a_model_in_train_mode_is_told_and_stays_so() -> None:
    watch, model = Notes(), vit().double()
    model.train()
    result = corp.prune(model, images(), corp.Recipe.paper(mlp=0.25), observer=watch)
    assert [note for note in watch.notes if "train mode" in note and "call .eval()" in note]
    assert model.training
    expected = corp.prune(model.eval(), images(), corp.Recipe.paper(mlp=0.25))
    batch = images()[0]
    assert (result.model.eval()(batch) == expected.model.eval()(batch)).all()


def test_a_search_makes_no_more_models_than_its_bar_has() -> None:
    most = 0
    for start in [i / 50 for i in range(46)]:
        for valley in (0.0, 0.2, 0.5, MOST_QUERIES):
            asked: list[float] = []
            climb(lambda x: asked.append(x) or abs(x - valley), start, QUERY_STEP, (0.0, MOST_QUERIES))  # noqa: B023
            # The start was measured with the ways to weight errors; equal shares are tried too.
            most = max(most, WAYS + len(SPREADS) + len(asked) - 1 + 1)
    rankings, outputs = 4, round(MOST_OUTPUT / OUTPUT_STEP)
    assert most <= most_trials(corp.Recipe(target_macs=0.5)) <= most + rankings + outputs + 1


def test_bars_end_full_even_if_less_was_needed() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Bars(terminal).stage("trying widths", 12, "models") as advance:
        advance(3)
    assert "3/3" in terminal.file.getvalue()
    with Bars(terminal).stage("loading", None, "") as advance:
        advance(1)
    assert "loading" in terminal.file.getvalue()


def test_an_estimate_is_told_in_the_unit_that_people_use() -> None:
    assert [duration(s) for s in (0.2, 40, 200, 9000)] == ["1 s", "40 s", "3 min", "2.5 h"]
    terminal = Console(file=io.StringIO(), width=100)
    Bars(terminal).estimate(lambda: Estimate("pruning it", (Stage("planning", 200, 1024),)))
    assert terminal.file.getvalue() == "pruning it: about 3 min, 1.0KB of memory\n"
