"""The output head of a language model, factored: found, predicted, saved, and refused where it cannot be held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import corp
import corp.calibration.settings
import corp.planning.plan
from corp import CorpError, Recipe
from corp.storage.export.possible import Exports
from tests.helpers.seeds import seed_all, seeded

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")  # little data: that fits are weak is said


def build(*, tied: bool = True) -> Any:
    seed_all(3)
    config = hf.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=120,
        max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def data(count: int = 12) -> list[dict[str, Tensor]]:
    g = seeded(0)
    return [{"input_ids": torch.randint(0, 120, (4, 10), generator=g)} for _ in range(count)]


def centred_logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        logits = torch.cat([model(**batch).logits for batch in data()]).flatten(0, 1)
    return logits - logits.mean(1, keepdim=True)


@pytest.mark.parametrize("tied", [True, False])
def test_the_predicted_error_is_the_measured_one_and_the_embedding_stays(tied: bool, tmp_path: Path) -> None:
    model = build(tied=tied)
    assert corp.find_sites(model).output.tied is tied
    settings = corp.calibration.settings.Settings(tokens="all")
    result = corp.prune(model, data(), Recipe.paper(output=0.5), settings=settings)
    plan = result.plan.output
    assert (plan.name, plan.width, plan.keep) == ("lm_head", 16, 8)
    gap = centred_logits(model) - centred_logits(result.model)
    assert pytest.approx(float(gap.square().sum(1).mean()), rel=1e-6) == plan.J
    assert torch.equal(result.model.get_input_embeddings().weight, model.get_input_embeddings().weight)
    corp.save(result, tmp_path / "saved")
    loaded = corp.load(tmp_path / "saved").double()
    assert torch.equal(centred_logits(loaded), centred_logits(result.model))
    assert type(model.lm_head) is nn.Linear  # the user's model is as it was


def test_a_tampered_head_is_not_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from corp.surgery import apply

    honest = apply.replace_output

    def wrong(model: nn.Module, *args: Any) -> None:
        honest(model, *args)
        with torch.no_grad():
            model.lm_head.up.weight[0] += 0.1

    monkeypatch.setattr(apply, "replace_output", wrong)
    with pytest.raises(CorpError, match="lm_head"):
        corp.prune(build(), data(), Recipe.paper(output=0.5))


def test_a_target_that_only_a_smaller_head_meets_is_met() -> None:
    """At their narrowest the sites leave 0.53 of the operations, of which the head has most."""
    model = build()
    with pytest.raises(CorpError, match=r"target_macs=0.5 is out of reach: .* still has 0.53"):
        corp.prune(model, data(), Recipe(target_macs=0.5, output=0.0))
    result = corp.prune(model, data(), Recipe(target_macs=0.5))
    dense, pruned = result.report.macs
    assert pruned <= 0.5 * dense
    assert result.plan.output.keep < 16


def test_a_target_that_even_the_smallest_head_misses_is_refused_before_the_data_is_read() -> None:
    read: list[int] = []

    class Batches(list[dict[str, Tensor]]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                read.append(1)
                yield batch

    with pytest.raises(CorpError, match=r"target_macs=0.1 is out of reach"):
        corp.prune(build(), Batches(data()), Recipe(target_macs=0.1))
    assert len(read) < len(data())  # the first batches are looked at, to see what can be pruned


def test_without_trials_the_head_stays_and_the_target_is_refused() -> None:
    with pytest.raises(CorpError, match=r"target_macs=0.5 is out of reach: .* still has 0.53"):
        corp.prune(build(), data(1), Recipe(target_macs=0.5))


def test_under_a_budget_of_operations_the_head_pays_its_share() -> None:
    model = build()
    result = corp.prune(model, data(), Recipe(target_macs=0.7, sequential=False))
    tried = [one["output_rank"] for one in result.plan.why["split"]["tried"] if "output_rank" in one]
    assert tried
    assert result.report.macs[1] <= 0.7 * result.report.macs[0]
    alone = corp.prune(model, data(), Recipe(target_macs=0.7, sequential=False, output=0.0))
    assert alone.plan.output is None


def test_programs_that_cannot_hold_it_are_refused_and_onnx_is_not(tmp_path: Path) -> None:
    result = corp.prune(build(), data(), Recipe.paper(output=0.5))
    possible = Exports(build()).of(result.plan)
    assert {target for target, reason in possible.items() if reason and "low-rank" in reason} >= {
        "hf",
        "compat",
        "gguf",
    }
    assert possible["pt2"] is None
    with pytest.raises(CorpError, match="output=0"):
        corp.save(result, tmp_path / "hf", profile="standard")


def test_a_tied_head_saves_no_parameters_so_it_is_left_alone() -> None:
    result = corp.prune(build(), data(), Recipe(target_params=0.8, sequential=False))
    assert result.plan.output is None
    assert result.report.params[1] <= 0.8 * result.report.params[0]


def test_a_plan_survives_its_file_and_other_models_are_refused(tmp_path: Path) -> None:
    model = build()
    stats = corp.calibrate(model, data())
    plan = corp.plan(model, stats, Recipe.paper(output=0.5))
    plan.save(tmp_path / "plan.json")
    again = corp.planning.plan.Plan.load(tmp_path / "plan.json")
    a, b = (corp.apply(model, stats, one).model for one in (plan, again))
    torch.testing.assert_close(centred_logits(a), centred_logits(b), rtol=0, atol=1e-12)
    raw = plan.to_dict()
    raw["output"]["keep"] = 99
    with pytest.raises(CorpError, match="output"):
        corp.planning.plan.Plan.from_dict(raw)
