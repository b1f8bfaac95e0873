"""Every variation notices the faults it is there for: the code is broken, and the comparison must fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipes import draw
from variations import VARIATIONS, applicable, compared, run_variation, start_from_first_checkpoint, train

import job_ranks
import trajectory_faults
from commands import torchrun
from trajectory_faults import FAULTS, RANK_FAULTS, Fault

DAILY = ("mean of means", "optimizer not restored")


def trained(folder: Path, fault: Fault) -> dict[str, str]:
    """The reference and the variations of a fault, and what differs between them."""
    drawn = draw(fault.seed)
    file = drawn.write(folder)
    train(file)
    for name in fault.variations:
        run_variation(file, *applicable(drawn, file, [1])[name])
    return compared(drawn, file, fault.variations)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.slow) for name in FAULTS]
)
def test_a_fault_is_noticed(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    # The intact code first: architectures and engines pass their own checks, which would refuse some faults.
    assert trained(tmp_path / "intact", fault) == {}
    with pytest.MonkeyPatch.context() as patch:
        fault.break_code(patch)
        assert set(trained(tmp_path / "broken", fault)) == set(fault.variations)


@pytest.mark.slow
@pytest.mark.torchrun
def test_faults_of_ranks_are_noticed(tmp_path: Path) -> None:
    jobs, runs = [], []
    for number, (fault_name, fault) in enumerate(RANK_FAULTS.items()):
        drawn = draw(fault.seed)
        for name in ("", fault_name):
            file = drawn.write(tmp_path / f"{number}{'-broken' if name else ''}")
            train(file)
            for variation in fault.variations:
                one, words = applicable(drawn, file, [2])[variation]
                if one.resumes:
                    start_from_first_checkpoint(file.parent / "runs", variation)
                jobs.append([name, str(file), *words])
            runs.append((name, drawn, file, fault.variations))
    done = torchrun(job_ranks.write_jobs(tmp_path, jobs), program=Path(trajectory_faults.__file__))
    assert done.returncode == 0, done.stderr
    for name, drawn, file, variations in runs:
        assert set(compared(drawn, file, variations)) == (set(variations) if name else set()), name


def test_every_variation_has_a_fault() -> None:
    """Those of three and four ranks are the layouts of two with more ranks."""
    noticed = {name for fault in (*FAULTS.values(), *RANK_FAULTS.values()) for name in fault.variations}
    assert noticed == {name for name, one in VARIATIONS.items() if one.processes <= 2}
