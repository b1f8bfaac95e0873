"""Kinds of LoRA (rsLoRA, DoRA, PiSSA, copies of modules, layer ranges) against PEFT: outputs, gradients, exports."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from peft.utils.loftq_utils import _low_rank_decomposition
from safetensors.torch import load_file
from small_models import SIZES, native, run, slow_sample, write_model
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from conftest import write_sft_recipe
from lockstep.kernels.quantized.formats import dequantize, quantize
from lockstep.model.adapters.active import INITIAL, START, lora_layers
from lockstep.model.adapters.lora_init import pissa_factors
from lockstep.model.adapters.peft_folder import save_adapter
from lockstep.model.export_check import probe_of
from lockstep.model.export_folder import export_model
from lockstep.model.load import load_policy, with_lora
from lockstep.model.policy import Policy
from lockstep.model.resolve import folders_of
from lockstep.model.weights import restore_weights, trained_weights
from lockstep.preflight.model_sizes import Counted, count_parameters
from lockstep.recipe import load_recipe
from lockstep.recipe.keys_lora import layer_indices
from lockstep.recipe.keys_optim import Optim
from lockstep.recipe.lora_checks import with_lora_rate
from lockstep.recipe.schema import Lora, Model
from lockstep.train.optim import Optimizer
from lockstep.types import Request, Sampling
from refusals import refuses

CPU = torch.device("cpu")
IDS = torch.tensor([[7, 65, 66, 67, 10, 11, 12]])
# `model.lora` of lockstep, and the same settings of PEFT.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rslora": ({"rslora": True}, {"use_rslora": True}),
    "dora": ({"dora": True}, {"use_dora": True}),
    "dora-rslora": ({"dora": True, "rslora": True}, {"use_dora": True, "use_rslora": True}),
    "pissa": ({"init": "pissa"}, {"init_lora_weights": "pissa"}),
    "pissa-rslora": ({"init": "pissa", "rslora": True}, {"init_lora_weights": "pissa", "use_rslora": True}),
    "copies": ({"modules_to_save": ["embed_tokens", "lm_head"]}, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "layers": ({"layers": "1"}, {"layers_to_transform": [1]}),
    "orthogonal": ({"init": "orthogonal"}, {"init_lora_weights": "orthogonal"}),
    "gaussian": ({"init": "gaussian"}, {"init_lora_weights": "gaussian"}),
}
DAILY = ("dora", "pissa-rslora", "copies", "layers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"), LlamaConfig(**SIZES), tiny_folder)


def settings_of(folder: Path, **keys: Any) -> Model:
    given: dict[str, Any] = {"rank": 4, "alpha": 6.0, "targets": ["q_proj", "down_proj"]}
    return Model(path=str(folder), lora=Lora(**given | keys))


def policy_of(folder: Path, **keys: Any) -> Policy:
    return load_policy(settings_of(folder, **keys), CPU, "sdpa", 0)


def of_peft(folder: Path, **keys: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **keys)
    return get_peft_model(model, config)


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def moved(policy: Policy) -> None:
    """Training that changed all trained weights."""
    torch.manual_seed(1)
    for _, weight in policy.trainable():
        weight.add_(torch.randn_like(weight), alpha=0.05)


def outputs(policy: Policy) -> torch.Tensor:
    policy.eval()
    with policy.generating() as model:
        return model(input_ids=IDS).logits


@pytest.mark.daily(*DAILY)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_peft(folder: Path, kind: str) -> None:
    ours, theirs = KINDS[kind]
    policy, peft = policy_of(folder, **ours), of_peft(folder, **theirs)
    trained = values(policy.model)
    assert trained.keys() == values(peft).keys()
    moved(policy)
    with torch.no_grad():
        for name, weight in values(peft).items():
            weight.copy_(trained[name])
    logits, wanted = outputs(policy), peft(input_ids=IDS).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    torch.manual_seed(2)
    by = torch.randn_like(wanted)
    (logits * by).sum().backward()
    (wanted * by).sum().backward()
    for name, weight in values(peft).items():
        torch.testing.assert_close(trained[name].grad, weight.grad, rtol=1e-3, atol=1e-3, msg=name)


@torch.no_grad()
@pytest.mark.daily(*DAILY)
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_changes_nothing_and_the_reference_is_the_base(folder: Path, kind: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder)(input_ids=IDS).logits
    policy = policy_of(folder, **KINDS[kind][0])
    torch.testing.assert_close(outputs(policy), base, rtol=1e-4, atol=1e-5)
    moved(policy)
    assert (outputs(policy) - base).abs().max() > 1e-3
    trained = {name for name, _ in policy.trainable()}
    with policy.as_reference():
        torch.testing.assert_close(outputs(policy), base, rtol=1e-5, atol=1e-6)
    assert {name for name, _ in policy.trainable()} == trained


@torch.no_grad()
@pytest.mark.daily("pissa-True", "dora-False", "dora-True", "copies-True", "copies-False", "layers-True")
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_exports_have_the_outputs_of_the_trained_model(folder: Path, tmp_path: Path, kind: str, adapter: bool) -> None:
    settings = settings_of(folder, **KINDS[kind][0])
    policy = load_policy(settings, CPU, "sdpa", 3)
    moved(policy)
    probe, weights = probe_of(policy, CPU), trained_weights(policy.stored)
    how: dict[str, Any] = {"where": "test", "folders": folders_of(settings), "probe": probe, "adapter": adapter}
    assert export_model(settings, weights, tmp_path / "out", **how).done
    model = AutoModelForCausalLM.from_pretrained(folder if adapter else tmp_path / "out")
    plain = PeftModel.from_pretrained(model, tmp_path / "out") if adapter else model
    torch.testing.assert_close(plain(input_ids=IDS).logits, outputs(policy), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.daily("dora", "pissa", "copies")
@pytest.mark.parametrize("kind", KINDS)
def test_training_continues_from_an_adapter_of_each_kind(folder: Path, tmp_path: Path, kind: str) -> None:
    """Saved by PEFT itself: a PiSSA folder names the decomposition by which its base changed."""
    peft = of_peft(folder, **KINDS[kind][1])
    torch.manual_seed(5)
    for weight in values(peft).values():
        weight.add_(torch.randn_like(weight), alpha=0.05)
    wanted = peft(input_ids=IDS).logits
    peft.save_pretrained(tmp_path / "adapter")
    lora = Lora(adapter=str(tmp_path / "adapter"), reference="start")
    policy = load_policy(Model(path=str(folder), lora=lora), CPU, "sdpa", 0)
    torch.testing.assert_close(outputs(policy), wanted, rtol=1e-4, atol=1e-5)
    moved(policy)
    assert (outputs(policy) - wanted).abs().max() > 1e-3
    with policy.as_reference():
        torch.testing.assert_close(outputs(policy), wanted, rtol=1e-4, atol=1e-5)
    assert not any(f".{START}." in name for name, _ in policy.kept())


def test_a_checkpoint_has_the_first_values_of_pissa(folder: Path) -> None:
    """Another machine may decompose a weight into other vectors; `pissa_niter_N` draws them from the seed."""
    first, second = (load_policy(settings_of(folder, init="pissa_niter_2"), CPU, "sdpa", seed) for seed in (1, 2))
    moved(first)
    stored = trained_weights(first.stored)
    assert sum(f".{INITIAL}." in name for name in stored) == len(stored) / 2
    assert not any(f".{INITIAL}." in name for name, _ in first.trainable())
    restore_weights(second.stored, stored, "test")
    with torch.no_grad():
        assert torch.equal(outputs(first), outputs(second))


@torch.no_grad()
def test_the_converted_adapter_is_that_of_peft(folder: Path, tmp_path: Path) -> None:
    peft = of_peft(folder, init_lora_weights="pissa")
    peft.save_pretrained(tmp_path / "first")
    policy = policy_of(folder, init="pissa")
    moved(policy)
    for name, weight in values(peft).items():
        weight.copy_(values(policy.model)[name])
    peft.peft_config["default"].init_lora_weights = True
    peft.save_pretrained(tmp_path / "peft", path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    save_adapter(policy.model, tmp_path / "ours", str(folder))
    theirs, ours = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "ours"))
    assert theirs.keys() == ours.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5, msg=name)
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["init_lora_weights"]) == (8, 12, True)


@torch.no_grad()
@pytest.mark.parametrize("init", ["default", "pissa"])
def test_a_server_gets_a_plain_adapter_with_the_scale_of_rslora(folder: Path, tmp_path: Path, init: str) -> None:
    policy = policy_of(folder, rslora=True, init=init)
    moved(policy)
    save_adapter(policy.model, tmp_path / "sent", plain=True)
    config = json.loads((tmp_path / "sent" / "adapter_config.json").read_text())
    assert not config["use_rslora"]
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "sent")
    torch.testing.assert_close(plain(input_ids=IDS).logits, outputs(policy), rtol=1e-4, atol=1e-5)


def test_pissa_factors_are_those_of_peft() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(12, 20, bias=False)
    with torch.no_grad():
        layer.weight.mul_(0.3 ** torch.arange(12))
    model = get_peft_model(
        torch.nn.Sequential(layer), LoraConfig(r=3, lora_alpha=5, target_modules=["0"], init_lora_weights="pissa")
    )
    adapted = model.base_model.model[0]
    whole = adapted.base_layer.weight + 5 / 3 * adapted.lora_B.default.weight @ adapted.lora_A.default.weight
    a, b = pissa_factors(whole.detach(), 3, 5 / 3, "pissa")
    torch.testing.assert_close(b @ a, adapted.lora_B.default.weight @ adapted.lora_A.default.weight)
    torch.testing.assert_close(a.abs(), adapted.lora_A.default.weight.abs(), rtol=1e-4, atol=1e-5)
    near = pissa_factors(whole.detach(), 3, 5 / 3, "pissa_niter_16")
    torch.testing.assert_close(near[1] @ near[0], b @ a, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("keys", "where", "code", "word"),
    [
        ({"layers": "0-2"}, "model.lora.layers", "unknown-module", "layers 0 to 1"),
        ({"layers": [-1]}, "model.lora.layers", "unknown-module", "-1"),
        ({"modules_to_save": ["lm_heat"]}, "model.lora.modules_to_save", "unknown-module", "lm_heat"),
        ({"modules_to_save": ["layers"]}, "model.lora.targets", "unknown-module", "no layer"),
        (
            {"modules_to_save": ["layers"], "targets": ["embed_tokens"]},
            "model.lora.modules_to_save",
            "unfit-adapter",
            "ModuleList",
        ),
        ({"init": "orthogonal", "rank": 3}, "model.lora.rank", "unfit-adapter", "even"),
        ({"init": "pissa", "rank": 33}, "model.lora.rank", "unfit-adapter", "32"),
        ({"init": "pissa", "targets": ["embed_tokens"]}, "model.lora.init", "unfit-adapter", "Embedding"),
    ],
)
def test_what_cannot_be_adapted_is_refused(
    folder: Path, keys: dict[str, Any], where: str, code: str, word: str
) -> None:
    with refuses(where, code, word):
        policy_of(folder, **keys)


def test_a_copy_of_a_tied_embedding_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"tie_word_embeddings": True}))
    with refuses("model.lora.modules_to_save", "unfit-adapter", "lm_head.weight"):
        with_lora(model, Lora(rank=2, alpha=4, modules_to_save=["embed_tokens"]), 0)


STACKS = ["experts.gate_up_proj", "experts.down_proj"]


@torch.no_grad()
@pytest.mark.daily("targets1-1")
@pytest.mark.parametrize(
    ("targets", "layers"), [(["w1", "w2", "w3", "q_proj"], None), ([*STACKS, "q_proj"], "1"), (STACKS, None)]
)
def test_experts_are_adapted_exported_and_continued(
    tmp_path: Path, tiny_folder: Path, targets: list[str], layers: str | None
) -> None:
    config = MixtralConfig(**SIZES, num_local_experts=4)
    folder = write_model(tmp_path / "moe", config, tiny_folder)
    settings = settings_of(folder, targets=targets, layers=layers)
    policy = load_policy(settings, CPU, "sdpa", 0)
    moved(policy)
    names = {name for name, _ in policy.trainable() if "experts" in name}
    assert {re.search(r"layers\.(\d)", name)[1] for name in names} == ({"1"} if layers else {"0", "1"})  # type: ignore[index]
    probe, weights = probe_of(policy, CPU), trained_weights(policy.stored)
    how: dict[str, Any] = {"where": "test", "folders": folders_of(settings), "probe": probe}
    for out, adapter in ((tmp_path / "adapter", True), (tmp_path / "merged", False)):
        assert export_model(settings, weights, out, adapter=adapter, **how).done
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    torch.testing.assert_close(theirs(input_ids=IDS).logits, outputs(policy), rtol=1e-4, atol=1e-5)
    lora = Lora(adapter=str(tmp_path / "adapter"), reference="start")
    again = load_policy(Model(path=str(folder), lora=lora), CPU, "sdpa", 0)
    torch.testing.assert_close(outputs(again), outputs(policy), rtol=1e-5, atol=1e-6)
    moved(again)
    with again.as_reference():
        torch.testing.assert_close(outputs(again), outputs(policy), rtol=1e-5, atol=1e-6)


def test_single_experts_of_some_layers_are_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, num_local_experts=4))
    with refuses("model.lora.layers", "unfit-adapter", "layers.0", remedy="experts.gate_up_proj"):
        with_lora(model, Lora(rank=2, alpha=4, targets=["w1", "w2", "w3"], layers="1"), 0)


def test_experts_get_neither_dora_nor_pissa() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"dora": True}, "model.lora.dora"),
        ({"init": "pissa"}, "model.lora.init"),
    ]
    for keys, where in refused:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, num_local_experts=4))
        with refuses(where, "unfit-adapter", "xperts"):
            with_lora(model, Lora(rank=2, alpha=4, targets=["w1", "w2", "w3"], **keys), 0)


def test_lora_plus_updates_as_peft(folder: Path) -> None:
    """Three updates of AdamW, with the learning rates of PEFT's own optimizer."""
    policy, peft = policy_of(folder), of_peft(folder)
    ours = values(policy.model)
    with torch.no_grad():
        for name, weight in values(peft).items():
            weight.copy_(ours[name])
    settings = with_lora_rate(Optim(lr=1e-2, weight_decay=0.0, clip=None), Lora(rank=4, lr_ratio=16.0))
    optimizer = Optimizer(policy.trainable(), settings, masters=False, fused=False)
    theirs = create_loraplus_optimizer(
        peft, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=16.0, betas=(0.9, 0.95), eps=1e-8
    )
    torch.manual_seed(3)
    for _ in range(3):
        for name, weight in values(peft).items():
            weight.grad = torch.randn_like(weight)
            ours[name].grad = weight.grad.clone()
        optimizer.step(1e-2, optimizer.gradient_norm())
        theirs.step()
    for name, weight in values(peft).items():
        torch.testing.assert_close(ours[name], weight, msg=name)


