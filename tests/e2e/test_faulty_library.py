"""Replays and recordings in a process whose library is wrong, for the replayed model and for everything beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fault_kernels import LIBRARY, kernels, products
from fault_scene import Scene, replay_with, wrap
from lockstep.parity.replay.replay import Replayed, replay
from lockstep.parity.replay.side import RECORDED, REPLAY, UNKNOWN
from lockstep.run.console import Console
from lockstep.tape.probe import ROOT
from taped_runs import record

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
    assert found.stage == "log-probs"
    assert found.module.module in (ROTARY, "model.layers.0.self_attn.q_proj")


def test_a_kto_replay_goes_on_where_the_first_loss_is_wrong(tape: Callable[[str], Path]) -> None:
    """Training is refused before the first step there. A replay says which stage it is."""
    run = tape("kto")
    with kernels({"sigmoid": lambda x: 1.01 / (1 + torch.exp(-x))}):
        found = replayed(run)
    assert found.stage == "loss"
    [remark] = found.remarks
    assert remark.startswith("The check at load: step 0: the loss is 0.505000 where equal models give 0.500000")
    assert "report" not in remark


# For every day a function that all modules share, and one way back.
DAILY = ("linear", "silu backwards")
# Recording is refused there before the first step.
REFUSED = ("attention",)
# In some versions of transformers it is made with a product, and comes before the first projection.
ROTARY = "model.rotary_emb"


def first_wrong(name: str, module: str) -> tuple[str, str]:
    """The module that a fault of the library is found in, and where a fault of products may be found before it."""
    return LIBRARY[name].module, ROTARY if name.startswith("product") and module == ROTARY else LIBRARY[name].module


def faults(*, left_out: tuple[str, ...] = ()) -> list[object]:
    return [
        pytest.param(name, marks=() if name in DAILY else pytest.mark.slow) for name in LIBRARY if name not in left_out
    ]


@pytest.mark.parametrize("name", faults())
def test_a_replay_with_a_wrong_library_blames_itself_and_names_the_operator(
    name: str, tape: Callable[[str], Path]
) -> None:
    """The clean copy of the model that the replay builds has the same library, and the recorded run was right."""
    run, fault = tape("sft"), LIBRARY[name]
    with fault.patch():
        found = replayed(run)
    assert found.module is not None
    assert found.operator is not None
    assert found.module.module in first_wrong(name, found.module.module), found.operator
    assert found.operator.side == REPLAY, found.operator
    operators = "aten.bmm" if found.module.module == ROTARY else fault.operators
    assert str(found.operator.operator).startswith(operators), found.operator
    assert found.operator.script is not None


@pytest.mark.parametrize("name", faults(left_out=REFUSED))
def test_a_right_replay_blames_a_recorded_run_with_a_wrong_library(
    name: str, tape: Callable[[str], Path], tmp_path: Path
) -> None:
    model, fault = tape("sft").parents[2] / "model", LIBRARY[name]
    with fault.patch():
        run = record(tmp_path, model, "sft", steps=1)
    found = replay(run, "forced", [], Console.silent())
    assert found is not None
    assert found.module is not None
    assert found.operator is not None
    assert found.module.module in first_wrong(name, found.module.module), found.operator
    assert found.operator.side == RECORDED, found.operator
    assert found.operator.operator is None


def test_there_are_enough_faults_to_tell() -> None:
    assert len(LIBRARY) >= 8 + len(REFUSED)


def test_nobody_is_blamed_where_the_module_has_no_reference(tape: Callable[[str], Path]) -> None:
    """A reward model's head is none of the standard modules."""
    run = tape("rm")

    def changed(scene: Scene) -> None:
        wrap(scene.policy, "forward", lambda own, batch: 1.01 * own(batch))

    found = replay_with(run, changed)
    assert found is not None
    assert found.module is not None
    assert found.operator is not None
    assert (found.module.module, found.operator.side) == (ROOT, UNKNOWN)
