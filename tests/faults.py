"""The table of faults: what is injected into a replay, and what the replay must report.

`FP32` and `BF16` run in one process, `RANKS` in several. A bf16 replay has rounding that is larger than many of
its faults.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional

import fault_loops as loops
import fault_modules as modules
import fault_updates as updates
from fault_report import Fault, Named, named_by, summary
from fault_scene import Inject, Scene, replay_with
from lockstep.algorithms.advantage import ESTIMATORS

ROOT = "(root)"
OTHER_BATCHES = ["batch.tokens=200"]
L0, L1, L2 = (f"model.layers.{i}" for i in range(3))


def _module(name: str, inject: Inject, module: str, recipe: str = "sft") -> Fault:
    return Fault(name, recipe, inject, "log-probs", module)


def _attention(name: str, module: str, **faults: object) -> Fault:
    return _module(name, modules.attention(f"{module}.self_attn", **faults), f"{module}.self_attn")


def _zeros(gradient: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(gradient)


FORWARD = [
    _module(
        "norm epsilon 1e-5",
        modules.setting(f"{L0}.input_layernorm", "variance_epsilon", lambda _: 1e-5),
        f"{L0}.input_layernorm",
    ),
    _module(
        "norm epsilon 1e-3",
        modules.setting(f"{L1}.post_attention_layernorm", "variance_epsilon", lambda _: 1e-3),
        f"{L1}.post_attention_layernorm",
    ),
    _module("final norm epsilon", modules.setting("model.norm", "variance_epsilon", lambda _: 1e-2), "model.norm"),
    _module("rotary base", modules.rotary_base(10500.0), "model.rotary_emb"),
    _module("rotary on keys alone", modules.rotary(f"{L1}.self_attn", modules.keys_alone), f"{L1}.self_attn"),
    _module("keys one place on", modules.rotary(f"{L2}.self_attn", modules.keys_one_further), f"{L2}.self_attn"),
    _module(
        "attention scale", modules.setting(f"{L1}.self_attn", "scaling", lambda scale: 1.05 * scale), f"{L1}.self_attn"
    ),
    _attention("sees the next token", L0, **{"from": -1}),
    _attention("cannot see itself", L1, **{"from": 1}),
    _attention("packed sequences see each other", L2, joined=True),
    _attention("bf16 softmax", L1, softmax=torch.bfloat16),
    _attention("fp16 softmax", L0, softmax=torch.float16),
    _attention("two heads swapped", L1, swapped=(0, 3)),
    _attention("key heads in the wrong order", L2, interleaved=True),
    _module(
        "dropped bias",
        modules.linear(f"{L1}.self_attn.q_proj", lambda x, w, b: functional.linear(x, w)),
        f"{L1}.self_attn.q_proj",
    ),
    _module(
        "bf16 in one projection",
        modules.linear(f"{L1}.self_attn.v_proj", modules.bf16_linear),
        f"{L1}.self_attn.v_proj",
    ),
    _module("GELU in the place of SiLU", modules.activation(f"{L1}.mlp", torch.nn.GELU()), f"{L1}.mlp.act_fn"),
    _module("activation approximated", modules.activation(f"{L2}.mlp", torch.nn.Hardswish()), f"{L2}.mlp.act_fn"),
    _module(
        "weight transposed", modules.weight(f"{L1}.self_attn.o_proj.weight", lambda w: w.T), f"{L1}.self_attn.o_proj"
    ),
    _module(
        "weight row zero", modules.weight(f"{L0}.mlp.gate_proj.weight", modules.without_row(5)), f"{L0}.mlp.gate_proj"
    ),
    _module(
        "weight rounded", modules.weight(f"{L2}.mlp.down_proj.weight", modules.through_bf16), f"{L2}.mlp.down_proj"
    ),
    _module(
        "embedding row",
        modules.weight("model.embed_tokens.weight", modules.without_row(ord("#"))),
        "model.embed_tokens",
    ),
    _module("residual dropped", modules.no_residual(L1), L1),
    _module(
        "dropout left on", modules.output(f"{L1}.mlp", lambda out: functional.dropout(out, 0.1, True)), f"{L1}.mlp"
    ),
    Fault("dropout in training alone", "sft", modules.dropout_while_training(f"{L1}.mlp"), "log-probs"),
    _module("tied head scaled", modules.scaled_head(1.01), ROOT),
    _module("temperature missing in scoring", modules.scoring(temperature=1.0), ROOT, "grpo"),
    _module("truncation missing in scoring", modules.scoring(truncation=None), ROOT, "grpo-top-p"),
    _module("log-probabilities in bf16", modules.bf16_logprobs, ROOT, "grpo"),
    _module(
        "policy's norm epsilon",
        modules.setting(f"{L1}.input_layernorm", "variance_epsilon", lambda _: 1e-3),
        f"{L1}.input_layernorm",
        "grpo",
    ),
]

BACKWARD = [
    Fault(
        "projection's gradient scaled",
        "sft",
        modules.gradient(f"{L1}.self_attn.k_proj.weight", lambda g: 1.01 * g),
        "gradient",
        f"{L1}.self_attn.k_proj",
    ),
    Fault(
        "norm's gradient dropped",
        "sft",
        modules.gradient(f"{L2}.input_layernorm.weight", _zeros),
        "gradient",
        f"{L2}.input_layernorm",
    ),
    Fault(
        "way back scaled",
        "sft",
        modules.backward(f"{L1}.self_attn.v_proj", lambda g: 0.99 * g),
        "gradient",
        f"{L1}.self_attn.v_proj",
    ),
    Fault("MLP detached", "sft", modules.output(f"{L1}.mlp", lambda out: out.detach()), "gradient", f"{L1}.mlp"),
    Fault("gradients not averaged", "sft", updates.gradients(lambda _, g: 2 * g), "gradient"),
    Fault("micro-batch lost", "sft", updates.lost_micro_batch, "gradient"),
    Fault("loss scale left in", "sft-fp16", updates.scale_left, "gradient"),
    Fault(
        "one gradient zero",
        "sft",
        updates.gradients(updates.only(f"{L2}.mlp.up_proj.weight", 0.0)),
        "gradient",
        expects=f"{L2}.mlp.up_proj.weight",
    ),
]

ROWS = [
    Fault("prompt token trained", "sft", loops.rows(loops.prompt_trained), "batch"),
    Fault("last token not trained", "sft", loops.rows(loops.last_untrained), "batch"),
    Fault("truncated row", "sft", loops.rows(loops.truncated), "batch"),
    Fault("mask one token early", "grpo", loops.response_mask, "batch"),
    Fault("packing shifts by one", "sft", loops.packed_batch(loops.shifted), "batch", expects="predicted from"),
    Fault("packed positions run on", "grpo", loops.packed_batch(loops.running_on), "batch", expects="predicted from"),
    Fault(
        "packed sequences end late",
        "dpo",
        loops.packed_batch(loops.moved_ends),
        "batch",
        expects="before the target token",
    ),
]

GENERATION = [
    Fault("engine's temperature missing", "grpo", loops.sampling(temperature=1.0), "generation"),
    Fault("engine's seed", "grpo", loops.sampling(seed=1), "generation"),
    Fault("stale weights in the engine", "grpo", loops.stale_engine, "generation"),
    Fault("decode positions off by one", "grpo", loops.decode_positions, "generation"),
    Fault("top-p ignored", "grpo-top-p", loops.sampling(top_p=1.0), "generation"),
    Fault("wrong block after preemption", "grpo-tight", loops.wrong_block, "generation"),
]

REWARDS = [
    Fault("text stripped", "grpo", loops.judged_text(lambda text: text[:-1].strip()), "reward"),
    Fault("reward's weight", "grpo", loops.reward_weight(0.9), "reward"),
    Fault("reward's sign", "grpo", loops.reward_weight(-1.0), "reward"),
    Fault("overlong penalty missing", "grpo", loops.no_overlong, "reward"),
]

ADVANTAGES = [
    Fault("not divided by the deviation", "grpo", loops.estimator("grpo", ESTIMATORS["dr_grpo"]), "advantages"),
    Fault("mean over the batch", "grpo", loops.estimator("grpo", loops.over_the_batch), "advantages"),
    Fault("biased deviation", "grpo", loops.estimator("grpo", loops.biased_deviation), "advantages"),
    Fault("GAE's lambda", "ppo", loops.gae_with(lam=1.0), "advantages"),
    Fault("discount", "ppo", loops.gae_with(gamma=1.0), "advantages"),
    Fault("reward on the first token", "ppo", loops.misplaced_reward, "advantages"),
]

LOSSES = [
    Fault("divisor of one micro-batch", "sft", updates.divisor_of_micro_batch, "loss"),
    Fault("a target left out", "sft", updates.lost_token, "loss"),
    Fault("clip range", "grpo", updates.policy_loss(clip_low=0.2, clip_high=0.2), "loss", expects="update 2"),
    Fault("KL coefficient", "grpo", updates.kl_coefficient(0.0), "loss"),
    Fault("KL estimator", "grpo", updates.kl_estimator("k2"), "loss"),
    Fault("reference is the policy", "grpo", updates.reference_is_policy, "log-probs", expects="reference"),
    Fault("DPO's beta", "dpo", updates.preference(beta=0.11), "loss"),
    Fault("DPO's smoothing", "dpo", updates.preference(label_smoothing=0.05), "loss"),
    Fault("DPO's reference is the policy", "dpo", updates.reference_is_policy, "log-probs", expects="reference"),
    Fault("value clip", "ppo", updates.value_clip, "loss", expects="critic"),
]

OPTIMIZER = [
    Fault("epsilon 1e-6", "sft", updates.keys(eps=1e-6), "optimizer"),
    Fault("epsilon 1e-5", "grpo", updates.keys(eps=1e-5), "optimizer"),
    Fault("betas", "sft", updates.keys(betas=(0.9, 0.999)), "optimizer"),
    Fault("decay on norms and biases", "sft", updates.decay_everywhere, "optimizer", expects="norm"),
    Fault("no decay", "sft", updates.keys(weight_decay=0.0), "optimizer"),
    Fault("no bias correction", "sft", updates.no_bias_correction, "optimizer"),
    Fault("decay in the gradient", "sft", updates.coupled_decay, "optimizer"),
    Fault("rate not passed on", "sft", updates.rate_not_passed_on, "optimizer"),
    Fault("another rate", "sft", updates.wrong_rate, "optimizer", expects="0.002"),
    Fault("moments reset", "sft", updates.moments_reset, "optimizer"),
    Fault("clipped at another norm", "sft", updates.other_clip, "optimizer"),
    Fault(
        "parameter left out",
        "sft",
        updates.left_out(f"{L1}.mlp.up_proj.weight"),
        "optimizer",
        expects=f"{L1}.mlp.up_proj.weight",
    ),
]

WEIGHTS = [
    Fault("masters not copied", "sft-bf16", updates.not_written_back(), "weights"),
    Fault(
        "one parameter not written back",
        "sft-bf16",
        updates.not_written_back(f"{L0}.self_attn.k_proj.weight"),
        "weights",
        expects=f"{L0}.self_attn.k_proj.weight",
    ),
    Fault("weights lost after the update", "grpo", updates.weights_lost_after(f"{L1}.mlp.down_proj.weight"), "weights"),
]

RANKS = [
    Fault(
        "a shard's step left out",
        "sft",
        updates.on_rank(1, updates.shard_not_written_back(f"{L0}.mlp.gate_proj.weight")),
        "optimizer",
        rank=1,
        expects=f"{L0}.mlp.gate_proj.weight",
        ranks=2,
    ),
    Fault("gradients averaged over ranks", "sft", updates.averaged_over_ranks, "gradient", ranks=2),
    Fault(
        "a shard not written back",
        "sft-bf16",
        updates.on_rank(1, updates.shard_not_written_back(f"{L1}.mlp.down_proj.weight")),
        "weights",
        rank=1,
        expects=f"{L1}.mlp.down_proj.weight",
        ranks=2,
    ),
    Fault(
        "a stale layer on one rank",
        "grpo",
        updates.on_rank(1, modules.output(f"{L1}.mlp", lambda out: 1.02 * out)),
        "log-probs",
        f"{L1}.mlp",
        rank=1,
        ranks=2,
    ),
]

FP32 = [*FORWARD, *BACKWARD, *ROWS, *GENERATION, *REWARDS, *ADVANTAGES, *LOSSES, *OPTIMIZER, *WEIGHTS]


# -- in bf16


def another_device(scene: Scene) -> None:
    """The correct rounding of a device that fuses norms and sums products in another order."""
    modules.other_arithmetic(scene)
    modules.fused_norms(scene)


def _in_bf16(fault: Fault) -> Fault:
    recipe = fault.recipe.removesuffix("-bf16") + "-bf16"
    return replace(fault, name=f"bf16: {fault.name}", recipe=recipe, device=another_device)


def _again(names: str) -> list[Fault]:
    """Faults of the table above, in bf16."""
    listed = [name.strip() for name in names.split(",") if name.strip()]
    return [_in_bf16(next(fault for fault in FP32 if fault.name == name)) for name in listed]


def _times(name: str, module: str, factor: float) -> Fault:
    return _module(name, modules.output(module, lambda out: factor * out), module)


def _epsilon(name: str, module: str, value: float, recipe: str = "sft") -> Fault:
    return _module(name, modules.setting(module, "variance_epsilon", lambda _: value), module, recipe)


def _weight(name: str, parameter: str, change: object) -> Fault:
    return _module(name, modules.weight(parameter, change), parameter.rpartition(".")[0])


def _gradients(name: str, recipe: str, factor: float) -> Fault:
    return Fault(name, recipe, updates.gradients(lambda _, g: factor * g), "gradient")


BF16_KINDS: dict[str, list[Fault]] = {
    "forward": _again(
        """
        rotary base, rotary on keys alone, keys one place on, sees the next token, cannot see itself,
        packed sequences see each other, two heads swapped, key heads in the wrong order, dropped bias,
        GELU in the place of SiLU, activation approximated, weight transposed, embedding row, residual dropped,
        dropout left on, dropout in training alone, temperature missing in scoring,
        truncation missing in scoring,
        """
    )
    + [
        _in_bf16(fault)
        for fault in (
            _epsilon("norm epsilon 1e-2", f"{L1}.input_layernorm", 1e-2),
            _epsilon("first norm's epsilon 1e-2", f"{L0}.input_layernorm", 1e-2),
            _epsilon("first norm's epsilon 1e-4", f"{L0}.input_layernorm", 1e-4),
            _epsilon("final norm's epsilon 1", "model.norm", 1.0),
            _epsilon("policy's first norm epsilon 1e-3", f"{L0}.input_layernorm", 1e-3, "grpo"),
            _weight("norm weight x 1.02", f"{L2}.post_attention_layernorm.weight", lambda w: 1.02 * w),
            _module(
                "attention scale x 1.05",
                modules.setting(f"{L1}.self_attn", "scaling", lambda x: 1.05 * x),
                f"{L1}.self_attn",
            ),
            _module(
                "bias added twice",
                modules.linear(f"{L2}.self_attn.v_proj", lambda x, w, b: functional.linear(x, w, b) + b),
                f"{L2}.self_attn.v_proj",
            ),
            _times("MLP x 1.03", f"{L1}.mlp", 1.03),
            _times("MLP x 1.015", f"{L2}.mlp", 1.015),
            _times("attention's output x 0.98", f"{L1}.self_attn.o_proj", 0.98),
            _module("offset of 0.05", modules.output(f"{L0}.mlp.up_proj", lambda out: out + 0.05), f"{L0}.mlp.up_proj"),
            _weight("weight in fp8", f"{L1}.mlp.gate_proj.weight", modules.through_fp8),
            _weight("weight rows zero", f"{L0}.mlp.gate_proj.weight", modules.without_row(5)),
            _module("tied head x 1.02", modules.scaled_head(1.02), ROOT),
            Fault("log-probabilities in bf16", "grpo", modules.bf16_logprobs, "log-probs", expects="precision"),
        )
    ],
    "backward": _again(
        """
        norm's gradient dropped, MLP detached, gradients not averaged, micro-batch lost, one gradient zero,
        """
    )
    + [
        _in_bf16(fault)
        for fault in (
            Fault(
                "projection's gradient x 1.1",
                "sft",
                modules.gradient(f"{L1}.self_attn.k_proj.weight", lambda g: 1.1 * g),
                "gradient",
                f"{L1}.self_attn.k_proj",
            ),
            Fault(
                "way back x 0.9",
                "sft",
                modules.backward(f"{L1}.self_attn.v_proj", lambda g: 0.9 * g),
                "gradient",
                f"{L1}.self_attn.v_proj",
            ),
            _gradients("gradients x 1.3", "sft", 1.3),
            _gradients("gradients x 1.05", "dpo", 1.05),
            _gradients("policy's gradients x 0.9", "grpo", 0.9),
            Fault("gradients summed in bf16", "sft", updates.summed_in_bf16, "gradient"),
            Fault(
                "one gradient x 1.1",
                "sft",
                updates.gradients(updates.only(f"{L0}.self_attn.o_proj.weight", 1.1)),
                "gradient",
                expects=f"{L0}.self_attn.o_proj.weight",
            ),
        )
    ],
    "around": _again(
        """
        prompt token trained, mask one token early, engine's temperature missing, engine's seed,
        stale weights in the engine, decode positions off by one, top-p ignored, text stripped, reward's weight,
        not divided by the deviation, GAE's lambda, discount,
        """
    ),
    "loss": [
        *_again(
            """
            divisor of one micro-batch, a target left out, KL coefficient, DPO's smoothing, reference is the policy,
            """
        ),
        # In the first step: in the second the pairs are separated, and a tenth more changes the loss by only 3 %.
        _in_bf16(Fault("DPO's beta", "dpo", updates.preference(beta=0.11), "loss", steps=(1, 2))),
    ],
    "update": _again(
        """
        epsilon 1e-6, betas, decay on norms and biases, rate not passed on, moments reset,
        clipped at another norm, masters not copied, one parameter not written back,
        """
    )
    + [
        _in_bf16(fault)
        for fault in (
            Fault(
                "weights lost after the update",
                "sft",
                updates.weights_lost_after(f"{L1}.mlp.down_proj.weight"),
                "weights",
                expects=f"{L1}.mlp.down_proj.weight",
            ),
            Fault(
                "weights changed before the next step",
                "grpo",
                updates.changed_before_next(f"{L2}.self_attn.v_proj.weight", 1.01),
                "weights",
                expects=f"{L2}.self_attn.v_proj.weight",
            ),
        )
    ],
}
BF16 = [fault for kind in BF16_KINDS.values() for fault in kind]
# Faults that no sum can show, and why.
UNSEEN = {
    "bf16: norm epsilon 1e-2": "with a variance of 7 it is a factor of 0.9993, a fifth of the last digit of bf16",
}
FAULTS = {fault.name: fault for fault in [*FP32, *BF16, *RANKS]}


# -- what a replay reports


def figures(named: Sequence[Named]) -> str:
    """For each kind of bf16 fault: how many there are, are found, and have the right stage and place."""
    kind_of = {fault.name: kind for kind, faults in BF16_KINDS.items() for fault in faults}
    lines = [f"{'kind':10} {'faults':>6} {'found':>6} {'stage':>6} {'place':>6}"]
    for kind in [*BF16_KINDS, "all"]:
        mine = [one for one in named if kind in ("all", kind_of[one.fault.name])]
        found, stages = sum(one.stage is not None for one in mine), sum(one.stage_right for one in mine)
        places = sum(one.stage_right and one.place_right for one in mine)
        lines.append(f"{kind:10} {len(mine):6} {found:6} {stages:6} {places:6}")
    return "\n".join(lines)


def name_it(run: Path, fault: Fault, words: Sequence[str] = OTHER_BATCHES) -> Named | None:
    """Replay a run with a fault and with the rounding of another device. Ranks other than 0 get None."""

    def inject(scene: Scene) -> None:
        fault.device(scene)
        fault.inject(scene)

    found = replay_with(run, inject, words, steps=fault.steps)
    return None if found is None else named_by(fault, found)


def main(run: str, name: str = "") -> None:
    """One fault, or none, in the processes of torchrun."""
    if not name:
        found = replay_with(Path(run), modules.other_arithmetic, OTHER_BATCHES)
        if found is not None and not found.in_step:
            sys.exit(f"{found.cause} {found.module}")
        return
    named = name_it(Path(run), FAULTS[name])
    if named is not None:
        print(summary([named]))
        if not (named.stage_right and named.place_right):
            sys.exit(f"{named}")


if __name__ == "__main__":
    main(*sys.argv[1:])
