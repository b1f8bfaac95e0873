"""Faults injected into a replay, one at a time: the stage, the module, the rank and the parameter must be reported.

`python -m pytest tests/e2e/test_faults.py -s -m ""` prints the table of all faults, and the figures of docs/replay.md.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import faults
from fault_kernels import LIBRARY, kernels, products
from fault_modules import attention, other_arithmetic
from fault_report import Fault, Named, summary
from fault_scene import Inject, Scene, replay_with, wrap
from faults import BF16, FP32, OTHER_BATCHES, RANKS, UNSEEN, another_device, figures, name_it
from hang import HANG
from lockstep.parity.replay.locate_operator import RECORDED, REPLAY, UNKNOWN
from lockstep.parity.replay.replay_command import replay
from lockstep.parity.replay.replay_result import Replayed
from lockstep.run.console import Console
from lockstep.tape.digest import LENGTH, SHORT
from lockstep.tape.module_trace import ROOT
from lockstep.tape.tape_format import StepRecord, TapeFolder
from taped_runs import record

pytestmark = pytest.mark.xdist_group("tapes")

# For every day: one of each stage, and those that only one check can see. The others are slow.
DAILY = {
    "packed sequences see each other",
    "MLP detached",
    "stale weights in the engine",
    "clip range",
    "masters not copied",
    "bf16: a target left out",
}
# In a bf16 replay of an fp32 tape.
MIXED = ("MLP x 1.03", "attention scale x 1.05", "gradients x 1.3", "offset of 0.05", "tied head x 1.02")


@pytest.fixture(scope="module")
def table() -> Iterator[list[Named]]:
    rows: list[Named] = []
    yield rows
    print(f"\n{summary(rows)}\n\n{figures(_bf16(rows))}")


def _bf16(rows: list[Named]) -> list[Named]:
    return [one for one in rows if one.fault in BF16]


def _parameter(fault: Fault) -> object:
    marks = () if fault.name in DAILY else pytest.mark.slow
    return pytest.param(fault, id=fault.name.replace(" ", "-"), marks=marks)


def test_the_table_has_all_faults() -> None:
    assert len(faults.FAULTS) == len(FP32) + len(BF16) + len(RANKS), "two faults share a name"
    assert len(BF16) >= 60
    assert faults.FAULTS.keys() >= DAILY | UNSEEN.keys() | {f"bf16: {name}" for name in MIXED}


@pytest.mark.daily("MLP-detached", "stale-weights-in-the-engine")
@pytest.mark.parametrize("fault", [_parameter(fault) for fault in (*FP32, *BF16)])
def test_a_fault_is_named(fault: Fault, tape: Callable[[str], Path], table: list[Named]) -> None:
    named = name_it(tape(fault.recipe), fault)
    assert named is not None
    table.append(named)
    if fault.name in UNSEEN:
        # Too small for bf16; no other stage may be reported for it.
        assert named.stage in (None, fault.stage), named
        return
    assert named.stage == fault.stage, named
    assert (named.module, named.rank) == (fault.module, fault.rank), named
    assert fault.expects in named.reported, named


@pytest.mark.slow
def test_the_figures_are_those_of_the_docs(table: list[Named]) -> None:
    """After all faults: the goals, and the table in docs/replay.md."""
    rows = _bf16(table)
    if len(rows) < len(BF16):
        pytest.skip("not all faults were run")
    stages = [one.stage_right for one in rows]
    places = [one.stage_right and one.place_right for one in rows if one.fault.module]
    assert sum(stages) >= 0.95 * len(stages)
    assert sum(places) >= 0.9 * len(places)
    docs = (Path(__file__).parents[2] / "docs" / "replay.md").read_text(encoding="utf-8")
    assert figures(rows) in docs, figures(rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
def test_a_fault_in_bf16_is_named_for_an_fp32_tape(name: str, tape: Callable[[str], Path]) -> None:
    fault = faults.FAULTS[f"bf16: {name}"]
    fault = replace(fault, recipe=fault.recipe.removesuffix("-bf16"))
    named = name_it(tape(fault.recipe), fault, ("model.dtype=bf16", *OTHER_BATCHES))
    assert named is not None
    assert named.stage == fault.stage, named
    # The model's final outputs are not checked as module outputs here: the stage and its slope name them.
    assert named.module == (None if fault.module == ROOT else fault.module), named


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "inject"),
    [
        pytest.param("sft", other_arithmetic, id="rounding-sft", marks=pytest.mark.slow),
        pytest.param("ppo", other_arithmetic, id="rounding-ppo", marks=pytest.mark.slow),
        pytest.param("sft-bf16", other_arithmetic, id="rounding-sft-bf16"),
        pytest.param("sft", attention("model.layers.1.self_attn"), id="attention-sft"),
    ],
)
def test_without_a_fault_nothing_is_named(recipe: str, inject: Inject, tape: Callable[[str], Path]) -> None:
    """Neither the other rounding nor the plain attention that faults are injected into raises an alarm.

    Such replays of other methods are among the clean repeats.
    """
    found = replay_with(tape(recipe), inject, OTHER_BATCHES)
    assert found is not None
    assert found.in_step, (found.cause, found.module)


@pytest.mark.slow
def test_a_tape_of_an_earlier_version_is_judged_by_distances(tmp_path: Path, tape: Callable[[str], Path]) -> None:
    """Digests without profiles, and no weights before an update or after a step."""
    run = tmp_path / "run"
    shutil.copytree(tape("sft-bf16"), run)
    old = TapeFolder(run / "tape")
    for step in old.steps():
        one = old.read_step(step)
        for update in one.info["updates"]:
            del update["micro_batches"]
        kept = {name: value for name, value in one.tensors.items() if "/start/" not in name and "/left/" not in name}
        old.write_step(StepRecord(step, one.info, {name: _short(value) for name, value in kept.items()}))
        old.left_file(step).unlink()
    found = replay_with(run, another_device, OTHER_BATCHES)
    assert found is not None
    assert found.in_step, (found.cause, found.module)
    reported = {check.what for check in found.checks}
    assert any(check.stage == "gradient" for check in found.checks)
    assert not [what for what in reported if what.endswith((", slope", "movement")) or "recorded run" in what]


def _short(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:SHORT].clone() if tensor.shape == (LENGTH,) else tensor


# -- several ranks


def in_ranks(ranks: int, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, faults.__file__, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=HANG,
        env=dict(os.environ),
        check=False,
    )


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name.replace(" ", "-")) for fault in RANKS])
def test_a_fault_of_one_rank_is_named(fault: Fault, tape: Callable[[str], Path]) -> None:
    """Several processes replay a run of one process."""
    done = in_ranks(fault.ranks, tape(fault.recipe), fault.name)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sft", "sft-bf16", "grpo"])
def test_several_ranks_without_a_fault_are_in_step(recipe: str, tape: Callable[[str], Path]) -> None:
    done = in_ranks(2, tape(recipe))
    assert done.returncode == 0, done.stdout + done.stderr


# -- a library that is wrong for the replayed model and for everything else in the process

# For every day a function that all modules share, and one backward kernel.
DAILY_LIBRARY = ("linear", "silu backwards")
# Recording with this fault is refused before the first step.
REFUSED = ("attention",)
# Some versions of transformers compute it with a product, before the first projection.
ROTARY = "model.rotary_emb"


def replayed(run: Path) -> Replayed:
    found = replay(run, "forced", [], Console.silent(), [2])
    assert found is not None
    return found


def first_wrong(name: str, module: str) -> tuple[str, str]:
    """The module with a library fault, and where a fault of products may be found before it."""
    return LIBRARY[name].module, ROTARY if name.startswith("product") and module == ROTARY else LIBRARY[name].module


def library(*, left_out: tuple[str, ...] = ()) -> list[object]:
    return [
        pytest.param(name, marks=() if name in DAILY_LIBRARY else pytest.mark.slow)
        for name in LIBRARY
        if name not in left_out
    ]


def test_there_are_enough_library_faults() -> None:
    assert len(LIBRARY) >= 8 + len(REFUSED)


@pytest.mark.daily("silu backwards")
@pytest.mark.parametrize("name", library())
def test_a_replay_with_a_wrong_library_is_the_wrong_side_and_its_operator_is_named(
    name: str, tape: Callable[[str], Path]
) -> None:
    """The replay's clean copy of the model has the same library, and the recorded run was correct."""
    run, fault = tape("sft"), LIBRARY[name]
    with fault.patch():
        found = replayed(run)
    assert found.module is not None
    assert found.operator is not None
    assert found.module.module in first_wrong(name, found.module.module), found.operator
    assert found.operator.side == REPLAY, found.operator
    operators = fault.operators if found.module.module == fault.module else "aten.bmm"
    assert str(found.operator.operator).startswith(operators), found.operator
    assert found.operator.script is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", library(left_out=REFUSED))
