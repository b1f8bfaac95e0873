"""Recipe keys of the optimizer: the update rule, its settings, the learning-rate schedule and parameter groups."""

from __future__ import annotations

import re
from typing import Literal

from lockstep.recipe.section import RATE, Field, Section

OptimizerName = Literal["adamw", "adamw8bit", "adafactor", "muon", "lion"]
_BETAS: tuple[str, tuple[object, ...]] = ("optim.name", ("adamw", "adamw8bit", "muon", "lion"))
_EPS: tuple[str, tuple[object, ...]] = ("optim.name", ("adamw", "adamw8bit", "muon"))
_MUON: tuple[str, tuple[object, ...]] = ("optim.name", ("muon",))
_ADAFACTOR: tuple[str, tuple[object, ...]] = ("optim.name", ("adafactor",))


class ParameterGroup(Section):
    """The settings of the parameters whose names contain a match of a regular expression."""

    match: str = Field(
        description="Regular expression. The group has the parameters whose names contain a match, except those of an "
        "earlier group. At least one trained parameter must match."
    )
    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the group. The learning rate of a named group is in the metrics.",
    )
    lr: float | None = Field(
        None,
        gt=0,
        description="Peak learning rate of the group. The schedule is that of `optim.schedule`.",
        effect=RATE,
        resumable=True,
    )
    lr_ratio: float | None = Field(
        None,
        gt=0,
        description="Learning rate of the group as a multiple of `optim.lr`. Use instead of `lr`.",
        effect=RATE,
        resumable=True,
    )
    weight_decay: float | None = Field(
        None, ge=0, description="Weight decay of the group. Applies to biases and norms of the group, too."
    )


class Optim(Section):
    name: OptimizerName = Field(
        "adamw",
        description="Update rule. `adamw8bit` stores AdamW's moments in 8 bits with one scale per 256 elements of a "
        "row. `adafactor` stores row and column means of the squared gradients. `muon` orthogonalises the updates of "
        "weight matrices, and updates all other parameters with AdamW. `lion` needs only one moment.",
    )
    lr: float = Field(1e-5, gt=0, description="Peak learning rate.", effect=RATE, resumable=True)
    betas: list[float] = Field(
        [0.9, 0.95],
        min_length=2,
        max_length=2,
        description="Betas of AdamW and Lion.",
        read_where=_BETAS,
    )
    eps: float = Field(1e-8, gt=0, description="Epsilon of AdamW.", read_where=_EPS)
    weight_decay: float = Field(
        0.01, ge=0, description="Weight decay of the weight matrices. Biases and norms of any shape are excluded."
    )
    decay_all: bool = Field(False, description="Apply weight decay to biases and norms too.")
    clip: float | None = Field(1.0, gt=0, description="Maximum gradient norm; `null` disables clipping.")
    momentum: float = Field(0.95, ge=0, lt=1, description="`muon`: momentum of the matrices.", read_where=_MUON)
    nesterov: bool = Field(True, description="`muon`: use Nesterov momentum.", read_where=_MUON)
    ns_steps: int = Field(
        5, ge=1, lt=100, description="`muon`: Newton-Schulz iterations of the orthogonalisation.", read_where=_MUON
    )
    adjust_lr: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="`muon`: factor on the learning rate of a matrix with A rows and B columns. `match_rms_adamw` is "
        "0.2 sqrt(max(A, B)): updates of matrices are about as large as updates of AdamW. `original` is "
        "sqrt(max(1, A / B)).",
        read_where=_MUON,
    )
    decay_rate: float = Field(
        0.8,
        gt=0,
        description="`adafactor`: the decay of the second moment at update t is 1 - t^-decay_rate.",
        read_where=_ADAFACTOR,
    )
    clip_threshold: float = Field(
        1.0, ge=1, description="`adafactor`: largest root mean square of an update.", read_where=_ADAFACTOR
    )
    scale_parameter: bool = Field(
        True,
        description="`adafactor`: multiply the learning rate by the root mean square of the parameter, which counts "
        "as at least 0.001, and limit the learning rate to 1 / sqrt(t) at update t. With `false`, the learning rate "
        "is used as it is.",
        read_where=_ADAFACTOR,
    )
    stochastic_rounding: bool = Field(
        False,
        description="Round updated bf16 weights up or down at random, so that small updates are kept on average. Needs "
        "`model.dtype: bf16` and `model.master_weights: false`. The random numbers depend only on `run.seed`, the "
        "parameter's name and its number of updates.",
    )
    groups: list[ParameterGroup] = Field(
        default_factory=list,
        description="Learning rates and weight decays of single parameters, selected by name. A parameter belongs to "
        "the first group that matches its name. The critic has no groups.",
    )
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="Learning rate schedule after the warm-up.", effect=RATE, resumable=True
    )
    warmup: int | float = Field(
        0.0,
        ge=0,
        description="Length of the warm-up: a number of steps, or a value below 1 as a fraction of all steps.",
        effect=RATE,
        resumable=True,
    )
    warmup_start: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Learning rate of the first warm-up step, as a fraction of `lr`. By default one divided by the "
        "number of warm-up steps. With 0, as in transformers, verl and OpenRLHF, the first step changes no weight.",
        effect=RATE,
        resumable=True,
    )
    warmup_rounding: Literal["nearest", "down", "up"] = Field(
        "nearest",
        description="Rounding of the number of warm-up steps if `warmup` is a fraction: verl rounds down, OpenRLHF up.",
        effect=RATE,
        resumable=True,
    )
    schedule_unit: Literal["step", "update"] = Field(
        "step",
        description="What the warm-up and the schedule of an online method count. With `step`, all updates of a step "
        "have the same learning rate, as in verl; with `update`, each has its own, as in OpenRLHF.",
        effect=RATE,
        resumable=True,
    )
    min_lr_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Lowest learning rate, as a fraction of `lr`.",
        effect=RATE,
        resumable=True,
        read_where=("optim.schedule", ("cosine", "linear", "wsd")),
    )
    decay: float = Field(
        0.2,
        gt=0,
        le=1,
        description="`wsd`: fraction of all steps in which the learning rate falls linearly to its minimum.",
        effect=RATE,
        resumable=True,
        read_where=("optim.schedule", ("wsd",)),
    )

    def group_of(self, parameter: str) -> ParameterGroup | None:
        """Returns the group of a parameter, or None if no group matches its name."""
        return next((group for group in self.groups if re.search(group.match, parameter)), None)

    def rate_ratio(self, group: ParameterGroup | None) -> float:
        """Returns the learning rate of a group divided by `optim.lr`."""
        if group is None:
            return 1.0
        if group.lr is not None:
            return group.lr / self.lr
        return 1.0 if group.lr_ratio is None else group.lr_ratio
