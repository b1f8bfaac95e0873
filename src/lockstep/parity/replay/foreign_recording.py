"""Compares recordings of other frameworks' training loops (`lockstep_record.py`), or replays such a recording.

A recording contains the inputs of the model's calls and the gradient of the loss with respect to every log-probability.
A recording does not contain the trainer's loss function and data. So a replay makes the same calls with the same
weights, runs backward from the recorded gradients, and steps with the recorded optimizer. The recorder also records the
replay, and `judge` compares both recordings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lockstep.device.select import select
from lockstep.errors import Refusal
from lockstep.parity.compare.logs.run_logs import recording_ranks
from lockstep.parity.replay.optimizer_checks import UNTOUCHED, check_formula, relative_errors
from lockstep.parity.replay.replay_checks import Check, first_cause, worst_named
from lockstep.parity.replay.replay_loop import REPLAYS, reserved_name
from lockstep.parity.replay.replay_result import RESULT, Replayed, as_json, judge
from lockstep.parity.replay.tolerances import tolerance_of
from lockstep.run.files import atomic_write_text
from lockstep.run.folder import RunFolder
from lockstep.tape.digest import relative
from lockstep.tape.module_trace import BACKWARD, FORWARD
from lockstep.tape.tape_format import StepRecord, TapeFolder, below
from lockstep_record import LEARNER, MicroBatch, digest, logprobs, record

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
KEYS = ("device", "model.dtype", "model.attention")
# The tolerance for weights whose dtypes differ, because the weights then differ by the rounding of the coarser dtype.
ROUNDED = 1e-2
# Arguments of the model's forward call that a replay does not pass on, because they do not change the compared outputs,
# or because the replay sets them itself.
NOT_REPEATED = {"labels", "use_cache", "return_dict", "training", "num_items_in_batch"}


def compare_recordings(a: Path, b: Path) -> Replayed:
    """Compares the recordings of every rank that A and B both contain. If a rank diverges, the result of the first such
    rank is returned."""
    ours, theirs = recording_ranks(a), recording_ranks(b)
    shared = [rank for rank in ours if rank in theirs]
    if not shared:
        raise Refusal.at(
            b,
            f"has no rank in common with {a}",
            "compare recordings of the same number of processes",
            code="nothing-in-common",
        )
    found = [_compare(TapeFolder(ours[rank]), TapeFolder(theirs[rank])) for rank in shared]
    first = next((number for number, result in enumerate(found) if not result.in_step), 0)
    remarks: tuple[str, ...] = (f"Rank {shared[first]} of {len(shared)}.",) if len(shared) > 1 else ()
    if len(ours) != len(theirs):
        remarks += (f"A was recorded on {len(ours)} ranks, B on {len(theirs)}: their micro-batches differ.",)
    return replace(found[first], remarks=(*remarks, *found[first].remarks))


def _compare(a: TapeFolder, b: TapeFolder) -> Replayed:
    manifests = a.manifest(), b.manifest()
    steps = [step for step in a.steps() if step in set(b.steps())]
    if not steps:
        raise Refusal.at(
            b.path,
            f"has no update in common with {a.path}",
            "record both runs with the same first_step",
            code="nothing-in-common",
        )
    result = judge(a, b, "chained", b.path, first=steps[0])
    start = _start(a.read_step(steps[0]), b.read_step(steps[0]), alike=_weights_dtypes(manifests))
    formula = [check for step in steps for check in _own_formula(manifests[0], a.read_step(step))]
    result = replace(result, checks=[*start, *result.checks, *formula])
    failed = first_cause([check for check in (*start, *formula) if not check.passed])
    if failed is not None and (failed.update < 0 or result.cause is None or result.cause.stage == "weights"):
        result = replace(result, cause=failed, step=failed.step, module=None if failed.update < 0 else result.module)
    if not result.in_step:
        for side, manifest in zip((a, b), manifests, strict=True):
            _refuse_dropout(str(side.path), manifest)
    return replace(result, remarks=(*_remarks("A", manifests[0]), *_remarks("B", manifests[1]), *result.remarks))


def _refuse_dropout(folder: str, manifest: Mapping[str, Any]) -> None:
    """Refuses a recording with dropout: no other run has the same dropout masks, so every comparison would fail."""
    if "dropout" in manifest["recorder"]["notes"]:
        raise Refusal.at(
            folder,
            "was recorded with active dropout",
            "record again with all dropout rates set to 0",
            code="not-replayable",
        )


def _weights_dtypes(manifests: Sequence[Mapping[str, Any]]) -> bool:
    return len({manifest["recipe"]["model"]["weights"] for manifest in manifests}) == 1


def _start(one: StepRecord, other: StepRecord, *, alike: bool) -> list[Check]:
    """Checks that both recordings start with the same weights. If these weights differ, later comparisons mean
    nothing."""
    errors = relative_errors(one.tensors, other.tensors, f"{LEARNER}/0/start/")
    if not errors:
        return []
    allowed = UNTOUCHED if alike else ROUNDED
    worst, error, differing = worst_named(errors, allowed)
    where = f"{differing} of {len(errors)} parameters differ before the first update" if differing else ""
    return [Check("weights", one.step, f"weights before the first update: {worst}", error, allowed, where, -1)]


def _own_formula(manifest: Mapping[str, Any], record: StepRecord) -> list[Check]:
    """Checks the optimizer steps of recording A with AdamW's formula. `judge` checks the optimizer steps of recording
    B."""
    info = record.info["updates"][0]
    if "lr" not in info or "grad_norm" not in info:
        return []
    tolerance = tolerance_of(manifest["recipe"]["model"]["dtype"])
    found = check_formula(manifest, record, LEARNER, info, tolerance)
    return [replace(check, what=f"A, {check.what}") for check in found]


def _remarks(side: str, manifest: Mapping[str, Any]) -> list[str]:
    """Returns remarks about what a recording lacks, from the recorder's notes."""
    recorder = manifest["recorder"]
    found = [f"{side}: {key}: {text}." for key, text in recorder["notes"].items()]
    if recorder["sharded"]:
        found.append(
            f"{side}: {len(recorder['sharded'])} parameters are sharded: the recording has only its own rank's shards."
        )
    if recorder["stopped"]:
        found.append(f"{side}: recording stopped at {recorder['stopped']}")
    return found


