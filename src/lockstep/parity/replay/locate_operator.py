"""Finds which run computes a diverged module wrongly (the recorded run or the replay), and which operator is wrong.

The recorded run and the replay are both compared with a float64 reference of the module (`numpy_modules.py`). The
reference runs on the host with the recorded weights and with the module's inputs, which agree in both runs. A run is
reported as wrong only if the reference agrees with the other run. If the reference agrees with both runs or with
neither, or if there is no reference for the module, neither run is reported as wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn

from lockstep.data.batching import micro_batch, to_device
from lockstep.device.cpu import Cpu
from lockstep.model.load_folder import DTYPES
from lockstep.model.policy import Policy
from lockstep.model.resolve import image_folder, model_folder
from lockstep.parallel.world import World
from lockstep.parity.replay.diverged_module import BACKWARD_FACTOR, DivergedModule, traces_of
from lockstep.parity.replay.numpy_modules import (
    Array,
    NotedValues,
    PackedTokens,
    Reference,
    array,
    directional,
    host_digest,
    reference_of,
)
from lockstep.parity.replay.numpy_operators import numpy_results
from lockstep.parity.replay.operator_bisect import WrongOperator, other_code, other_values, wrong_kernel
from lockstep.parity.replay.operator_log import ModuleLog, log_module
from lockstep.parity.replay.reproducer import write_reproducer
from lockstep.parity.replay.tolerances import NOTHING, Tolerance, excess_of, operator_tolerance, tolerance_of
from lockstep.recipe import Recipe
from lockstep.tape.digest import BLOCKS, SKETCH, norm, relative, sketch
from lockstep.tape.module_trace import BACKWARD, FORWARD, ROOT, Event, Trace
from lockstep.tape.tape_format import StepRecord, TapeFolder, below
from lockstep.tape.tape_images import TapeImages
from lockstep.tape.tape_recorder import answers_of, restore_learner, trace_examples
from lockstep.tape.tape_rows import step_examples
from lockstep.train.models import Models, build_critic, build_learner
from lockstep.train.run_writer import Run
from lockstep.train.step import Learner
from lockstep.types import MicroBatch

UNKNOWN = "cannot tell which side"
REPLAY, RECORDED = "replay", "recorded run"
# A run is reported as wrong only if its difference from the reference is at least this many times that of the other
# run.
CLEARLY = 3.0
# The maximum number of multiplications of a float64 reference, so that the host computes it within minutes.
MOST_WORK = 2e13


@dataclass(frozen=True)
class Located:
    """The wrong run (recorded run or replay) and the wrong operator of a diverged module."""

    side: str
    """`REPLAY`, `RECORDED` or `UNKNOWN`."""
    operator: str | None
    why: str
    shapes: list[list[int]]
    dtypes: list[str]
    values: tuple[float, float] | None
    """The computed and the expected value at the largest difference."""
    script: str | None = None
    judge: str = ""
    """A text that says how the wrong run was determined."""


def locate(run: Run, models: Models, tape: TapeFolder, step: int, diverged: DivergedModule) -> Located | None:
    """Locates the wrong operator of a diverged module. All ranks must call this function, because a sharded model needs
    all ranks. Only rank 0 gets the result."""
    record, files = tape.read_step(step), TapeImages(tape.path, image_folder(run.recipe.model))
    batch = micro_batch(
        trace_examples(step_examples(record, files), record.info["probe"]["rows"]), packed=True, pad_id=0
    )
    learner = next(one for one in models.learners if one.name == diverged.learner)
    here = to_device(batch, learner.device)

    def log(module: nn.Module, rows: MicroBatch, **how: Any) -> ModuleLog:
        return log_module(module, diverged.module, lambda: answers_of(module(rows)), phase=diverged.phase, **how)

    logs = run.world.gather(log(learner.module, here, ranks=run.world.size))
    if not run.world.main:
        return None
    replayed = logs[diverged.rank]
    if step not in tape.weighed() and step != 1:
        return Located(UNKNOWN, None, "the recording does not contain the weights of this step", [], [], None)
    clean = clean_learner(run.recipe, diverged.learner, tape, step)
    same = log(clean.module, batch, given=replayed.border)
    if fused := same.children - replayed.children:
        # In the replay, a fused operator replaces the child modules `fused`. So the log of the clean copy must also
        # contain the operators of these child modules.
        same = log(clean.module, batch, given=replayed.border, through=fused)
    case = _case(run.recipe, clean, tape, step, diverged, batch)
    return judge_module(replayed, same, which_side(case, replayed, same, record), diverged, run)


def clean_learner(recipe: Recipe, name: str, tape: TapeFolder, step: int) -> Learner:
    """Returns a clean copy of the model: a new model on the CPU with the recorded weights and standard implementations
    of all modules."""
    plain = {"gradient_checkpointing": False, "activation_offload": False, "tiled_mlp": None, "attention": "sdpa"}
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=plain), "device": "cpu"})
    build = build_critic if name == "critic" else build_learner
    learner = build(recipe, Cpu(), World(), torch.device("cpu"))
    assert learner is not None
    if step in tape.weighed():
        restore_learner(learner, tape.read_weights(step), str(tape.path))
    return learner


def judge_module(
    replayed: ModuleLog, same: ModuleLog, judged: SideVerdict, diverged: DivergedModule, run: Run
) -> Located:
    """Finds the wrong operator in the replayed module. `same` is the log of a clean CPU copy of the module with the
    same dtype and the same inputs."""
    tolerance = operator_tolerance(run.recipe.model.dtype, backwards=diverged.phase == BACKWARD)
    wrong = None
    if judged.side != RECORDED:
        wrong = wrong_kernel(replayed.calls) or other_code(replayed.calls, same.calls, tolerance)
    if wrong is None and judged.side == REPLAY:
        wrong = other_values(replayed.calls, judged.noted, replayed.outputs, tolerance)
    if wrong is None:
        why = "with equal inputs, no single operator of the module differs"
        if judged.side == RECORDED:
            why = (
                "the replay's operators are correct; to find the wrong operator of the recorded run, record on this"
                " machine and replay on the machine of the recorded run"
            )
        return Located(judged.side, None, why, *_shapes(replayed.outputs), None, judge=judged.why)
    side, judge = judged.side, judged.why
    if side == UNKNOWN and wrong.fault == "kernel" and numpy_results(wrong.call) is not None:
        side, judge = REPLAY, f"the replay's {wrong.call.name} differs from numpy on the same inputs"
    title = f"{diverged.module}, {diverged.phase}: {wrong.call.name} differs"
    script = write_reproducer(wrong, run.folder.path / "reproduce.py", title)
    shapes = _shapes(wrong.call.inputs)
    return Located(side, wrong.call.name, wrong.why, *shapes, _values(wrong), str(script) if script else None, judge)


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[list[list[int]], list[str]]:
    return [list(t.shape) for t in tensors], [str(t.dtype).removeprefix("torch.") for t in tensors]


def _values(wrong: WrongOperator) -> tuple[float, float] | None:
    found, wanted = wrong.actual, wrong.expected
    if found.shape != wanted.shape or not found.numel():
        return None
    index = int((found.double() - wanted.double()).abs().flatten().argmax())
    return float(found.flatten()[index]), float(wanted.flatten()[index])


# -- which side


@dataclass(frozen=True)
class SideVerdict:
    """The wrong run, the reason, and the intermediate values of the float64 reference."""

    side: str
    why: str
    noted: NotedValues = field(default_factory=NotedValues)
    """The intermediate values that the replay's module should have computed in its forward pass."""


