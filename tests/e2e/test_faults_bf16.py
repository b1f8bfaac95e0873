"""Faults put into replays in bf16, beside honest rounding that is larger than many of them.

`python -m pytest tests/e2e/test_faults_bf16.py -s -m ""` prints the figures that stand in docs/replay.md.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fault_scene import replay_with
from faults import Fault, Named, summary
from faults_bf16 import FAULTS, UNSEEN, another_device, figures, name_in_bf16, on_fp32
from lockstep.tape.digest import LENGTH, SHORT
from lockstep.tape.format import StepRecord, TapeFolder
from lockstep.tape.probe import ROOT

pytestmark = pytest.mark.xdist_group("tapes")

# For every day, one of each kind.
QUICK = {
    "attention scale x 1.05",
    "offset of 0.05",
    "weight in fp8",
    "projection's gradient x 1.1",
    "gradients summed in bf16",
    "a target left out",
    "weights lost after the update",
    "KL coefficient",
    "mask one token early",
    "weights changed before the next step",
}
# In a bf16 replay of a tape in fp32, which is how a finer run judges a coarser one.
MIXED = ("MLP x 1.03", "attention scale x 1.05", "gradients x 1.3", "offset of 0.05", "tied head x 1.02")


@pytest.fixture(scope="module")
def table() -> Iterator[list[Named]]:
    rows: list[Named] = []
    yield rows
    print(f"\n{summary(rows)}\n\n{figures(rows)}")


def _parameter(fault: Fault) -> object:
    marks = () if fault.name in QUICK else pytest.mark.slow
    return pytest.param(fault, id=fault.name.replace(" ", "-"), marks=marks)


def test_the_table_is_large_enough() -> None:
    names = {fault.name for fault in FAULTS}
    assert len(names) == len(FAULTS) >= 60
    assert names >= QUICK | set(MIXED) | UNSEEN.keys()


@pytest.mark.parametrize("fault", [_parameter(fault) for fault in FAULTS])
def test_a_fault_in_bf16_is_named(fault: Fault, tape: Callable[[str], Path], table: list[Named]) -> None:
    named = name_in_bf16(tape(fault.recipe), fault)
    table.append(named)
    if fault.name in UNSEEN:
        # Below what bf16 can show; nothing else may be blamed for it.
        assert named.stage in (None, fault.stage), named
        return
    assert named.stage == fault.stage, named
    assert (named.module, named.rank) == (fault.module, fault.rank), named
    assert fault.says in named.said, named


@pytest.mark.slow
def test_the_figures_are_those_of_the_docs(table: list[Named]) -> None:
    """After all faults: the goals, and the table that docs/replay.md shows."""
    if len(table) < len(FAULTS):
        pytest.skip("not all faults were run")
    stages = [one.stage_right for one in table]
    places = [one.stage_right and one.place_right for one in table if one.fault.module]
    assert sum(stages) >= 0.95 * len(stages)
    assert sum(places) >= 0.9 * len(places)
    docs = (Path(__file__).parents[2] / "docs" / "replay.md").read_text(encoding="utf-8")
    assert figures(table) in docs, figures(table)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
def test_a_fault_in_bf16_is_named_beside_fp32(name: str, tape: Callable[[str], Path]) -> None:
    fault = on_fp32(next(fault for fault in FAULTS if fault.name == name))
    named = name_in_bf16(tape(fault.recipe), fault, ("model.dtype=bf16", "batch.tokens=200"))
    assert named.stage == fault.stage, named
    # The model's own answers are not judged as a module's here: the stage and its slope name them.
    assert named.module == (None if fault.module == ROOT else fault.module), named


def test_a_tape_of_an_earlier_version_is_judged_by_distances(tmp_path: Path, tape: Callable[[str], Path]) -> None:
    """Digests without profiles, and nothing of the weights before an update or after a step."""
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
    found = replay_with(run, another_device, ("batch.tokens=200",))
    assert found is not None
    assert found.in_step, (found.cause, found.module)
    said = {check.what for check in found.checks}
    assert any(check.stage == "gradient" for check in found.checks)
    assert not [what for what in said if what.endswith((", slope", "movement")) or "recorded run" in what]


def _short(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:SHORT].clone() if tensor.shape == (LENGTH,) else tensor