def test_lora_plus_is_a_group_of_the_stored_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("model: {path: m, lora: {rank: 2, lr_ratio: 4}}\ndata: {train: rows.jsonl}\n")
    recipe = load_recipe(str(file))
    assert [(group.name, group.lr_ratio) for group in recipe.optim.groups] == [("lora_B", 4.0)]
    assert with_lora_rate(recipe.optim, recipe.model.lora) == recipe.optim  # once, also when the run resumes


@pytest.mark.parametrize(
    ("words", "where", "code"),
    [
        (["model.lora={rank: 2, init: loftq}"], "model.lora.init", "needs-key"),
        (["model.lora={rank: 2, init: pissa, dora: true}"], "model.lora.init", "unsupported-combination"),
        (["model.lora={rank: 2, layers: []}"], "model.lora.layers", "empty-value"),
        (["model.lora={adapter: a, dora: true}"], "model.lora.dora", "unused-key"),
        (["model.lora={rank: 2, reference: start}"], "model.lora.reference", "needs-key"),
        (["model.lora={adapter: a, reference: start}"], "model.lora.reference", "unused-key"),
        (
            ["model.lora={adapter: a, reference: start}", "method=dpo", "preference.precompute=true"],
            "model.lora.reference",
            "unsupported-combination",
        ),
        (
            ["model.lora={adapter: a, reference: start}", "method=dpo", "preference.reference=r"],
            "model.lora.reference",
            "unused-key",
        ),
        (
            ["model.lora={rank: 2, dora: true}", "method=grpo", "reward.function=a.py:b", "rollout.engine=vllm"],
            "model.lora.dora",
            "unsupported-combination",
        ),
        (["model.lora={rank: 2, init: other}"], "model.lora.init", ""),
        (["model.lora={rank: 2, layers: 3-1}"], "model.lora.layers", ""),
    ],
)
def test_keys_that_do_not_fit_together(tmp_path: Path, words: list[str], where: str, code: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("model: {path: m}\ndata: {train: rows.jsonl}\n")
    with refuses(where, code):
        load_recipe(str(file), words)


def test_layer_ranges_include_both_ends() -> None:
    assert layer_indices("0-2, 5,7-8") == [0, 1, 2, 5, 7, 8]
    assert layer_indices([3, 1, 3]) == [1, 3]


@torch.no_grad()
@pytest.mark.daily("int8-dora")
@pytest.mark.parametrize("init", ["loftq", "dora"])
@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_adapters_of_quantised_weights(folder: Path, tmp_path: Path, format: Any, init: str) -> None:
    keys: dict[str, Any] = {"dora": True} if init == "dora" else {"init": "loftq", "modules_to_save": ["lm_head"]}
    settings = settings_of(folder, **keys).model_copy(update={"quantize": format})
    plain = settings_of(folder).model_copy(update={"quantize": format})
    policy = load_policy(settings, CPU, "sdpa", 0)
    start, quantised = outputs(policy), outputs(load_policy(plain, CPU, "sdpa", 0))
    if init == "dora":
        torch.testing.assert_close(start, quantised, rtol=1e-4, atol=1e-5)
    else:
        assert (start - quantised).abs().max() > 1e-3
    moved(policy)
    with policy.as_reference():
        torch.testing.assert_close(outputs(policy), start, rtol=1e-5, atol=1e-6)
    probe, weights = probe_of(policy, CPU), trained_weights(policy.stored)
    how: dict[str, Any] = {"where": "test", "folders": folders_of(settings), "probe": probe}
    for adapter in (True, False):
        assert export_model(settings, weights, tmp_path / f"{adapter}", adapter=adapter, **how).done
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "False")(input_ids=IDS).logits
    torch.testing.assert_close(merged, outputs(policy), rtol=1e-4, atol=1e-4)
    continued = settings_of(folder, adapter=str(tmp_path / "True")).model_copy(update={"quantize": format})
    assert torch.equal(outputs(load_policy(continued, CPU, "sdpa", 0)), outputs(policy))
    again = load_policy(settings, CPU, "sdpa", 7)
    restore_weights(again.stored, weights, "test")
    assert torch.equal(outputs(again), outputs(policy))