@dataclass(frozen=True)
class SideCase:
    """The values that the float64 reference of a module is computed from, in addition to the module's inputs."""

    diverged: DivergedModule
    config: Mapping[str, Any]
    recorded_weights: Mapping[str, Array]
    replayed_weights: Mapping[str, Array]
    tokens: PackedTokens
    temperature: float | None
    tolerance: Tolerance

    def reference(self, kind: str, weights: Mapping[str, Array]) -> Reference | None:
        return reference_of(self.diverged.module, kind, self.config, weights, self.tokens, self.temperature)

    @property
    def allowed(self) -> float:
        """The tolerance of a module's outputs, which grows with the error of its inputs."""
        floor = self.tolerance.module * (BACKWARD_FACTOR if self.diverged.phase == BACKWARD else 1.0)
        return max(floor, self.tolerance.growth * self.diverged.error_in)


def _case(
    recipe: Recipe, clean: Learner, tape: TapeFolder, step: int, diverged: DivergedModule, batch: MicroBatch
) -> SideCase:
    folder, recorded = Path(model_folder(recipe.model.path)), tape.manifest()["recipe"]["model"]["dtype"]
    dtypes = DTYPES[recorded], DTYPES[recipe.model.dtype]
    weights = weights_for(diverged.module, tape, step, diverged.learner, folder, dtypes)
    scoring = clean.module.scoring if isinstance(clean.module, Policy) else None
    plain = scoring is not None and scoring.truncation is None and scoring.comparison is None
    temperature = scoring.temperature if scoring is not None and plain else None
    tolerance = tolerance_of(recorded, recipe.model.dtype)
    return SideCase(diverged, read_config(folder), *weights, packed_tokens(batch), temperature, tolerance)


