"""The table of faults in bf16: what is trained, and where rounding hides more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional

import fault_loops as loops
import fault_modules as modules
import fault_updates as updates
from fault_scene import Inject, Scene, replay_with
from faults import L0, L1, L2, ROOT, Fault, Named, named_by
from lockstep.algorithms.advantage import ESTIMATORS

SFT, DPO, GRPO, TOP_P, PPO = (f"{name}-bf16" for name in ("sft", "dpo", "grpo", "grpo-top-p", "ppo"))


def _module(name: str, inject: Inject, module: str, recipe: str = SFT) -> Fault:
    return Fault(name, recipe, inject, "log-probs", module)


def _times(name: str, module: str, factor: float) -> Fault:
    return _module(name, modules.output(module, lambda out: factor * out), module)


def _epsilon(name: str, module: str, value: float, recipe: str = SFT) -> Fault:
    return _module(name, modules.setting(module, "variance_epsilon", lambda _: value), module, recipe)


def _attention(name: str, module: str, **faults: object) -> Fault:
    return _module(name, modules.attention(f"{module}.self_attn", **faults), f"{module}.self_attn")


def _weight(name: str, parameter: str, change: object) -> Fault:
    return _module(name, modules.weight(parameter, change), parameter.rpartition(".")[0])


FORWARD = [
    _epsilon("norm epsilon 1e-2", f"{L1}.input_layernorm", 1e-2),
    _epsilon("first norm's epsilon 1e-2", f"{L0}.input_layernorm", 1e-2),
    _epsilon("first norm's epsilon 1e-4", f"{L0}.input_layernorm", 1e-4),
    _epsilon("final norm's epsilon 1", "model.norm", 1.0),
    _epsilon("policy's first norm epsilon 1e-3", f"{L0}.input_layernorm", 1e-3, GRPO),
    _weight("norm weight x 1.02", f"{L2}.post_attention_layernorm.weight", lambda w: 1.02 * w),
    _module("rotary base", modules.rotary_base(10500.0), "model.rotary_emb"),
    _module("rotary on keys alone", modules.rotary(f"{L1}.self_attn", modules.keys_alone), f"{L1}.self_attn"),
    _module("keys one place on", modules.rotary(f"{L2}.self_attn", modules.keys_one_further), f"{L2}.self_attn"),
    _module(
        "attention scale x 1.05", modules.setting(f"{L1}.self_attn", "scaling", lambda x: 1.05 * x), f"{L1}.self_attn"
    ),
    _attention("sees the next token", L0, **{"from": -1}),
    _attention("cannot see itself", L1, **{"from": 1}),
    _attention("packed sequences see each other", L2, joined=True),
    _attention("two heads swapped", L1, swapped=(0, 3)),
    _attention("key heads in the wrong order", L2, interleaved=True),
    _module(
        "dropped bias",
        modules.linear(f"{L1}.self_attn.q_proj", lambda x, w, b: functional.linear(x, w)),
        f"{L1}.self_attn.q_proj",
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
    _module("GELU in the place of SiLU", modules.activation(f"{L1}.mlp", torch.nn.GELU()), f"{L1}.mlp.act_fn"),
    _module("activation approximated", modules.activation(f"{L2}.mlp", torch.nn.Hardswish()), f"{L2}.mlp.act_fn"),
    _weight("weight in fp8", f"{L1}.mlp.gate_proj.weight", modules.through_fp8),
    _weight("weight transposed", f"{L1}.self_attn.o_proj.weight", lambda w: w.T),
    _weight("weight rows zero", f"{L0}.mlp.gate_proj.weight", modules.without_row(5)),
    _weight("embedding row", "model.embed_tokens.weight", modules.without_row(ord("#"))),
    _module("residual dropped", modules.no_residual(L1), L1),
    _module(
        "dropout left on", modules.output(f"{L1}.mlp", lambda out: functional.dropout(out, 0.1, True)), f"{L1}.mlp"
    ),
    Fault("dropout in training alone", SFT, modules.dropout_while_training(f"{L1}.mlp"), "log-probs"),
    _module("tied head x 1.02", modules.scaled_head(1.02), ROOT),
    _module("temperature missing in scoring", modules.scoring(temperature=1.0), ROOT, GRPO),
    _module("truncation missing in scoring", modules.scoring(truncation=None), ROOT, TOP_P),
    Fault("log-probabilities in bf16", GRPO, modules.bf16_logprobs, "log-probs", says="precision"),
]

BACKWARD = [
    Fault(
        "projection's gradient x 1.1",
        SFT,
        modules.gradient(f"{L1}.self_attn.k_proj.weight", lambda g: 1.1 * g),
        "gradient",
        f"{L1}.self_attn.k_proj",
    ),
    Fault(
        "norm's gradient dropped",
        SFT,
        modules.gradient(f"{L2}.input_layernorm.weight", torch.zeros_like),
        "gradient",
        f"{L2}.input_layernorm",
    ),
    Fault(
        "way back x 0.9",
        SFT,
        modules.backward(f"{L1}.self_attn.v_proj", lambda g: 0.9 * g),
        "gradient",
        f"{L1}.self_attn.v_proj",
    ),
    Fault("MLP detached", SFT, modules.output(f"{L1}.mlp", lambda out: out.detach()), "gradient", f"{L1}.mlp"),
    Fault("gradients not averaged", SFT, updates.gradients(lambda _, g: 2 * g), "gradient"),
    Fault("gradients x 1.3", SFT, updates.gradients(lambda _, g: 1.3 * g), "gradient"),
    Fault("gradients x 1.05", DPO, updates.gradients(lambda _, g: 1.05 * g), "gradient"),
    Fault("policy's gradients x 0.9", GRPO, updates.gradients(lambda _, g: 0.9 * g), "gradient"),
    Fault("gradients summed in bf16", SFT, updates.summed_in_bf16, "gradient"),
    Fault("micro-batch lost", SFT, updates.lost_micro_batch, "gradient"),
    Fault(
        "one gradient zero",
        SFT,
        updates.gradients(updates.only(f"{L2}.mlp.up_proj.weight", 0.0)),
        "gradient",
        says=f"{L2}.mlp.up_proj.weight",
    ),
    Fault(
        "one gradient x 1.1",
        SFT,
        updates.gradients(updates.only(f"{L0}.self_attn.o_proj.weight", 1.1)),
        "gradient",
        says=f"{L0}.self_attn.o_proj.weight",
    ),
]

AROUND = [
    Fault("prompt token trained", SFT, loops.rows(loops.prompt_trained), "batch"),
    Fault("mask one token early", GRPO, loops.response_mask, "batch"),
    Fault("engine's temperature missing", GRPO, loops.sampling(temperature=1.0), "generation"),
    Fault("engine's seed", GRPO, loops.sampling(seed=1), "generation"),
    Fault("stale weights in the engine", GRPO, loops.stale_engine, "generation"),
    Fault("decode positions off by one", GRPO, loops.decode_positions, "generation"),
    Fault("top-p ignored", TOP_P, loops.sampling(top_p=1.0), "generation"),
    Fault("text stripped", GRPO, loops.judged_text(lambda text: text[:-1].strip()), "reward"),
    Fault("reward's weight", GRPO, loops.reward_weight(0.9), "reward"),
    Fault("not divided by the deviation", GRPO, loops.estimator("grpo", ESTIMATORS["dr_grpo"]), "advantages"),
    Fault("GAE's lambda", PPO, loops.gae_with(lam=1.0), "advantages"),
    Fault("discount", PPO, loops.gae_with(gamma=1.0), "advantages"),
]

LOSSES = [
    Fault("divisor of one micro-batch", SFT, updates.divisor_of_micro_batch, "loss"),
    Fault("a target left out", SFT, updates.lost_token, "loss"),
    Fault("KL coefficient", GRPO, updates.kl_coefficient(0.0), "loss"),
    # In the first step: in the second the pairs are told apart already, and a tenth more turns the loss by only 3 %.
    Fault("DPO's beta", DPO, updates.preference(beta=0.11), "loss", steps=(1, 2)),
    Fault("DPO's smoothing", DPO, updates.preference(label_smoothing=0.05), "loss"),
    Fault("reference is the policy", GRPO, updates.reference_is_policy, "log-probs", says="reference"),
]

UPDATES = [
    Fault("epsilon 1e-6", SFT, updates.keys(eps=1e-6), "optimizer"),
    Fault("betas", SFT, updates.keys(betas=(0.9, 0.999)), "optimizer"),
    Fault("decay on norms and biases", SFT, updates.decay_everywhere, "optimizer", says="norm"),
    Fault("rate not passed on", SFT, updates.rate_not_passed_on, "optimizer"),
    Fault("moments reset", SFT, updates.moments_reset, "optimizer"),
    Fault("clipped at another norm", SFT, updates.other_clip, "optimizer"),
    Fault("masters not copied", SFT, updates.not_written_back(), "weights"),
    Fault(
        "one parameter not written back",
        SFT,
        updates.not_written_back(f"{L0}.self_attn.k_proj.weight"),
        "weights",
        says=f"{L0}.self_attn.k_proj.weight",
    ),
    Fault(
        "weights lost after the update",
        SFT,
        updates.weights_lost_after(f"{L1}.mlp.down_proj.weight"),
        "weights",
        says=f"{L1}.mlp.down_proj.weight",
    ),
    Fault(
        "weights changed before the next step",
        GRPO,
        updates.changed_before_next(f"{L2}.self_attn.v_proj.weight", 1.01),
        "weights",
        says=f"{L2}.self_attn.v_proj.weight",
    ),
]

KINDS = {"forward": FORWARD, "backward": BACKWARD, "around": AROUND, "loss": LOSSES, "update": UPDATES}
FAULTS = [fault for kind in KINDS.values() for fault in kind]
# What no sum can show, and why.
UNSEEN = {
    "norm epsilon 1e-2": "beside a variance of 7 it makes a factor of 0.9993, of which bf16 holds a fifth of a digit",
}


def another_device(scene: Scene) -> None:
    """Honest rounding of a device that fuses norms and sums its products otherwise."""
    modules.other_arithmetic(scene)
    modules.fused_norms(scene)


def name_in_bf16(run: Path, fault: Fault, words: tuple[str, ...] = ("batch.tokens=200",)) -> Named:
    def inject(scene: Scene) -> None:
        another_device(scene)
        fault.inject(scene)

    found = replay_with(run, inject, words, steps=fault.steps)
    assert found is not None
    return named_by(fault, found)


def figures(named: list[Named]) -> str:
    """By kind of fault: how many there are, were found, and had their stage and place named."""
    kind_of = {fault.name: kind for kind, faults in KINDS.items() for fault in faults}
    lines = [f"{'kind':10} {'faults':>6} {'found':>6} {'stage':>6} {'place':>6}"]
    for kind in [*KINDS, "all"]:
        mine = [one for one in named if kind in ("all", kind_of[one.fault.name])]
        found, stages = sum(one.stage is not None for one in mine), sum(one.stage_right for one in mine)
        places = sum(one.stage_right and one.place_right for one in mine)
        lines.append(f"{kind:10} {len(mine):6} {found:6} {stages:6} {places:6}")
    return "\n".join(lines)


def on_fp32(fault: Fault) -> Fault:
    """The same fault in a bf16 replay of a tape that was recorded in fp32."""
    return replace(fault, recipe=fault.recipe.removesuffix("-bf16"))
