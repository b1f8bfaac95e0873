"""The text of docs/models.md: the results of the sweep, by outcome and reason."""

from __future__ import annotations

import re
from collections.abc import Mapping

import transformers
from sweep_cases import Case
from sweep_judge import Outcome

INTRO = """\
<!-- Printed by tools/models_table.py from tests/sweep. Run `make models`. -->

# Models

Before training, lockstep tests the architecture of a model folder on a small random copy: every switch of its
`config.json` is kept, sizes and limits are scaled down. It compares with transformers, in fp32 and in the training
dtype: log-probs and the gradient of every parameter, packed and padded, on sequences longer than each window, chunk and
original length, and the engine's greedy tokens. A model that differs is rejected with the reason. The result is cached
(`~/.cache/lockstep`, or `LOCKSTEP_CACHE`) for this configuration, these packages, this code and this kind of device.

The sweep builds a small model of every text-generating class of transformers {version}, also with windows, layers
and rotary scalings that are off by default (`llama+yarn`). It compares each accepted model with transformers once more,
with other weights and lengths: {cases} cases, {supported} supported, {training} for training only, {refused} refused,
{unbuilt} of classes that cannot be built small. The sweep fails if an accepted model is wrong.

Models with images, video or audio (nested configs: `text_config`, `vision_config`) train on text. lockstep builds the
class that `architectures` names without its towers (encoders and projectors), so these need no memory. LoRA adapts only
the language model. The export copies the tensors of the towers byte by byte, and the processor files, so that
`AutoModelForImageTextToText` loads it. Rows with placeholders of images or audio are rejected. A reward model is
exported without towers, as the classifier of the text config; if transformers has no such class, `rm` is rejected.

Hybrid models (gated delta rule, Mamba, lightning attention, short convolutions): in a packed row every sequence starts
with an empty state, and the built-in engine keeps one state per sequence next to the KV cache. The modules' own code
runs on grids of sequences of similar length, so transformers uses flash-linear-attention, causal-conv1d and mamba-ssm
if they are installed; without them it uses plain torch, which is slower. Context parallelism is rejected, and tensor
parallelism leaves the recurrent layers undivided.

Mixture-of-experts models: `model.aux_loss_coef` weighs the load-balancing loss, which is computed over the full update
for any packing. Router noise in training is rejected, because it depends on the packing.
"""
SECTIONS = {
    "training": (
        "For training only",
        "All offline methods can train these. `rollout.engine: hf` generates with them if its log-probs equal those\n"
        "of the trainer. Otherwise the run is rejected at its start, as for RecurrentGemma.",
    ),
    "refused": ("Refused", ""),
    "not built": (
        "Not tried",
        "No small model of these classes could be built here. Their folders are rejected too, unless the folder's "
        "configuration can be scaled down.",
    ),
}


def page(outcomes: Mapping[Case, Outcome]) -> str:
    counts = {status: sum(one.status == status for one in outcomes.values()) for status in ("supported", *SECTIONS)}
    lines = [
        INTRO.format(
            version=transformers.__version__,
            cases=len(outcomes),
            supported=counts["supported"],
            training=counts["training"],
            refused=counts["refused"],
            unbuilt=counts["not built"],
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
        reasons: dict[str, list[Case]] = {}
        for case, one in outcomes.items():
            if one.status == status:
                reasons.setdefault(reason(one.why), []).append(case)
        lines += [f"| {why} | {_names(cases)} |" for why, cases in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


def reason(why: str) -> str:
    """The reason without parts that differ between models and machines: names, sizes and rounding."""
    why = re.sub(r"^\w+: ", "", why)
    why = re.sub(r"by up to [\d.e+-]+", "by far", why)
    why = re.sub(r"\([^()]*heads of[^()]*\)", "(sizes differ)", why)
    why = re.sub(r"^\w+(Attention\w*) is not", r"its attention is not", why)
    return why.replace("|", "\\|").replace("<", "&lt;")


def _names(cases: object) -> str:
    return ", ".join(f"`{case}`" for case in sorted(str(case) for case in cases))  # type: ignore[attr-defined]


def statuses(text: str) -> dict[str, str]:
    """The outcome of every case that the page names."""
    titles = {"Supported": "supported", **{title: status for status, (title, _) in SECTIONS.items()}}
    found = {}
    for section in text.split("\n## ")[1:]:
        title, body = section.split("\n", 1)
        for line in body.splitlines():
            names = line.split("|")[2] if line.startswith("|") else line
            found |= {name: titles[title] for name in re.findall(r"`([\w+.-]+)`", names) if ":" not in names}
    return found
