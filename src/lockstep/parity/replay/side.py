"""Which side of a replay is wrong in the module that parted: each is held against a float64 reference of the module.

The reference gets the inputs that both sides agree on and the recorded weights, and runs on the host in numpy
(`reference.py`). One side is called wrong only where the reference agrees with the other. Where it agrees with both or
with neither, or where there is no reference, nobody is blamed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from lockstep.parity.replay.listen import Heard
from lockstep.parity.replay.modules import WAY_BACK, Blamed, traces_of
from lockstep.parity.replay.reference import (
    Array,
    Noted,
    Reference,
    TokenLine,
    array,
    directional,
    host_digest,
    reference_of,
)
from lockstep.parity.replay.systematic import NOTHING, excess_of
from lockstep.parity.replay.tolerance import Tolerance
from lockstep.tape.digest import BLOCKS, SKETCH, norm, relative, sketch
from lockstep.tape.format import StepRecord, TapeFolder
from lockstep.tape.probe import BACKWARD, FORWARD, ROOT, Event, Trace
from lockstep.types import MicroBatch

UNKNOWN = "cannot tell which side"
REPLAY, RECORDED = "replay", "recorded run"
# The wrong side is further from the reference than the right one by this factor at least.
CLEARLY = 3.0
# Multiplications that a reference may take, so that the host is done in minutes.
MOST_WORK = 2e13


@dataclass(frozen=True)
class SideVerdict:
    """Who is wrong, by what, and on the way the reference's own values."""

    side: str
    why: str
    noted: Noted = field(default_factory=Noted)
    """What the replay's module should have computed on the way, forwards."""


@dataclass(frozen=True)
class SideCase:
    """What a judge knows of the module besides what it computed."""

    blamed: Blamed
    config: Mapping[str, Any]
    recorded_weights: Mapping[str, Array]
    replayed_weights: Mapping[str, Array]
    line: TokenLine
    temperature: float | None
    tolerance: Tolerance

    def reference(self, kind: str, weights: Mapping[str, Array]) -> Reference | None:
        return reference_of(self.blamed.module, kind, self.config, weights, self.line, self.temperature)

    @property
    def allowed(self) -> float:
        """For a module's outputs, by the error that its inputs have already."""
        floor = self.tolerance.module * (WAY_BACK if self.blamed.phase == BACKWARD else 1.0)
        return max(floor, self.tolerance.growth * self.blamed.error_in)


def which_side(case: SideCase, heard: Heard, clean: Heard, record: StepRecord) -> SideVerdict:
    """`heard` is the replay's module. `clean` has the gradients that arrive at one that lost them in the replay."""
    blamed = case.blamed
    trace = _trace(record, blamed)
    # Events of the way back do not know a module's class.
    events = trace.events if trace is not None else []
    kind = blamed.kind or next((e.kind for e in events if e.module == blamed.module and e.kind), "")
    references = [case.reference(kind, weights) for weights in (case.replayed_weights, case.recorded_weights)]
    if trace is None or references[0] is None or references[1] is None:
        return SideVerdict(UNKNOWN, f"there is no float64 reference of {kind or blamed.module}")
    inputs = _inputs(heard, blamed)
    if inputs is None:
        return SideVerdict(UNKNOWN, "the module's inputs are not known")
    if _work(references[0], inputs, case) > MOST_WORK:
        return SideVerdict(UNKNOWN, "the module is too large for a float64 reference on the host")
    noted = Noted()
    try:
        if blamed.phase == FORWARD:
            replayed = _forward(case, references[0], inputs, [host_digest(array(t)) for t in heard.outputs], noted)
            recorded = _forward(case, references[1], inputs, _recorded_outputs(trace, blamed), Noted())
        else:
            found = _backward(case, (references[0], references[1]), inputs, heard, clean, trace)
            if found is None:
                return SideVerdict(UNKNOWN, "the gradients at the module's outputs are not known")
            replayed, recorded = found
    except (StopIteration, ValueError, KeyError, IndexError) as error:
        return SideVerdict(UNKNOWN, f"the float64 reference of {kind} does not fit this module: {error}")
    return SideVerdict(*_verdict(replayed, recorded), noted)


def _verdict(replayed: float, recorded: float) -> tuple[str, str]:
    said = f"float64 reference: replay {replayed:.2g} times the tolerance, recorded run {recorded:.2g} times"
    if recorded <= 1 < replayed and replayed >= CLEARLY * recorded:
        return REPLAY, said
    if replayed <= 1 < recorded and recorded >= CLEARLY * replayed:
        return RECORDED, said
    return UNKNOWN, said


