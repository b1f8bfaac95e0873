"""States of recurrent modules that stay in their slots during a decoding step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SlotState:
    """The states of B sequences in a tensor of all slots. A kernel that knows this class updates them in place, so
    that they are not copied from and to their slots."""

    states: torch.Tensor
    slots_B: torch.Tensor

    def gathered(self) -> torch.Tensor:
        return self.states.index_select(0, self.slots_B)

    def store(self, new: torch.Tensor) -> None:
        self.states.index_copy_(0, self.slots_B, new.to(self.states.dtype))