@dataclass(frozen=True)
class _Limits:
    """The stages that a replay of this recording cannot check, and why."""

    skip: frozenset[str]
    phases: tuple[str, ...]
    why: tuple[str, ...]


def replay_recording(folder: Path, model: str | None, overrides: Sequence[str], only: Sequence[int] = ()) -> Replayed:
    """Repeats the recorded model calls on this machine with the recorded weights, and compares the results."""
    tape = TapeFolder(folder)
    manifest = tape.manifest()
    _refuse_dropout(str(folder), manifest)
    keys = _keys(overrides)
    steps = _steps(tape, manifest, only)
    source = model or manifest["recipe"]["model"]["path"]
    if not source or not Path(source).is_dir():
        raise Refusal.at(
            "--model",
            f"{source or 'nothing'} is not a model folder",
            "give the folder of the trained model",
            code="no-such-file",
        )
    device = select(keys.get("device", "auto")).torch_device()
    dtype = keys.get("model.dtype") or manifest["recipe"]["model"]["weights"]
    if dtype not in DTYPES:
        raise Refusal.at(
            "model.dtype", f"there is no {dtype!r}", f"use one of {', '.join(DTYPES)}", code="unknown-name"
        )
    autocast = manifest["recipe"]["model"]["dtype"] if "model.dtype" not in keys else dtype
    with reserved_name(RunFolder(folder), "recorded") as name:
        output = folder / REPLAYS / name
        network = _load(source, manifest["recipe"]["model"]["kind"], DTYPES[dtype], keys.get("model.attention"))
        limits = _limits(tape, manifest, steps)
        for step in steps:
            _restore(network.to(device), tape, step, manifest, alike=dtype == manifest["recipe"]["model"]["weights"])
            around = torch.autocast(device.type, DTYPES[autocast]) if autocast != dtype else nullcontext()
            _replay_step(network, tape, step, manifest, output / f"step_{step}", around)
        found = [
            judge(tape, TapeFolder(output / f"step_{step}"), "forced", output, skip=limits.skip, phases=limits.phases)
            for step in steps
        ]
        first = next((result for result in found if not result.in_step), found[0])
        remarks = (*_remarks("Recorded", manifest), *limits.why)
        result = replace(
            first, steps=list(steps), checks=[check for one in found for check in one.checks], remarks=remarks
        )
        atomic_write_text(output / RESULT, json.dumps(as_json(result), indent=2) + "\n")
        return result


