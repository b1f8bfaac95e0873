"""The text of docs/models.md: the results of the sweep by common name, by outcome and by reason."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path

import transformers
from sweep_families import LATER, NAMES, RELEASED, SINCE
from sweep_judge import Outcome

from lockstep.vision.families import FAMILIES

# The outcome of every case, from which the page is printed without a new sweep.
STORED = Path(__file__).parent / "outcomes.json"

INTRO = """\
<!-- Printed by tools/models_table.py from tests/sweep. Run `make models`. -->

# Models

Of the {families} model types of transformers {version} that generate text, were released in {since} or later and can be
built by transformers, lockstep trains {trained} ({trained_share} %) and generates with {generated} in its built-in
engine ({generated_share} %). For each of them the numbers equal those of transformers.

## By name

{names}

- training: log-probs and the gradient of every parameter, packed and padded, equal those of transformers for each
  sequence alone.
- engine: greedy tokens of the built-in engine equal those of transformers.
- images: the model trains on and generates from [images](vision.md).
- tensor: two processes with tensor parallelism give the log-probs and gradients of one.
- context: the values of `parallel.context_layout` with which two ranks give the log-probs and gradients of one.
- LoRA: adapters on all linear layers (or on all but the named ones) train like each sequence alone.
- kernels: the attention, and the operators that Triton kernels replace on CUDA. "dense attention" computes the scores
  of all tokens. "recurrence" is the code of transformers, in which "gated delta rule", "Mamba-2" and "convolution" are
  Triton kernels; other recurrences are plain torch. "experts" are kernels for generation.

## How models are checked

Before training, lockstep tests the architecture of a model folder on a small random copy: every switch of its
`config.json` is kept, sizes and limits are scaled down. It compares with transformers, in fp32 and in the training
dtype: log-probs and the gradient of every parameter, packed and padded, on sequences longer than each window, chunk and
original length, and the engine's greedy tokens. A model that differs is rejected with the reason. The result is cached
(`~/.cache/lockstep`, or `LOCKSTEP_CACHE`) for this configuration, these packages, this code and this kind of device.

The sweep builds a small model of every text-generating class of transformers {version}, also with windows, layers
and rotary scalings that are off by default (`llama+yarn`). It compares each accepted model with transformers once more,
with other weights and lengths: {cases} cases, {supported} supported, {training} for training only, {refused} refused,
{unbuilt} that lockstep cannot build small, {unbuildable} that transformers cannot build. The sweep fails if an accepted
model is wrong.

Models with images, video or audio (nested configs: `text_config`, `vision_config`) train on text. These also train
on [images](vision.md): {pictured}.
For text, lockstep builds the class that `architectures` names without its towers (encoders and projectors), so these
need no memory. LoRA adapts only the language model. The export copies the tensors of the towers byte by byte, and the
processor files, so that `AutoModelForImageTextToText` loads it. Text rows with placeholders of images or audio are
rejected. A reward model is exported without towers, as the classifier of the text config; if transformers has no such
class, `rm` is rejected.

Hybrid models (gated delta rule, Mamba, lightning attention, short convolutions): in a packed row every sequence starts
with an empty state, and the built-in engine keeps one state per sequence next to the KV cache. The modules' own code
runs on grids of sequences of similar length. On CUDA in bf16, Triton kernels compute the gated delta rule, Mamba-2 and
convolutions. If flash-linear-attention, mamba-ssm or causal-conv1d are installed, transformers uses their kernels
instead. A kernel is used only if a trial gives the outputs and gradients of plain torch. Context parallelism is
rejected, and tensor parallelism leaves the recurrent layers undivided.

Models that select or compress tokens (DeepSeek-V3.2, DeepSeek-V4, GLM-5, MiniMax-M3, Doge) run on right-padded rows
with dense masks, also if rows are packed: their memory grows with the number of sequences times the longest of them.
A Doge folder whose `keep_window_size` is below its context length is rejected, because its selection is ambiguous.

