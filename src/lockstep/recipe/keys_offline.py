"""Recipe keys of single offline methods: preferences, reward models, process rewards, distillation."""

from __future__ import annotations

from typing import Literal

from lockstep.recipe.section import FOLDER, Effect, Field, Section


class Preference(Section):
    loss: Literal[
        "sigmoid",
        "ipo",
        "hinge",
        "robust",
        "exo_pair",
        "nca_pair",
        "bco_pair",
        "sppo_hard",
        "aot",
        "aot_unpaired",
        "apo_zero",
        "apo_down",
        "discopop",
        "simpo",
        "orpo",
        "cpo",
    ] = Field(
        "sigmoid",
        description="Loss of a pair. `simpo`, `orpo` and `cpo` use no reference. `aot` and `aot_unpaired` sort the "
        "responses of an update, which takes one more forward pass.",
    )
    beta: float = Field(0.1, gt=0, description="Scale of the log-ratio (`orpo`: weight of the odds ratio).")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="Assumed fraction of pairs whose labels are swapped.")
    gamma: float = Field(0.0, ge=0, description="`simpo`: target margin of the scaled difference.")
    discopop_tau: float = Field(
        0.05,
        gt=0,
        description="`discopop`: size of the difference at which the loss changes from logistic to exponential.",
    )
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = Field(
        "reverse_kl",
        description="Divergence from the reference that replaces the log-ratio (f-DPO). For `sigmoid`, `ipo`, "
        "`hinge`, `robust`, `exo_pair` and `discopop`.",
    )
    alpha: float = Field(
        0.5,
        gt=0,
        le=1,
        description="`divergence: alpha`: 1 is forward KL, near 0 is reverse KL.",
        read_where=("preference.divergence", ("alpha",)),
    )
    ld_alpha: float = Field(
        1.0,
        ge=0,
        le=1,
        description="LD-DPO: weight of the tokens by which the longer response of a pair exceeds the shorter one; "
        "1 is DPO.",
    )
    average: bool = Field(
        False,
        description="Use the mean of the log-probabilities over a response's tokens instead of the sum "
        "(length-normalised).",
    )
    nll: float = Field(0.0, ge=0, description="Weight of the mean negative log-likelihood of the chosen response.")
    reference: str | None = Field(
        None,
        description="Folder of the reference model. Default: `model.path` (with LoRA: the model with the adapter "
        "disabled).",
        effect=FOLDER,
    )
    precompute: bool = Field(
        False,
        description="Compute the log-probabilities of the reference once, before training, and store them on disk. "
        "The reference then takes no memory.",
        effect=Effect("harmless", "the same reference log-probabilities, computed earlier"),
    )
    reference_free: bool = Field(
        False, description="`kto`: use no reference; mean log-probabilities replace the log-ratios."
    )
    desirable: float = Field(1.0, gt=0, description="`kto`: weight of desirable rows.")
    undesirable: float = Field(1.0, gt=0, description="`kto`: weight of undesirable rows.")


class RewardModelSettings(Section):
    loss: Literal["sigmoid", "logexp"] = Field(
        "sigmoid",
        description="`sigmoid`: -log sigmoid(chosen - rejected - margin); `logexp`: log(1 + exp(rejected - chosen)).",
    )
    ranking: Literal["pairs", "plackett_luce"] = Field(
        "pairs",
        description="Loss of more than two responses: the mean over all pairs, or the Plackett-Luce likelihood.",
    )
    center_rewards_coef: float = Field(
        0.0, ge=0, description="Weight of the squared sum of a pair's scores. It keeps the scores centred at zero."
    )


class ProcessReward(Section):
    placeholder: str = Field(
        "ки", min_length=1, description="Text after each step that marks where the step is scored; one token."
    )
    tokens: list[str] = Field(
        ["+", "-"], min_length=2, description="Label words of a step, one token each. The first one labels a good step."
    )


class Distill(Section):
    teacher: str | None = Field(None, description="Folder of the teacher model.", effect=FOLDER)
    divergence: Literal["forward", "reverse", "jsd"] = Field(
        "forward",
        description="`forward`: KL(teacher, student); `reverse`: KL(student, teacher); `jsd`: Jensen-Shannon "
        "divergence.",
    )
    mix: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="`jsd`: weight of the teacher in the mixture.",
        read_where=("distill.divergence", ("jsd",)),
    )
    temperature: float = Field(1.0, gt=0, description="Divides the logits of teacher and student.")
    coefficient: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Weight of the divergence. The rest is the weight of the log-likelihood of the rows (SFT).",
    )
    top_k: int | None = Field(
        None,
        ge=1,
        description="Store this many most likely tokens of the teacher per position on disk and train from them. "
        "The rest of the vocabulary counts as one token.",
    )
