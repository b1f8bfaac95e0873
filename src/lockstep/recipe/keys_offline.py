"""Recipe keys of the offline methods for preferences, reward models, process rewards and distillation."""

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
        description="Loss of a preference pair. `simpo`, `orpo` and `cpo` use no reference model. `aot` and "
        "`aot_unpaired` sort the margins or scores of all pairs of an update, which takes one more forward pass.",
    )
    beta: float = Field(
        0.1,
        gt=0,
        description="Scale of the log-ratio of policy to reference. With `orpo`, `beta` is the weight of the "
        "odds-ratio term.",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Assumed fraction of pairs in which chosen and rejected are swapped."
    )
    gamma: float = Field(
        0.0, ge=0, description="For `simpo`: target margin between the scaled log-probabilities of chosen and rejected."
    )
    discopop_tau: float = Field(
        0.05,
        gt=0,
        description="For `discopop`: temperature of the gate that mixes the logistic and the exponential loss.",
    )
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = Field(
        "reverse_kl",
        description="Divergence from the reference model, whose derivative replaces the log-ratio (f-DPO). The "
        "divergence applies to the losses `sigmoid`, `ipo`, `hinge`, `robust`, `exo_pair` and `discopop`.",
    )
    alpha: float = Field(
        0.5,
        gt=0,
        le=1,
        description="The parameter of `divergence: alpha`. `alpha: 1` gives forward KL, and values of `alpha` near 0 "
        "approach reverse KL. TRL's `f_alpha_divergence_coef` is 1 minus this value.",
        read_where=("preference.divergence", ("alpha",)),
    )
    ld_alpha: float = Field(
        1.0,
        ge=0,
        le=1,
        description="For LD-DPO: weight of the tokens by which the longer response of a pair exceeds the shorter one. "
        "With the weight 1, the loss is plain DPO.",
    )
    average: bool = Field(
        False,
        description="Use the mean of the log-probabilities over a response's tokens instead of the sum "
        "(length-normalised).",
    )
    nll: float = Field(0.0, ge=0, description="Weight of the mean negative log-likelihood of the chosen response.")
    reference: str | None = Field(
        None,
        description="Folder of the reference model. The default is `model.path` (with LoRA: the model with the "
        "adapter disabled).",
        effect=FOLDER,
    )
    precompute: bool = Field(
        False,
        description="Compute the log-probabilities of the reference once, before training, and store them on disk, "
        "so that the reference model needs no memory during training.",
        effect=Effect("harmless", "the reference log-probabilities are the same, only computed earlier"),
    )
    reference_free: bool = Field(
        False,
        description="For method `kto`: use no reference model. With `true`, the KTO loss uses mean log-probabilities "
        "of the policy instead of log-ratios.",
    )
    desirable: float = Field(1.0, gt=0, description="For method `kto`: weight of desirable rows.")
    undesirable: float = Field(1.0, gt=0, description="For method `kto`: weight of undesirable rows.")


class RewardModelSettings(Section):
    loss: Literal["sigmoid", "logexp"] = Field(
        "sigmoid",
        description="`sigmoid`: -log sigmoid(chosen - rejected - margin); `logexp`: log(1 + exp(rejected - chosen)).",
    )
    ranking: Literal["pairs", "plackett_luce"] = Field(
        "pairs",
        description="Loss of a row with more than two responses: the mean of the pair losses over all pairs, or the "
        "Plackett-Luce likelihood.",
    )
    center_rewards_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of a loss term that keeps scores centred at zero: the squared sum of the two scores of a "
        "pair.",
    )


class ProcessReward(Section):
    placeholder: str = Field(
        "ки",
        min_length=1,
        description="Text of one token after each reasoning step. The process reward model scores the step at this "
        "token.",
    )
    tokens: list[str] = Field(
        ["+", "-"],
        min_length=2,
        description="The words with which the model labels a reasoning step. Each word must be one token. The first "
        "word is the label of a good step.",
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
        description="For `jsd`: weight of the teacher's distribution in the mixture.",
        read_where=("distill.divergence", ("jsd",)),
    )
    temperature: float = Field(1.0, gt=0, description="Temperature that divides the logits of teacher and student.")
    coefficient: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Weight of the divergence from the teacher. One minus this value is the weight of the SFT loss "
        "on the rows.",
    )
    top_k: int | None = Field(
        None,
        ge=1,
        description="Number of most likely tokens per position whose teacher probabilities are stored on disk before "
        "training. If this number is set, training uses only the stored probabilities, and at each position it treats "
        "all tokens whose probabilities are not stored as one token.",
    )
