"""The tensors that a model's files have, in terms of its parameters: what transformers merged when it loaded them is
taken apart again, one parameter at a time, by its own operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lockstep.model.conversion import META

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class SavedNames:
    """Of each tensor that is written its shape and the parameter that it is (a part) of; those of one parameter follow
    each other."""

    model: Any
    shapes: Mapping[str, torch.Size]
    parameters: Mapping[str, str]

    def reader(self, read: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
        """A tensor by the name that it has in the files, where `read` gives parameters: each is read once, and let go
        of before the next."""
        parts: dict[str, torch.Tensor] = {}

        def part(name: str) -> torch.Tensor:
            if name not in parts:
                parts.clear()
                parameter = self.parameters[name]
                parts.update(_reverted(self.model, {parameter: read(parameter)}))
            return parts.pop(name)

        return part


def saved_names(model: PreTrainedModel, shapes: Mapping[str, torch.Size]) -> SavedNames | None:
    """How `save_pretrained` would write parameters of these shapes; None where a tensor is made of several of them."""
    whole = {name: torch.empty(shape, device=META) for name, shape in shapes.items()}
    found: dict[str, torch.Size] = {}
    parameters: dict[str, str] = {}
    for parameter, tensor in whole.items():
        for name, part in _reverted(model, {parameter: tensor}).items():
            if name in found:
                return None
            found[name], parameters[name] = part.shape, parameter
    at_once = {name: part.shape for name, part in _reverted(model, whole).items()}
    return SavedNames(model, found, parameters) if at_once == found else None


def _reverted(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    made: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return made
