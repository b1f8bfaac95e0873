"""`lockstep plan` refuses whatever `lockstep train` refuses before weights load: one broken recipe for each check."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moving_models import longrope
from small_models import SIZES, write_model
from transformers import Lfm2Config, MixtralConfig

from conftest import write_jsonl
from lockstep.commands.plan import show_plan
from lockstep.device.base import Memory
from lockstep.device.cpu import Cpu
from lockstep.errors import Problem, Refusal
from lockstep.model.trials import TRIALS
from lockstep.preflight import checks
from lockstep.preflight.checks import CHECKS, CheckStage, PreflightCheck
from lockstep.recipe import load_recipe
from lockstep.train.start import run_recipe
from vision_families import write_family

CHAT = [{"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}] * 4
PAIRS = [{"prompt": "x" * 12, "chosen": "a" * 30, "rejected": "b" * 30}] * 4
GOOD = [{"prompt": "x", "response": "y", "label": True}] * 4
PROMPTS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"ground_truth": "2"},
    }
] * 4
ROWS: dict[str, list[Any]] = {"sft": CHAT, "rm": PAIRS, "dpo": PAIRS, "kto": GOOD, "grpo": PROMPTS}


@dataclass
class Broken:
    """A recipe in `folder` that a case breaks. `method` selects its rows."""

    folder: Path
    tiny: Path
    patch: pytest.MonkeyPatch

    def model(self, *removed: str, **config: Any) -> str:
        """A copy of the tiny model without some files and with other settings."""
        folder = self.folder / "copy"
        shutil.copytree(self.tiny, folder)
        for name in removed:
            (folder / name).unlink()
        file = folder / "config.json"
        if config:
            file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | config), encoding="utf-8")
        return f"model.path={folder}"

    def other_model(self, config: Any) -> str:
        return f"model.path={write_model(self.folder / 'other', config, self.tiny)}"

    def function(self, text: str) -> str:
        file = self.folder / "functions.py"
        file.write_text(text, encoding="utf-8")
        return f"{file}:function"

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "run"

    def finished(self) -> None:
        (self.run / "export").mkdir(parents=True)
        write_jsonl(self.run / "metrics.jsonl", [{"step": 1, "data": {}}])


def alone(world: Any, *rest: Any) -> Any:
    return world


def one_process(broken: Broken) -> None:
    """Ranks are not grouped at the start of `train`, so that its checks see the recipe."""
    broken.patch.setattr("lockstep.run.runtime.with_context", alone)
    broken.patch.setattr("lockstep.run.runtime.with_tensor", alone)


def context_ranks(broken: Broken) -> list[str]:
    one_process(broken)
    return ["parallel.context_parallel=2"]


def context_division(broken: Broken) -> list[str]:
    """The layers of Lfm2 with a convolution carry a state from token to token."""
    one_process(broken)
    broken.patch.setattr("lockstep.preflight.checks.refuse_ranks", lambda *_: None)
    config = Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])
    return [broken.other_model(config), "parallel.context_parallel=2"]


def tensor_division(broken: Broken) -> list[str]:
    one_process(broken)
    return ["parallel.tensor_parallel=3"]


def expert_division(broken: Broken) -> list[str]:
    """The tiny model has no experts."""
    one_process(broken)
    broken.patch.setattr("lockstep.run.runtime.with_experts", alone, raising=False)
    return ["parallel.expert_parallel=2"]


def packages(broken: Broken) -> list[str]:
    broken.patch.setattr(
        checks, "unfit_packages", lambda *_: [Problem("package torch", "does not match", code="unfit-package")]
    )
    return []


def resumed_run(broken: Broken) -> list[str]:
    broken.run.mkdir(parents=True)
    return ["run.resume=never"]


def finished_run(broken: Broken) -> list[str]:
    broken.finished()
    return []


def dtype_of_device(broken: Broken) -> list[str]:
    broken.patch.setattr(Cpu, "supports", lambda self, dtype: dtype == torch.float32)
    return ["model.dtype=fp16"]


def no_low_precision(broken: Broken, *words: str) -> list[str]:
    broken.patch.setattr(Cpu, "no_low_precision", lambda self, precision: "the device has no matmuls of 8 bits")
    return list(words)


def tiled_mlps(broken: Broken) -> list[str]:
    return [broken.other_model(MixtralConfig(**SIZES, num_local_experts=4)), "model.tiled_mlp=8"]


def routers(broken: Broken) -> list[str]:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return [broken.other_model(MixtralConfig(**SIZES, **experts, router_jitter_noise=0.1))]


def classifier(broken: Broken) -> list[str]:
    broken.patch.setattr("transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", {})
    return []


def async_worker(broken: Broken) -> list[str]:
    broken.patch.setattr(Cpu, "generates_beside", False)
    return ["rollout.max_staleness=1"]


def engine_device(broken: Broken) -> list[str]:
    broken.patch.setattr(Cpu, "meets_itself", False)
    return ["rollout.engine=vllm", "rollout.weight_sync=collective"]


def served_images(broken: Broken) -> list[str]:
    """Images of Gemma 3 were not tested with vLLM."""
    broken.patch.setattr("lockstep.rollout.servers.server_process.refuse_absent", lambda *_: None)
    folder = write_family("gemma3", broken.folder / "family")
    return [f"model.path={folder}", "model.vision=freeze", "rollout.engine=vllm"]


def trackers(broken: Broken) -> list[str]:
    def absent(name: str) -> Any:
        raise Refusal.at("package swanlab", "is not installed", code="missing-package")

    broken.patch.setattr("lockstep.run.trackers.tracker.imported", absent)
    return ["log.track=[swanlab]"]


def checkpoint_space(broken: Broken) -> list[str]:
    broken.patch.setattr("lockstep.run.checkpoint.shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    return []


def device_memory(broken: Broken) -> list[str]:
    broken.patch.setattr(Cpu, "memory", lambda self: Memory(2**20, 2**20, 0, 0))
    return []


Case = tuple[str, Callable[[Broken], list[str]]]
# For each check: the method of the recipe, and a function that breaks it and returns its changes.
CASES: dict[str, Case] = {
    "parallel.context_ranks": ("sft", context_ranks),
    "parallel.context_division": ("sft", context_division),
    "parallel.device_mesh": ("sft", lambda broken: ["parallel.shard=2"]),
    "parallel.offloaded_weights": ("sft", lambda broken: ["parallel.offload=params"]),
    "parallel.tensor_division": ("sft", tensor_division),
    "parallel.expert_division": ("sft", expert_division),
    "device.packages": ("sft", packages),
    "run.resumed_run": ("sft", resumed_run),
    "run.finished_run": ("sft", finished_run),
    "log.trackers": ("sft", trackers),
    "model.dtype_of_device": ("sft", dtype_of_device),
    "model.matmul_of_device": ("sft", lambda broken: no_low_precision(broken, "model.matmul=fp8", "model.dtype=bf16")),
    "model.open_tokenizer": ("sft", lambda broken: [broken.model("tokenizer.json", "tokenizer_config.json")]),
    "model.open_config": ("sft", lambda broken: [broken.model("config.json")]),
    "model.tokenizer_of_model": ("sft", lambda broken: [broken.model(vocab_size=100)]),
    "model.routers": ("sft", routers),
    "model.replayed_routers": ("grpo", lambda broken: ["algorithm.routing_replay=rollout"]),
    "model.classifier": ("rm", classifier),
    "model.architectures": (
        "sft",
        lambda broken: [broken.model(quantization_config={"quant_method": "gptq", "bits": 4})],
    ),
    "model.tiled_mlps": ("sft", tiled_mlps),
    "model.missing_weights": ("sft", lambda broken: [broken.model("model.safetensors")]),
    "rollout.precision_of_device": ("grpo", lambda broken: no_low_precision(broken, "rollout.precision=int8")),
    "rollout.async_worker": ("grpo", async_worker),
    "rollout.engine_package": ("grpo", lambda broken: ["rollout.engine=vllm"]),
    "rollout.engine_device": ("grpo", engine_device),
    "rollout.served_images": ("grpo", served_images),
    "rollout.stop_ids": ("grpo", lambda broken: ["rollout.stop_ids=[99999]"]),
    "rollout.rollout_function": (
        "grpo",
        lambda broken: [f"rollout.function={broken.function('async def function(*args): return 1')}"],
    ),
    "rollout.environment": (
        "grpo",
        lambda broken: [f"rollout.environment={broken.function('class Other: ...').replace(':function', ':Other')}"],
    ),
    "rollout.cached_positions": ("grpo", lambda broken: [broken.other_model(longrope()), "rollout.max_tokens=40"]),
    "val.read_questions_of": ("sft", lambda broken: ["val.questions=absent.jsonl"]),
    "val.long_questions": (
        "grpo",
        lambda broken: [f"val.questions={broken.folder / 'train.jsonl'}", "val.max_new_tokens=100000"],
    ),
    "data.read_limit": ("sft", lambda broken: ["data.max_tokens=100000", "batch.tokens=100000"]),
    "data.read_training": ("sft", lambda broken: ["data.train=absent.jsonl"]),
    "data.read_validation": ("sft", lambda broken: ["data.val=absent.jsonl"]),
    "data.method_rows": ("kto", lambda broken: []),
    "data.placeholder_tokens": ("sft", lambda broken: [broken.model(image_token_id=ord("1"))]),
    "batch.oversized_rows": ("dpo", lambda broken: ["batch.tokens=94"]),
    "batch.moving_row_positions": ("dpo", lambda broken: [broken.other_model(longrope())]),
    "reward.reward_rules": ("grpo", lambda broken: ["reward.weights.remote=1"]),
    "algorithm.advantage_function": (
        "grpo",
        lambda broken: [f"algorithm.advantage={broken.function('def function(signals): return 1')}"],
    ),
    "algorithm.loss_function": (
        "grpo",
        lambda broken: [f"algorithm.loss={broken.function('def function(tokens): return tokens.old_K')}"],
    ),
    "memory.device_memory": ("sft", device_memory),
    "checkpoint.checkpoint_space": ("sft", checkpoint_space),
}
REWARD_CASE: Case = (
    "grpo",
    lambda broken: [f"reward.function={broken.function('def function(**row): return float(chr(120))')}"],
)


def all_checks() -> dict[str, PreflightCheck]:
    return {f"{section}.{check.function.__name__}": check for section, listed in CHECKS.items() for check in listed}


def test_every_check_has_a_broken_recipe() -> None:
    assert list(CASES) == list(all_checks())


@pytest.fixture
def broken(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Broken:
    def loaded(*_: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("lockstep.train.training.load_models", loaded)
    return Broken(tmp_path, tiny_folder, monkeypatch)


def recipe_of(broken: Broken, case: Case) -> Any:
    method, changes = case
    values = {
        "method": method,
        "device": "cpu",
        "run": {"folder": str(broken.folder / "runs"), "name": "run", "steps": 1},
        "model": {"path": str(broken.tiny)},
        "data": {"train": str(write_jsonl(broken.folder / "train.jsonl", ROWS[method]))},
        "batch": {"prompts": 2} if method == "grpo" else {"rows_per_update": 2},
        "rollout": {"n": 2, "max_tokens": 8} if method == "grpo" else {},
    }
    file = broken.folder / "recipe.yaml"
    file.write_text(json.dumps(values), encoding="utf-8")
    return load_recipe(str(file), changes(broken))


def refused(command: Callable[[], object]) -> list[Problem]:
    with pytest.raises(Refusal) as refusal:
        command()
    return refusal.value.problems


@pytest.mark.daily(every=4)
@pytest.mark.parametrize("name", CASES)
def test_plan_refuses_what_train_refuses(name: str, broken: Broken, capsys: pytest.CaptureFixture[str]) -> None:
    found: list[PreflightCheck] = []
    problems_of = PreflightCheck.problems

    def problems(self: PreflightCheck, context: Any) -> list[Problem]:
        listed = problems_of(self, context)
        found.extend([self] if listed else [])
        return listed

    broken.patch.setattr(PreflightCheck, "problems", problems)
    recipe, check = recipe_of(broken, CASES[name]), all_checks()[name]
    by_train = refused(lambda: run_recipe(recipe))
    assert check in found, by_train
    found.clear()
    if check.in_plan == "remark":
        capsys.readouterr()
        show_plan(recipe, 1)
        printed = "".join(capsys.readouterr().out.split())
        assert all("".join(f"{problem.where} {problem.why}".split()) in printed for problem in by_train)
        assert "`lockstep train` would refuse".replace(" ", "") in printed
    else:
        assert refused(lambda: show_plan(recipe, 1)) == by_train
    assert check.in_plan == "last" or check in found


def test_plan_refuses_rewards_that_train_refuses(broken: Broken) -> None:
    recipe = recipe_of(broken, REWARD_CASE)
    by_train = refused(lambda: run_recipe(recipe))
    assert "reward.function" in {problem.where for problem in by_train}
    assert refused(lambda: show_plan(recipe, 1)) == by_train


def test_all_problems_are_reported_together(broken: Broken) -> None:
    recipe = recipe_of(
        broken, ("grpo", lambda _: ["parallel.shard=2", "rollout.stop_ids=[99999]", "data.train=absent"])
    )
    where = [problem.where for problem in refused(lambda: show_plan(recipe, 1))]
    assert [part.split()[0] for part in where] == ["parallel.shard", "rollout.stop_ids", "absent"]


def test_every_trial_names_the_function_that_runs_it() -> None:
    from importlib import import_module

    assert len({trial.name for trial in TRIALS}) == len(TRIALS)
    for trial in TRIALS:
        module, _, function = trial.function.rpartition(".")
        assert callable(getattr(import_module(f"lockstep.{module}"), function)), trial.name


def test_a_missing_tracker_is_reported_before_the_data_is_read(broken: Broken) -> None:
    """Encoding rows may take minutes. The files of the data and the settings are still checked."""
    stages: list[CheckStage] = []
    problems_of = PreflightCheck.problems

    def problems(self: PreflightCheck, context: Any) -> list[Problem]:
        stages.append(self.stage)
        return problems_of(self, context)

    broken.patch.setattr(PreflightCheck, "problems", problems)
    recipe = recipe_of(broken, ("sft", lambda _: [*trackers(broken), "parallel.shard=2", "data.train=absent"]))
    where = [problem.where.split()[0] for problem in refused(lambda: run_recipe(recipe))]
    assert where == ["parallel.shard", "package", "absent"]
    assert max(stages) < CheckStage.READ
