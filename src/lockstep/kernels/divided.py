"""Attention of tokens whose sequences are divided over ranks: what a layer is handed in the place of a layout."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class DividedLayout(ABC):
    """This rank's tokens of a line. See `parallel/` for the ways to divide one."""

    @abstractmethod
    def attend(
        self,
        query_THD: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGD: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        dropout: float,
        softcap: float | None,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `varlen_attention` for the whole line, of which every rank has its tokens and gets their output."""
