"""Stand-ins of blocks: what a model passes to its blocks can be recorded without running them."""

from __future__ import annotations

import pytest
import torch

from corp import find_sites
from corp.surgery.refit.replay import blocks_of, record
from corp.surgery.stand_in import idle_copy
from tests.helpers.models import batches, build, call


@pytest.mark.parametrize("family", ["vit", "hf-vit", "hf-dinov2"])
def test_an_idle_copy_is_called_as_the_model_is_and_runs_no_block(family: str) -> None:
    model, batch = build(family), batches(family, 1)[0]
    sites = list(find_sites(model))
    names = blocks_of(sites)
    before = call(model, batch)
    idle = idle_copy(model, names)
    inner = [idle.get_submodule(name).register_forward_hook(lambda *_: None) for name in names]
    ran: list[str] = []
    for name in names:
        for path, module in idle.get_submodule(name).named_modules(prefix=name):
            if path != name:
                module.register_forward_hook(lambda _m, _a, _o, path=path: ran.append(path))
    whole, short = (record(made, sites, lambda made=made: call(made, batch)) for made in (model, idle))
    assert not ran
    assert len(inner) == len(names) == len(short.calls)
    assert [(n, one.at, len(one.args), one.kwargs.keys()) for n, one in whole.calls.items()] == [
        (n, one.at, len(one.args), one.kwargs.keys()) for n, one in short.calls.items()
    ]
    assert {name: x.tolist() for name, x in whole.starts.items()} == {n: x.tolist() for n, x in short.starts.items()}
    assert torch.equal(*(torch.as_tensor(getattr(out, "logits", getattr(out, "last_hidden_state", out)))
                         for out in (before, call(model, batch))))  # fmt: skip
    shared = {id(p) for p in model.parameters()}
    assert all(id(p) in shared for p in idle.parameters())