Mixture-of-experts models: `model.aux_loss_coef` weighs the load-balancing loss, which is computed over the full update
for any packing. Router noise in training is rejected, because it depends on the packing.
"""
# Columns of the table by name that are checked only for models with a name.
COLUMNS = ("tensor", "context", "lora", "kernels")
SECTIONS = {
    "training": (
        "For training only",
        "All offline methods can train these. Online methods need `rollout.engine: hf`, whose log-probs are compared\n"
        "with those of the trainer at the start of the run.",
    ),
    "refused": ("Refused", ""),
    "not built": (
        "Not built small",
        "lockstep could not scale these classes down, so their folders are rejected, unless the folder's configuration "
        "can be scaled down.",
    ),
    "unbuildable": (
        "Not built by transformers",
        "transformers cannot build these classes from their default configurations with the packages installed here.",
    ),
}


def stored() -> dict[str, Outcome]:
    """Returns the stored outcome of every case, by the case's name."""
    found = json.loads(STORED.read_text(encoding="utf-8"))["cases"]
    return {name: Outcome(**one) for name, one in found.items()}


def store(new: Mapping[str, Outcome], known: Collection[str]) -> dict[str, Outcome]:
    """Adds outcomes to the stored ones, of which those of unknown cases are dropped. Several sweeps may do so at
    once. Returns all outcomes."""
    with STORED.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = stored() if STORED.stat().st_size else {}
        outcomes = {name: one for name, one in sorted({**before, **new}.items()) if name in known}
        data = {"transformers": transformers.__version__, "cases": {n: asdict(one) for n, one in outcomes.items()}}
        file.truncate(0)
        file.write(json.dumps(data, indent=1) + "\n")
    return outcomes


def families(outcomes: Mapping[str, Outcome]) -> list[Outcome]:
    """Returns the outcomes of the model types that were released in `SINCE` or later and that transformers can
    build."""
    new = [outcomes[name] for name, year in RELEASED.items() if year >= SINCE]
    return [one for one in new if one.status != "unbuildable"]


def page(outcomes: Mapping[str, Outcome]) -> str:
    counts = {status: sum(one.status == status for one in outcomes.values()) for status in ("supported", *SECTIONS)}
    new = families(outcomes)
    generated = sum(one.status == "supported" for one in new)
    trained = generated + sum(one.status == "training" for one in new)
    lines = [
        INTRO.format(
            version=transformers.__version__,
            since=SINCE,
            families=len(new),
            trained=trained,
            trained_share=100 * trained // len(new),
            generated=generated,
            generated_share=100 * generated // len(new),
            names=_named(outcomes),
            cases=len(outcomes),
            pictured=_names(FAMILIES),
            supported=counts["supported"],
            training=counts["training"],
            refused=counts["refused"],
            unbuilt=counts["not built"],
            unbuildable=counts["unbuildable"],
        ),
        "## Supported",
        "",
        _names(case for case, one in outcomes.items() if one.status == "supported"),
    ]
    for status, (title, about) in SECTIONS.items():
        if not counts[status]:
            continue
        lines += ["", f"## {title}", ""]
        if about:
            lines += [about, ""]
        lines += ["| why | models |", "|---|---|"]
        reasons: dict[str, list[str]] = {}
        for case, one in outcomes.items():
            if one.status == status:
                reasons.setdefault(reason(one.why), []).append(case)
        lines += [f"| {why} | {_names(cases)} |" for why, cases in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


def _named(outcomes: Mapping[str, Outcome]) -> str:
    lines = [
        "| model | released | `model_type` | training | engine | images | tensor | context | LoRA | kernels |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, name in NAMES.items():
        model_type, one = case.partition("+")[0], outcomes[case]
        trains, generates = one.status in ("supported", "training"), one.status == "supported"
        checked = ["yes" if passed else "no" for passed in (trains, generates)] + ["yes" * (case in FAMILIES)]
        checked += [one.columns.get(column, "no") for column in COLUMNS]
        year = LATER.get(model_type, RELEASED[model_type])
        lines.append(f"| {name} | {year} | `{model_type}` | {' | '.join(checked)} |")
    return "\n".join(lines)


def reason(why: str) -> str:
    """The reason without parts that differ between models and machines: names, sizes and rounding."""
    why = re.sub(r"^\w+: ", "", why)
    why = re.sub(r"by up to [\d.e+-]+", "by far", why)
    why = re.sub(r"\([^()]*heads of[^()]*\)", "(sizes differ)", why)
    why = re.sub(r"^\w+(Attention\w*) is not", r"its attention is not", why)
    return why.replace("|", "\\|").replace("<", "&lt;")


def _names(cases: object) -> str:
    return ", ".join(f"`{case}`" for case in sorted(cases))  # type: ignore[call-overload]
