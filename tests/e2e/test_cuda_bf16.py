"""bf16 on an NVIDIA device: twenty clean repeats raise no alarm, and the sample of faults is named there too.

On a machine without one the same runs on the CPU, among the slow tests: the scenes hold, the rounding is another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fault_report import Fault
from faults import BF16, name_it
from lockstep.parity.replay.replay_command import replay
from lockstep.parity.replay.replay_result import first_divergence
from lockstep.run.console import Console
from taped_runs import record, write_lively

# The tapes are recorded once, so one worker runs all of them.
pytestmark = pytest.mark.xdist_group("bf16 on a device")

DEVICES = [
    pytest.param(
        "cuda",
        marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device")],
    ),
    pytest.param("cpu", marks=pytest.mark.slow),
]


@dataclass(frozen=True)
class Repeat:
    """A tape of `recorded_on` (the device itself by default), replayed on the device."""

    recipe: str
    words: tuple[str, ...]
    recorded_on: str = ""

    @property
    def name(self) -> str:
        return "-".join([self.recipe, *self.words, self.recorded_on]).strip("-")


PADDED, SMALL, LARGE = ("batch.micro_batch_size=2", "batch.tokens=null"), ("batch.tokens=128",), ("batch.tokens=2048",)
PLAIN, AGAIN = ("model.attention=sdpa",), ("model.gradient_checkpointing=true", "batch.tokens=160")
REPEATS = [
    *(Repeat("sft-bf16", words) for words in (SMALL, LARGE, PADDED, PLAIN, AGAIN)),
    *(Repeat("dpo-bf16", words) for words in (SMALL, PADDED, PLAIN)),
    *(Repeat("kto-bf16", words) for words in (PADDED, PLAIN)),
    Repeat("rm-bf16", PADDED),
    *(Repeat("grpo-bf16", words) for words in (SMALL, PADDED, PLAIN, ("rollout.engine=hf",))),
    *(Repeat("ppo-bf16", words) for words in (SMALL, PLAIN)),
    # Another device altogether, and a finer tape.
    Repeat("sft-bf16", SMALL, "cpu"),
    Repeat("grpo-bf16", SMALL, "cpu"),
    Repeat("sft", ("model.dtype=bf16", *SMALL), "cpu"),
]
SAMPLE = (
    "bf16: first norm's epsilon 1e-2",
    "bf16: attention scale x 1.05",
    "bf16: MLP x 1.03",
    "bf16: offset of 0.05",
    "bf16: weight in fp8",
    "bf16: projection's gradient x 1.1",
    "bf16: gradients x 1.3",
    "bf16: gradients summed in bf16",
    "bf16: a target left out",
    "bf16: DPO's beta",
    "bf16: KL coefficient",
    "bf16: engine's temperature missing",
    "bf16: epsilon 1e-6",
    "bf16: masters not copied",
    "bf16: weights lost after the update",
    "bf16: weights changed before the next step",
)


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The run of a recipe on a device, recorded when it is first asked for."""
    folder = tmp_path_factory.mktemp("bf16")
    model = write_lively(folder / "model")
    runs: dict[tuple[str, str], Path] = {}

    def of(recipe: str, device: str) -> Path:
        if (recipe, device) not in runs:
            runs[recipe, device] = record(folder / device, model, recipe, device=device)
        return runs[recipe, device]

    return of


def test_there_are_twenty() -> None:
    assert len({repeat.name for repeat in REPEATS}) == len(REPEATS) == 20
    assert {fault.name for fault in BF16} >= set(SAMPLE)


@pytest.mark.parametrize("repeat", [pytest.param(repeat, id=repeat.name) for repeat in REPEATS])
@pytest.mark.parametrize("device", DEVICES)
def test_a_clean_repeat_raises_no_alarm(device: str, repeat: Repeat, tape: Callable[[str, str], Path]) -> None:
    run = tape(repeat.recipe, repeat.recorded_on or device)
    found = replay(run, "forced", [f"device={device}", *repeat.words], Console.silent())
    assert found is not None
    assert found.steps == [1, 2]
    assert found.in_step, first_divergence(found)


@pytest.mark.parametrize("fault", [pytest.param(f, id=f.name.replace(" ", "-")) for f in BF16 if f.name in SAMPLE])
@pytest.mark.parametrize("device", DEVICES)
def test_a_fault_is_named(device: str, fault: Fault, tape: Callable[[str, str], Path]) -> None:
    """The tape is the CPU's, so that the device's own rounding stands beside the fault."""
    named = name_it(tape(fault.recipe, "cpu"), fault, (f"device={device}", "batch.tokens=200"))
    assert named is not None
    assert named.stage == fault.stage, named
    assert named.module == fault.module, named
    assert fault.expects in named.reported, named