def _keys(overrides: Sequence[str]) -> dict[str, str]:
    found = dict(word.partition("=")[::2] for word in overrides)
    for key in found:
        if key not in KEYS:
            raise Refusal.at(
                key, "a recording of another framework has no recipe", f"use {', '.join(KEYS)}", code="unknown-key"
            )
    return found


def _steps(tape: TapeFolder, manifest: Mapping[str, Any], only: Sequence[int]) -> list[int]:
    """Returns the steps that can be replayed: those with recorded weights. If no step has recorded weights, only the
    first step can be replayed, which starts from the weights in the model folder."""
    complete = set(tape.steps())
    able = [step for step in tape.weighed() if step in complete] or [manifest["recorder"]["first_step"]]
    steps = [step for step in able if step in complete and (not only or step in only)]
    if not steps:
        raise Refusal.at(
            tape.path, "has no update that can be replayed", f"updates with weights: {able}", code="missing-on-tape"
        )
    return steps


def _limits(tape: TapeFolder, manifest: Mapping[str, Any], steps: Sequence[int]) -> _Limits:
    why = [
        "The loss is not checked, because only the recorded trainer computes it. The replay uses the recorded "
        "gradients of the loss with respect to the log-probs."
    ]
    skip = {"loss"}
    phases: tuple[str, ...] = (FORWARD, BACKWARD)
    updates = [tape.read_step(step).info["updates"][0] for step in steps]
    if not all(update.get("slopes_exact") for update in updates):
        skip |= {"gradient", "optimizer", "weights"}
        phases = (FORWARD,)
        why.append(
            "Gradients are not checked, because the loss uses the logits in other ways than through the "
            "log-probabilities: an entropy bonus, an auxiliary loss, or a temperature that differs from "
            "`record(temperature=...)`."
        )
    elif manifest["world_size"] > 1 or manifest["recorder"]["sharded"]:
        skip |= {"gradient", "optimizer", "weights"}
        why.append(
            "Parameter gradients are not checked, because they are sums over ranks, and this recording contains one "
            "rank."
        )
    elif not manifest["recipe"]["optim"]["by_formula"]:
        skip |= {"optimizer", "weights"}
        kind = manifest["recipe"]["optim"]["kind"]
        why.append(f"The update is not checked, because a replay supports only AdamW, not {kind} with these settings.")
    return _Limits(frozenset(skip), phases, tuple(why))


def _load(source: str, kind: str, dtype: torch.dtype, attention: str | None) -> torch.nn.Module:
    """Loads the model with the transformers class of the recording, so that its modules have the recorded names."""
    import transformers

    cls = getattr(transformers, kind, None)
    if cls is None or not hasattr(cls, "from_pretrained"):
        raise Refusal.at(
            "recording",
            f"the recorded model class {kind} does not exist in transformers {transformers.__version__}",
            "record a run on each machine, and compare them with `lockstep compare A B`",
            code="unsupported-model",
        )
    chosen = {} if attention is None else {"attn_implementation": attention}
    network: torch.nn.Module = cls.from_pretrained(source, dtype=dtype, trust_remote_code=False, **chosen)
    return network


