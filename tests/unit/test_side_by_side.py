"""Parameters whose memory is laid behind one another: everybody else sees the same parameters as before."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lockstep.kernels.decode.layer_parts_triton import joined, lay_side_by_side


def projections() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(4, rows) for name, rows in (("q", 6), ("k", 2), ("v", 2))})


def laid(model: nn.ModuleDict) -> list[nn.Parameter]:
    weights = [module.weight for module in model.values()]
    lay_side_by_side(weights)
    lay_side_by_side([module.bias for module in model.values()])
    return weights


def test_the_whole_is_the_parts_and_follows_them() -> None:
    model, plain = projections(), projections()
    parameters = dict(model.named_parameters())
    weights = laid(model)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    whole = joined(weights)
    assert whole is not None
    assert torch.equal(whole, torch.cat([module.weight for module in plain.values()]))
    with torch.no_grad():
        model["k"].weight.copy_(torch.full((2, 4), 7.0))
    assert (whole[6:8] == 7).all()
    # Who is laid already stays where it is: recorded passes know the place.
    places = [weight.data_ptr() for weight in weights]
    lay_side_by_side(weights)
    assert places == [weight.data_ptr() for weight in weights]
    # Weights are loaded into the place they have.
    model.load_state_dict(plain.state_dict())
    again = joined(weights)
    assert again is not None
    assert again.data_ptr() == whole.data_ptr()
    assert torch.equal(whole, torch.cat([module.weight for module in plain.values()]))


def test_training_goes_on_as_before() -> None:
    """Laid between two updates, inside of a pass without gradients: the optimizer and its state are those of before."""
    sides = []
    for lays in (False, True):
        model = projections()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            sum(module(x).square().sum() for module in model.values()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if lays:
                with torch.inference_mode():
                    laid(model)
        sides.append(model.state_dict())
    assert all(torch.equal(sides[0][name], sides[1][name]) for name in sides[0])


def test_parts_that_lie_elsewhere_are_not_one() -> None:
    model = projections()
    weights = laid(model)
    assert joined(weights) is not None
    # In another order they are other weights.
    assert joined(weights[::-1]) is None
    assert joined([weights[0], weights[2]]) is None
    assert joined([module.weight for module in copy.deepcopy(model).values()]) is None
    weights[1].data = weights[1].data.clone()
    assert joined(weights) is None


def test_they_are_written_under_their_own_names(tmp_path: Path) -> None:
    model, plain = projections(), projections()
    laid(model)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    for found in (load_file(tmp_path / "model.safetensors"), torch.load(tmp_path / "model.pt")):
        assert all(torch.equal(found[name], wanted) for name, wanted in plain.state_dict().items())
