"""Replays and recordings in a process whose library is wrong, for the replayed model and for everything beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fault_kernels import kernels, products
from lockstep.parity.replay.replay import Replayed, replay
from lockstep.run.progress import Console

pytestmark = pytest.mark.xdist_group("tapes")


def replayed(run: Path) -> Replayed:
    found = replay(run, "forced", [], Console.silent(), [2])
    assert found is not None
    return found


def test_a_matrix_unit_of_less_precision_is_found_in_a_module_with_a_product(tape: Callable[[str], Path]) -> None:
    """The embedding has none, and comes first."""
    run = tape("sft")
    with kernels(products(round_to=torch.bfloat16)):
        found = replayed(run)
    assert found.module is not None
    assert (found.stage, found.module.module) == ("log-probs", "model.layers.0.self_attn.q_proj")


def test_a_kto_replay_goes_on_where_the_first_loss_is_wrong(tape: Callable[[str], Path]) -> None:
    """Training is refused before the first step there. A replay says which stage it is."""
    run = tape("kto")
    with kernels({"sigmoid": lambda x: 1.01 / (1 + torch.exp(-x))}):
        found = replayed(run)
    assert found.stage == "loss"
    [remark] = found.remarks
    assert remark.startswith("The check at load: step 0: the loss is 0.505000 where equal models give 0.500000")
    assert "report" not in remark
