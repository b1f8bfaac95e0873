"""Keys of single offline methods: preferences, reward models, process rewards, distillation."""

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
        description="Loss of a pair. `simpo`, `orpo` and `cpo` have no reference. `aot` and `aot_unpaired` sort the "
        "responses of an update, which takes one more pass of the model.",
    )
    beta: float = Field(0.1, gt=0, description="Scale of the log-ratio (`orpo`: weight of the odds ratio).")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Share of pairs that may be labelled the wrong way round."
    )
    gamma: float = Field(0.0, ge=0, description="`simpo`: margin asked of the scaled difference.")
    discopop_tau: float = Field(
        0.05, gt=0, description="`discopop`: how large a difference turns the loss from logistic to exponential."
    )
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = Field(
        "reverse_kl",
        description="How far from the reference is measured (f-DPO): what stands in place of the log-ratio. For "
        "`sigmoid`, `ipo`, `hinge`, `robust`, `exo_pair` and `discopop`.",
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
        description="Weight of the tokens by which the longer response of a pair is longer (LD-DPO); 1 is DPO.",
    )
    average: bool = Field(
        False, description="Log-probabilities are means over a response's tokens, not sums (length-normalised)."
    )
    nll: float = Field(0.0, ge=0, description="Weight of the chosen response's mean negative log-likelihood.")
    reference: str | None = Field(
        None,
        description="Folder of the reference model. Default: `model.path` (with LoRA: the adapter switched off).",
        effect=FOLDER,
    )
    precompute: bool = Field(
        False,
        description="Compute the reference's log-probabilities once, before training, and keep them on disk: the "
        "reference then takes no memory.",
        effect=Effect("harmless", "the same reference log-probabilities, computed earlier"),
    )
    reference_free: bool = Field(
        False, description="`kto`: no reference; mean log-probabilities take the place of log-ratios."
    )
    desirable: float = Field(1.0, gt=0, description="`kto`: weight of desirable rows.")
    undesirable: float = Field(1.0, gt=0, description="`kto`: weight of undesirable rows.")


class RewardModelSettings(Section):
    loss: Literal["sigmoid", "logexp"] = Field(
        "sigmoid", description="-log sigmoid(chosen - rejected - margin), or log(1 + exp(rejected - chosen))."
    )
    ranking: Literal["pairs", "plackett_luce"] = Field(
        "pairs", description="More than two responses: the mean over all pairs, or the Plackett-Luce likelihood."
    )
    centre: float = Field(
        0.0, ge=0, description="Weight of the squared sum of a pair's scores: keeps scores around zero."
    )


class ProcessReward(Section):
    placeholder: str = Field("ки", min_length=1, description="Text after each step where it is judged; one token.")
    tokens: list[str] = Field(
        ["+", "-"], min_length=2, description="Words that say how a step is, one token each; the first is the good one."
    )


class Distill(Section):
    teacher: str | None = Field(None, description="Folder of the teacher.", effect=FOLDER)
    divergence: Literal["forward", "reverse", "jsd"] = Field(
        "forward", description="KL(teacher, student), KL(student, teacher), or Jensen-Shannon's mixture of both."
    )
    mix: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="`jsd`: the teacher's share in the mixture.",
        read_where=("distill.divergence", ("jsd",)),
    )
    temperature: float = Field(1.0, gt=0, description="Divides the logits of both.")
    coefficient: float = Field(
        0.5, ge=0, le=1, description="Weight of the divergence; the rest is the rows' own log-likelihood (SFT)."
    )
    top_k: int | None = Field(
        None,
        ge=1,
        description="Keep the teacher's so many likeliest words of each token on disk and train from there; what is "
        "left of the vocabulary counts as one word.",
    )