def _restore(
    network: torch.nn.Module, tape: TapeFolder, step: int, manifest: Mapping[str, Any], *, alike: bool
) -> None:
    """Restores the recorded weights. If the weights were not recorded, the model folder must contain the weights of the
    recorded run."""
    parameters = dict(network.named_parameters())
    kept = tape.read_weights(step) if step in tape.weighed() else {}
    strange = [name for name in manifest["parameters"][LEARNER] if name not in parameters]
    if strange:
        raise Refusal.at(
            "--model",
            f"has no parameter {strange[0]}, which was trained",
            "give the folder of the trained model",
            code="other-weights",
        )
    if kept and not manifest["recorder"]["sharded"]:
        with torch.no_grad():
            for name, value in below(kept, f"{LEARNER}/model/").items():
                parameters[name].copy_(value)
        return
    starts = below(tape.read_step(step).tensors, f"{LEARNER}/0/start/")
    allowed = UNTOUCHED if alike else ROUNDED
    for name, value in starts.items() if not manifest["recorder"]["sharded"] else ():
        if not relative(value, digest(parameters[name])) <= allowed:
            raise Refusal.at(
                "--model",
                f"its {name} differs from the recorded weights of update {step}",
                "give the folder that the recorded run started from, or record with weights=True",
                code="other-weights",
            )


def _replay_step(
    network: torch.nn.Module,
    tape: TapeFolder,
    step: int,
    manifest: Mapping[str, Any],
    folder: Path,
    around: AbstractContextManager[Any],
) -> None:
    taken = tape.read_step(step)
    update, optimizer = taken.info["updates"][0], _optimizer(network, tape, step, manifest)
    device = next(network.parameters()).device
    temperature, pulls = manifest["recorder"]["temperature"], taken.tensors.get(f"{LEARNER}/0/pulls")
    settings = {"first_step": step, "steps": 1, "weights": False, "temperature": temperature}
    start = 0
    with record(network, optimizer, folder, **settings):
        for number, arguments in enumerate(taken.info["calls"]):
            inputs = _inputs(taken, number)
            network.train(arguments.get("training", True))
            with around:
                logits = network(
                    **{name: value.to(device) for name, value in inputs.items() if name not in NOT_REPEATED},
                    **{name: value for name, value in arguments.items() if name not in NOT_REPEATED},
                ).logits
            call = MicroBatch(inputs, arguments)
            if pulls is None or not call.locate(logits):
                logits.sum().mul(0.0).backward()
                continue
            mine = pulls[start : start + len(call.index)].to(device)
            start += len(call.index)
            flat, index = logits.reshape(-1, logits.shape[-1]), call.index.to(device)
            if logits.shape[-1] == 1:
                outputs = flat[index, 0]
            else:
                outputs = logprobs(flat, index, call.tokens.to(device), temperature)
            (outputs.float() * mine).sum().backward()
        if update.get("clip") is not None:
            torch.nn.utils.clip_grad_norm_(list(network.parameters()), update["clip"])
        optimizer.step()
    optimizer.zero_grad()


def _inputs(taken: StepRecord, number: int) -> dict[str, torch.Tensor]:
    found = below(taken.tensors, f"micro/{number}/")
    return {name: value.long() if value.dtype == torch.int32 else value for name, value in found.items()}


def _optimizer(
    network: torch.nn.Module, tape: TapeFolder, step: int, manifest: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Returns an AdamW optimizer with the recorded parameter groups and state."""
    optim, update = manifest["recipe"]["optim"], tape.read_step(step).info["updates"][0]
    trained = {n: p for n, p in network.named_parameters() if n in manifest["parameters"][LEARNER]}
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in trained)
    groups = [{"params": [p], "weight_decay": optim["decays"].get(n, 0.0)} for n, p in trained.items()]
    betas = (optim["betas"][0], optim["betas"][1])
    optimizer = torch.optim.AdamW(groups, lr=update.get("lr", 0.0), betas=betas, eps=optim["eps"])
    kept = tape.read_weights(step) if step in tape.weighed() else {}
    for name, value in below(kept, f"{LEARNER}/optimizer/").items():
        key, _, parameter_name = name.partition("/")
        weight = trained[parameter_name]
        optimizer.state[weight][key] = value if key == "step" else value.to(weight.device, weight.dtype)
    return optimizer
