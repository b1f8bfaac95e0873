"""The result of a replay as JSON and on the console."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.parity.replay.diverged_module import DivergedModule
from lockstep.parity.replay.locate_operator import Located
from lockstep.parity.replay.replay_checks import Check, first_cause, verdicts
from lockstep.parity.replay.replay_loop import skipped_steps
from lockstep.parity.replay.replay_result import Replayed, as_json, first_divergence, show
from lockstep.parity.replay.tolerances import MIXED, TOLERANCES, inherited, tolerance_of
from lockstep.run.console import PlainConsole
from lockstep.run.folder import RunFolder
from lockstep.tape.tape_format import TapeFolder

LOGPROBS = Check("log-probs", 3, "train, first update", math.inf, 2e-5, "token 4: -1 against nan")
LOSS = Check("loss", 3, "train, update 1: value", 1e-3, 1e-5, "2 against 2.002")
GENERATION = Check("generation", 3, "tokens", 0.2, 2e-5, "prompt 0")
MODULE = DivergedModule(
    "train",
    1,
    "model.layers.2.mlp.up_proj",
    "Linear",
    "forward",
    1e-7,
    math.inf,
    [[1, 8, 4], [1, 8, 16]],
    (["float32"], ["float32"]),
    (1.0, math.nan),
)
OPERATOR = Located("replay", "aten.mm", "why", [[8, 4], [4, 16]], ["float32", "bfloat16"], (1.5, 1.25), "reproduce.py")
RESULT = Replayed("forced", Path("runs/a/replays/forced-1"), [1, 3], [LOSS, LOGPROBS], LOGPROBS, MODULE, 3, OPERATOR)


def test_what_is_not_finite_is_null_in_json() -> None:
    text = json.dumps(as_json(RESULT), allow_nan=False)
    found = json.loads(text)
    assert found["cause"]["error"] is None
    assert found["module"]["error_out"] is None
    assert found["module"]["norms"] == [1.0, None]
    assert (found["stage"], found["step"], found["in_step"]) == ("log-probs", 3, False)
    assert found["operator"]["values"] == [1.5, 1.25]


def test_blame_falls_on_the_first_update_and_on_the_model_before_the_engine() -> None:
    assert first_cause([LOSS, GENERATION, LOGPROBS]) is LOGPROBS
    assert first_cause([LOSS, GENERATION]) is GENERATION
    # The second update of a step only inherits what the first did.
    later = replace(LOGPROBS, update=1)
    assert first_cause([later, LOSS]) is LOSS
    assert first_cause([replace(LOSS, error=0.0)]) is None


def test_a_stage_has_its_worst_check() -> None:
    mild = replace(LOSS, error=1.1e-5, what="value")
    table = verdicts([mild, LOSS, replace(GENERATION, error=0.0)])
    assert (table["loss"]["error"], table["loss"]["passed"]) == (1e-3, False)
    assert table["generation"]["passed"] is True
    assert list(table) == ["generation", "loss"]


def test_a_module_alone_names_its_stage() -> None:
    assert Replayed("forced", Path("x"), [1], [], None, MODULE).stage == "log-probs"
    assert Replayed("forced", Path("x"), [1], [], None, replace(MODULE, phase="backward")).stage == "gradient"
    assert Replayed("forced", Path("x"), [1], [], None, None).in_step


def test_the_coarser_dtype_sets_the_tolerance() -> None:
    assert tolerance_of("bf16", "bf16") == TOLERANCES["bf16"]
    # One side's weights are rounded: modules and gradients may be off by more, everything else by as much.
    for dtypes, name in ((("fp32", "bf16"), "bf16"), (("fp16", "fp32"), "fp16")):
        plain = TOLERANCES[name]
        mixed = tolerance_of(*dtypes)
        assert mixed == replace(plain, module=0.05, growth=8.0, systematic=MIXED)
    fine = TOLERANCES["fp32"]
    wide = inherited(fine, 4)
    assert (wide.logprob, wide.loss, wide.optimizer) == (0.01, 0.02, fine.optimizer)
    # Four updates may each be off by what one may: the check can still fail.
    assert wide.update == 4 * fine.update


def test_the_console_fits_and_goes_from_coarse_to_fine(capsys: pytest.CaptureFixture[str]) -> None:
    show(RESULT, PlainConsole(()))
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80
    assert "verdict: out of step" in output
    names = [name for name, _ in first_divergence(RESULT)]
    assert names == [
        "stage",
        "step",
        "check",
        "error",
        "where",
        "module",
        "rank",
        "growth",
        "wrong side",
        "operator",
        "inputs",
        "values",
        "reproduce",
    ]


def test_steps_without_recorded_weights_are_named(tmp_path: Path) -> None:
    for name in ("step_000001", "step_000002", "step_000003", "weights_000001"):
        (tmp_path / f"{name}.safetensors").touch()
    source, tape = RunFolder(tmp_path), TapeFolder(tmp_path)
    (said,) = skipped_steps(source, tape, (), forced=True)
    assert said.startswith("2 more recorded steps have no weights; --mode chained")
    assert skipped_steps(source, tape, (1,), forced=True) == []