def which_side(case: SideCase, replayed: ModuleLog, clean: ModuleLog, record: StepRecord) -> SideVerdict:
    """Returns which run is wrong. If the replayed module has no gradients at its outputs, the gradients of the clean
    copy are used."""
    diverged, traces = case.diverged, traces_of(record)
    trace = traces.get((diverged.learner, diverged.rank)) or traces.get((diverged.learner, 0))
    # Recorded backward calls do not contain the module's class.
    events = trace.events if trace is not None else []
    kind = diverged.kind or next((e.kind for e in events if e.module == diverged.module and e.kind), "")
    ours, theirs = (case.reference(kind, weights) for weights in (case.recorded_weights, case.replayed_weights))
    if trace is None or ours is None or theirs is None:
        return SideVerdict(UNKNOWN, f"lockstep has no float64 reference for {kind or diverged.module}")
    inputs = _inputs(replayed, diverged)
    if inputs is None:
        return SideVerdict(UNKNOWN, "the module's inputs were not recorded")
    if _work(theirs, case) > MOST_WORK:
        return SideVerdict(UNKNOWN, "the module is too large for a float64 reference on the host")
    noted = NotedValues()
    try:
        if diverged.phase == FORWARD:
            found = [host_digest(array(t)) for t in replayed.outputs]
            errors = (
                _forward(case, theirs, inputs, found, noted),
                _forward(case, ours, inputs, _recorded_outputs(trace, diverged), NotedValues()),
            )
        else:
            gradients = _backward(case, (theirs, ours), inputs, replayed, clean, trace)
            if gradients is None:
                return SideVerdict(UNKNOWN, "the gradients at the module's outputs were not recorded")
            errors = gradients
    except (StopIteration, ValueError, KeyError, IndexError) as error:
        return SideVerdict(UNKNOWN, f"the float64 reference of {kind} does not fit this module: {error}")
    return SideVerdict(*_verdict(*errors), noted)


def _verdict(replayed: float, recorded: float) -> tuple[str, str]:
    why = f"float64 reference: replay {replayed:.2g} times the tolerance, recorded run {recorded:.2g} times"
    if recorded <= 1 < replayed and replayed >= CLEARLY * recorded:
        return REPLAY, why
    if replayed <= 1 < recorded and recorded >= CLEARLY * replayed:
        return RECORDED, why
    return UNKNOWN, why


def _forward(
    case: SideCase, reference: Reference, inputs: Sequence[Array], found: Sequence[torch.Tensor], noted: NotedValues
) -> float:
    """Returns the error of a module's outputs divided by the tolerance."""
    wanted = reference.compute(inputs, reference.weights, noted)
    if len(found) < len(wanted):
        return math.inf
    return max(_times(x, y, case) for x, y in zip(found, wanted, strict=False))


def _times(found: torch.Tensor, wanted: Array, case: SideCase) -> float:
    expected, limits = host_digest(wanted), case.tolerance.systematic
    shapes = [list(wanted.shape)]
    excess = NOTHING if limits is None else excess_of([expected], [found.double()], shapes, limits.forward)
    return max(relative(expected, found) / case.allowed, excess.times)


def _backward(
    case: SideCase,
    references: tuple[Reference, Reference],
    inputs: list[Array],
    replayed: ModuleLog,
    clean: ModuleLog,
    trace: Trace,
) -> tuple[float, float] | None:
    """Compares the gradients at the first input (the hidden states) and of the module's parameters.

    Returns the errors of the replay and of the recorded run, divided by the tolerance.
    """
    diverged = case.diverged
    events = [event for event in trace.events if (event.module, event.phase) == (diverged.module, BACKWARD)]
    arrived = _arrived(replayed, clean, trace, events, case.allowed)
    if arrived is None:
        return None
    shape = tuple(events[-1].shapes[-1]) if events else None
    states = next((i for i, x in enumerate(inputs) if x.shape == shape), None)
    errors: tuple[list[float], list[float]] = ([], [])
    if states is not None and diverged.module != ROOT:
        given = [array(t) for t in replayed.outputs if tuple(t.shape) == inputs[states].shape]
        left = trace.outputs(events[-1])[0]
        sides = (_summed(host_digest(given[-1])) if given else None, _summed(left))
        for reference, found, side in zip(references, sides, errors, strict=True):
            wanted = directional(_at_input(reference, inputs, states), inputs[states], arrived)
            side.append(_difference(found, wanted, norm(left)) / case.allowed)
    allowed = max(case.tolerance.gradient, case.tolerance.growth * diverged.error_in)
    for name, theirs in replayed.parameters.items():
        ours = trace.tensors.get(f"parameter/{diverged.module}.{name}")
        if ours is None or references[0].tied or name not in references[0].weights:
            continue
        for reference, digest, side in zip(references, (theirs, ours), errors, strict=True):
            wanted = directional(_at_weight(reference, inputs, name), reference.weights[name], arrived)
            side.append(_difference(_summed(digest), wanted, norm(ours)) / allowed)
    return (max(errors[0]), max(errors[1])) if errors[0] else None