def _forward(
    case: SideCase, reference: Reference, inputs: Sequence[Array], found: Sequence[torch.Tensor], noted: Noted
) -> float:
    """How far the outputs are off, of what they may be."""
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
    heard: Heard,
    clean: Heard,
    trace: Trace,
) -> tuple[float, float] | None:
    """The gradients at the first input, which are the states, and those of the module's own parameters."""
    blamed = case.blamed
    events = [event for event in trace.events if (event.module, event.phase) == (blamed.module, BACKWARD)]
    arrived = _arrived(heard, clean, trace, events, case.allowed)
    if arrived is None:
        return None
    states = next((i for i, x in enumerate(inputs) if x.shape == _shape_back(events)), None)
    replayed: list[float] = []
    recorded: list[float] = []
    if states is not None and blamed.module != ROOT:
        given = [array(t) for t in heard.outputs if tuple(t.shape) == inputs[states].shape]
        left = trace.outputs(events[-1])[0]
        sides = (_summed(host_digest(given[-1])) if given else None, _summed(left))
        for reference, found, times in zip(references, sides, (replayed, recorded), strict=True):
            wanted = directional(_at_input(reference, inputs, states), inputs[states], arrived)
            times.append(_apart(found, wanted, norm(left)) / case.allowed)
    allowed = max(case.tolerance.gradient, case.tolerance.growth * blamed.error_in)
    for name, theirs in heard.parameters.items():
        ours = trace.tensors.get(f"parameter/{blamed.module}.{name}")
        if ours is None or references[0].tied or name not in references[0].weights:
            continue
        for reference, digest, times in zip(references, (theirs, ours), (replayed, recorded), strict=True):
            wanted = directional(_at_weight(reference, inputs, name), reference.weights[name], arrived)
            times.append(_apart(_summed(digest), wanted, norm(ours)) / allowed)
    return (max(replayed), max(recorded)) if replayed else None


def _at_input(reference: Reference, inputs: list[Array], index: int) -> Any:
    def compute(x: Array) -> Array:
        return reference.compute([*inputs[:index], x, *inputs[index + 1 :]], reference.weights, Noted())[0]

    return compute


def _at_weight(reference: Reference, inputs: list[Array], name: str) -> Any:
    return lambda w: reference.compute(inputs, {**reference.weights, name: w}, Noted())[0]


def _shape_back(events: Sequence[Event]) -> tuple[int, ...] | None:
    """Of the gradient that left last; None where none is on the tape."""
    return tuple(events[-1].shapes[-1]) if events else None


def _arrived(heard: Heard, clean: Heard, trace: Trace, events: Sequence[Event], allowed: float) -> Array | None:
    """The gradient at the module's output: the replay's, or where none came back there the clean module's, where that
    is the recorded one."""
    key = "output/0/gradient"
    if key in heard.border:
        return array(heard.border[key])
    if key not in clean.border or not events or not events[-1].inputs:
        return None
    found = array(clean.border[key])
    recorded = trace.inputs(events[-1])[-1]
    return found if relative(host_digest(found), recorded) <= allowed else None


def _summed(digest: torch.Tensor) -> Array:
    """A digest's projections over all rows."""
    found: Array = sketch(digest).view(BLOCKS, SKETCH).sum(0).numpy()
    return found


def _apart(found: Array | None, wanted: Array, size: float) -> float:
    if found is None:
        return math.inf
    apart = float(np.sqrt(np.mean((found - wanted) ** 2)))
    return apart / size if size else math.inf if apart else 0.0


def _inputs(heard: Heard, blamed: Blamed) -> list[Array] | None:
    """Numbers that came in, in their order. The model as a whole is judged by what it makes of its decoder's states."""
    if blamed.module == ROOT:
        states = heard.border.get("model/0/output/0")
        return None if states is None else [array(states)]
    names = [name for name in heard.border if name.startswith("input/") and not name.endswith("/gradient")]
    return [array(heard.border[name]) for name in sorted(names, key=lambda name: int(name.split("/")[1]))]


def _trace(record: StepRecord, blamed: Blamed) -> Trace | None:
    traces = traces_of(record)
    return traces.get((blamed.learner, blamed.rank)) or traces.get((blamed.learner, 0))


def _recorded_outputs(trace: Trace, blamed: Blamed) -> list[torch.Tensor]:
    events = [event for event in trace.events if (event.module, event.phase) == (blamed.module, FORWARD)]
    return trace.outputs(events[0]) if events else []


def _work(reference: Reference, inputs: Sequence[Array], case: SideCase) -> float:
    weights = sum(weight.size for weight in reference.weights.values())
    once = 2.0 * weights * len(case.line.ids)
    # Complex products are four, and there are SKETCH directions for the states and each weight.
    return once if case.blamed.phase == FORWARD else once * 4 * SKETCH * (1 + len(reference.weights))


def line_of(batch: MicroBatch) -> TokenLine:
    ids, positions, predictors, targets = (
        tensor.cpu().numpy().ravel()
        for tensor in (batch.input_ids_NT, batch.position_ids_NT, batch.predictors_K, batch.targets_K)
    )
    return TokenLine(ids, positions, batch.lengths, predictors, targets)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it is; empty where there is none."""
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def weights_for(
    module: str, tape: TapeFolder, step: int, learner: str, folder: Path, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Weights of a module, or of the head, as the recorded run and as the replay computes with them.

    They are the tape's, or those of the model folder where the tape has none of the first step. The replay starts from
    the finer copies that the recorded run's optimizer had. `dtypes` are those of the two models.
    """

    def wanted(name: str) -> bool:
        heads = ("model.embed_tokens.weight", "lm_head.weight", "lm_head.bias")
        return name in heads if module == ROOT else name.startswith(f"{module}.")

    if step in tape.weighed():
        every = tape.read_weights(step)
        model, masters = (
            {
                name.removeprefix(prefix): tensor
                for name, tensor in every.items()
                if name.startswith(prefix) and wanted(name.removeprefix(prefix))
            }
            for prefix in (f"{learner}/model/", f"{learner}/optimizer/master/")
        )
    else:
        model, masters = {}, {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                model |= {name: opened.get_tensor(name) for name in opened.keys() if wanted(name)}  # noqa: SIM118
    recorded, replayed = dtypes
    return (
        {name: array(tensor.to(recorded)) for name, tensor in model.items()},
        {name: array(tensor.to(replayed)) for name, tensor in {**model, **masters}.items()},
    )