def test_a_recorded_run_with_a_wrong_library_is_the_wrong_side(
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


@pytest.mark.slow
def test_a_matrix_unit_of_less_precision_is_found_in_a_module_with_a_product(tape: Callable[[str], Path]) -> None:
    """The embedding has no product, and comes first."""
    run = tape("sft")
    with kernels(products(round_to=torch.bfloat16)):
        found = replayed(run)
    assert found.module is not None
    assert found.stage == "log-probs"
    assert found.module.module in (ROTARY, "model.layers.0.self_attn.q_proj")


@pytest.mark.slow
def test_a_kto_replay_continues_if_the_first_loss_is_wrong(tape: Callable[[str], Path]) -> None:
    """Training is refused before the first step. A replay names the stage."""
    run = tape("kto")
    with kernels({"sigmoid": lambda x: 1.01 / (1 + torch.exp(-x))}):
        found = replayed(run)
    assert found.stage == "loss"
    [remark] = found.remarks
    assert remark.startswith("The check at load: step 0 [")
    assert "0.505000" in remark
    assert "0.500000" in remark
    assert "report" not in remark


@pytest.mark.slow
def test_no_side_is_wrong_if_the_module_has_no_reference(tape: Callable[[str], Path]) -> None:
    """A reward model's head is not a standard module."""
    run = tape("rm")

    def changed(scene: Scene) -> None:
        wrap(scene.policy, "forward", lambda original, batch: 1.01 * original(batch))

    found = replay_with(run, changed)
    assert found is not None
    assert found.module is not None
    assert found.operator is not None
    assert (found.module.module, found.operator.side) == (ROOT, UNKNOWN)