def _at_input(reference: Reference, inputs: list[Array], index: int) -> Callable[[Array], Array]:
    def compute(x: Array) -> Array:
        return reference.compute([*inputs[:index], x, *inputs[index + 1 :]], reference.weights, NotedValues())[0]

    return compute


def _at_weight(reference: Reference, inputs: list[Array], name: str) -> Callable[[Array], Array]:
    return lambda w: reference.compute(inputs, {**reference.weights, name: w}, NotedValues())[0]


def _arrived(
    replayed: ModuleLog, clean: ModuleLog, trace: Trace, events: Sequence[Event], allowed: float
) -> Array | None:
    """Returns the gradient at the module's output in the replay. If the replay did not record it, returns the gradient
    of the module's clean copy if this agrees with the recorded run, otherwise None."""
    key = "output/0/gradient"
    if key in replayed.border:
        return array(replayed.border[key])
    if key not in clean.border or not events or not events[-1].inputs:
        return None
    found = array(clean.border[key])
    return found if relative(host_digest(found), trace.inputs(events[-1])[-1]) <= allowed else None


def _summed(digest: torch.Tensor) -> Array:
    """Returns a digest's projections, summed over all blocks of rows."""
    found: Array = sketch(digest).view(BLOCKS, SKETCH).sum(0).numpy()
    return found


def _difference(found: Array | None, wanted: Array, size: float) -> float:
    if found is None:
        return math.inf
    difference = float(np.sqrt(np.mean((found - wanted) ** 2)))
    return difference / size if size else math.inf if difference else 0.0


def _inputs(log: ModuleLog, diverged: DivergedModule) -> list[Array] | None:
    """Returns the module's inputs in their order. For the complete model, returns the last hidden states of its
    decoder."""
    if diverged.module == ROOT:
        states = log.border.get("model/0/output/0")
        return None if states is None else [array(states)]
    names = [name for name in log.border if name.startswith("input/") and not name.endswith("/gradient")]
    return [array(log.border[name]) for name in sorted(names, key=lambda name: int(name.split("/")[1]))]


def _recorded_outputs(trace: Trace, diverged: DivergedModule) -> list[torch.Tensor]:
    events = [event for event in trace.events if (event.module, event.phase) == (diverged.module, FORWARD)]
    return trace.outputs(events[0]) if events else []


def _work(reference: Reference, case: SideCase) -> float:
    weights = sum(weight.size for weight in reference.weights.values())
    once = 2.0 * weights * len(case.tokens.ids)
    # A complex multiplication is four real ones. The backward reference runs SKETCH times for the hidden states and
    # SKETCH times for each weight.
    return once if case.diverged.phase == FORWARD else once * 4 * SKETCH * (1 + len(reference.weights))


def packed_tokens(batch: MicroBatch) -> PackedTokens:
    ids, positions, predictors, targets = (
        tensor.cpu().numpy().ravel()
        for tensor in (batch.input_ids_NT, batch.position_ids_NT, batch.predictors_K, batch.targets_K)
    )
    return PackedTokens(ids, positions, batch.lengths, predictors, targets)


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the model's config.json. Keys of `text_config` replace the top-level keys. Returns an empty dictionary if
    there is no file."""
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def weights_for(
    module: str, tape: TapeFolder, step: int, learner: str, folder: Path, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Returns the weights of a module (for the complete model: of its head) in the recorded run and in the replay.

    The weights come from the recording, or from the model folder if the recording has none. The replay starts from the
    recorded master weights. `dtypes` are the dtypes of the recorded and of the replayed model.
    """
    heads = ("model.embed_tokens.weight", "lm_head.weight", "lm_head.bias")

    def wanted(name: str) -> bool:
        return name in heads if module == ROOT else name.startswith(f"{module}.")

    model: dict[str, torch.Tensor] = {}
    masters: dict[str, torch.Tensor] = {}
    if step in tape.weighed():
        every = tape.read_weights(step)
        model, masters = (
            {name: tensor for name, tensor in below(every, prefix).items() if wanted(name)}
            for prefix in (f"{learner}/model/", f"{learner}/optimizer/master/")
        )
    else:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                model |= {name: opened.get_tensor(name) for name in opened.keys() if wanted(name)}  # noqa: SIM118
    recorded, replayed = dtypes
    return (
        {name: array(tensor.to(recorded)) for name, tensor in model.items()},
        {name: array(tensor.to(replayed)) for name, tensor in {**model, **masters}.items()},
    )