@torch.no_grad()
def test_loftq_is_the_decomposition_of_peft_divided_by_the_scale(folder: Path) -> None:
    settings = settings_of(folder, init="loftq").model_copy(update={"quantize": "nf4"})
    policy = load_policy(settings, CPU, "sdpa", 0)
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, layer in lora_layers(policy.causal_lm):
        weight = weights[f"{name}.weight"]
        error = weight - dequantize(quantize(weight, "nf4"), torch.float32)
        theirs = _low_rank_decomposition(error, reduced_rank=4)
        ours = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        torch.testing.assert_close(ours, theirs["L"] @ theirs["R"], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(layer.base_layer.weight, weight - error)
        assert (error - ours).norm() < error.norm()


@torch.no_grad()
@pytest.mark.daily("dora", "pissa", "copies")
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_samples_from_the_adapter_of_each_kind(folder: Path, kind: str) -> None:
    """Against transformers' own forward over whole sequences, with the trained adapter and with the reference."""
    policy = policy_of(folder, **KINDS[kind][0])
    moved(policy)
    request, sampling = Request([7, 65, 66, 67], 3), Sampling(max_tokens=6, temperature=1.0, seed=5)
    made = []
    for reference in (False, True):
        with policy.as_reference() if reference else nullcontext():
            (found,) = run(native(policy, folder), [request], sampling)
            ids, logprobs = slow_sample(policy, request, 0, sampling)
        assert found.ids == ids
        assert found.logprobs == pytest.approx(logprobs, abs=1e-4)
        made.append(found.logprobs)
    assert made[0] != pytest.approx(made[1], abs=1e-3)


def test_the_plan_counts_every_kind(tmp_path: Path, tiny_folder: Path) -> None:
    config, path = LlamaConfig(**SIZES), write_sft_recipe(tmp_path, tiny_folder)
    hidden, inner, words, layers, rank = 32, 48, 259, 2, 2

    def counted(keys: str) -> Counted:
        return count_parameters(
            load_recipe(str(path), [f"model.lora={{rank: {rank}, targets: [down_proj]{keys}}}"]), config
        )

    plain = counted("")
    assert plain.trained == layers * rank * (hidden + inner)
    pissa = counted(", init: pissa")
    assert (pissa.trained, pissa.parameters) == (plain.trained, plain.parameters + plain.trained)
    copies = counted(", modules_to_save: [lm_head]")
    assert (copies.trained - plain.trained, copies.parameters - plain.parameters) == (words * hidden, words * hidden)
    dora = counted(", dora: true")
    assert dora.trained == plain.trained + layers * hidden
    assert (dora.dora_outputs, dora.dora_weight) == (layers * hidden, hidden * inner)
    assert counted(", layers: [1]").trained == plain.trained // layers


def test_masters_of_copies_have_the_digits_of_the_files(folder: Path) -> None:
    settings = settings_of(folder, modules_to_save=["lm_head"]).model_copy(update={"dtype": "bf16"})
    policy = load_policy(settings, CPU, "sdpa", 0)
    optimizer = Optimizer(policy.trainable(), Optim(), masters=True, fused=False)
    policy.digits.into(optimizer.local_masters())
    (name,) = (name for name in optimizer.master_weights if "lm_head" in name)
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).lm_head.weight
    assert torch.equal(optimizer.master_weights[name], wanted)
    assert not torch.equal(policy.get_parameter(f"model.{name}").float(), wanted)
