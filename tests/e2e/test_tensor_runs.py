"""Tensor parallelism: processes that divide every module compute, generate and train what one does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

import job_ranks
import tensor_cuda
import tensor_ranks
from commands import lockstep, torchrun
from conftest import write_online_recipe, write_sft_recipe
from lockstep.model.tiny import write_tiny
from lockstep.recipe import load_recipe
from lockstep.run.checkpoint import folder_of, steps_in
from lockstep.train.start import run_recipe
from preference_rows import write_recipe
from runs import close, facts, stored

pytestmark = pytest.mark.torchrun
# eps above the gradients' noise: Adam's first steps would blow a rounding difference up to a whole step.
COMMON = ["optim.eps=1e-4"]
# Sharp enough that samples tell two models apart.
SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads, and two of keys and values."""
    folder = tmp_path_factory.mktemp("divisible") / "model"
    write_tiny(folder, hidden=128, layers=2)
    return folder


@pytest.mark.parametrize(("ranks", "models"), [(2, ["qwen3"]), *((count, []) for count in (2, 4, 6))])
@pytest.mark.slow
def test_divided_models_are_whole_ones(ranks: int, models: list[str]) -> None:
    """Log-probs and gradients of several architectures, norms and slices; and that what is wrong is found."""
    done = torchrun(*models, program=Path(tensor_ranks.__file__), processes=ranks)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_ranks_of_one_accelerator_do_can_be_done_on_a_cpu() -> None:
    """The program of test_cuda_tensor.py, with its own gathering, where there is no such device."""
    done = torchrun("--device", "cpu", program=Path(tensor_cuda.__file__))
    assert done.returncode == 0, done.stderr


def weights(run: Path, part: str = "weights") -> Mapping[str, torch.Tensor]:
    return stored(run, steps_in(run / "checkpoints")[-1], part)


def divided(recipe: Path, processes: int, *words: str, layout: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """The run folders of one process and of several that divide the model by two."""
    one = lockstep("train", recipe, "run.name=one", *COMMON, *words)
    assert one.returncode == 0, one.stderr
    keys = ["run.name=several", "parallel.tensor_parallel=2", *layout]
    several = torchrun("train", recipe, *keys, *COMMON, *words, processes=processes)
    assert several.returncode == 0, several.stderr
    if "run.export=false" not in words:
        told = ["".join(done.stdout.split()) for done in (one, several)]  # long lines are wrapped
        assert [text.count("verified:loadedbyplain") for text in told] == [1, 1]
    folder = recipe.parent / "runs"
    return folder / "one", folder / "several"


def assert_same(one: Path, several: Path) -> None:
    assert len(facts(one)) == len(facts(several)) > 1
    for (_, ours), (_, theirs) in zip(facts(one), facts(several), strict=True):
        assert ours.keys() == theirs.keys()
        assert theirs == pytest.approx(ours, rel=1e-4, abs=2e-5)
    assert close(weights(several), weights(one))


def samples(run: Path) -> list[tuple[str, float]]:
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return [(sample["response"], sample["score"]) for sample in lines]


@pytest.mark.parametrize(
    ("method", "processes", "layout", "words"),
    [
        ("grpo", 2, (), ["run.steps=2"]),
        pytest.param("ppo", 2, ("parallel.offload=optimizer",), [], marks=pytest.mark.slow),
        # Three groups for two prompts: one of them generates nothing.
        pytest.param("grpo", 6, (), ["batch.prompts=2", "batch.prompts_per_update=1"], marks=pytest.mark.slow),
        pytest.param("ppo", 4, ("parallel.replicate=2",), ["rollout.cache_gb=1e-4"], marks=pytest.mark.slow),
        pytest.param("ppo", 2, (), ["model.lora.rank=4", "algorithm.kl.where=reward"], marks=pytest.mark.slow),
    ],
)
def test_online_methods(
    model: Path, tmp_path: Path, method: str, processes: int, layout: tuple[str, ...], words: list[str]
) -> None:
    """Samples, scores, metrics and weights; with several updates a step, so that old log-probs are asked for too."""
    recipe = write_online_recipe(tmp_path, model)
    words = [f"method={method}", "log.samples=99", "batch.prompts_per_update=2", "algorithm.kl.where=loss", *words]
    words += ["rollout.n=1", "critic.lr=1e-3"] if method == "ppo" else []
    one, several = divided(recipe, processes, *words, layout=layout)
    assert samples(several) == samples(one)
    assert_same(one, several)
    if method == "ppo":
        assert close(weights(several, "critic"), weights(one, "critic"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "layout", "words"),
    [
        (2, (), ["val.every=3", "model.gradient_checkpointing=true"]),
        (4, ("parallel.shard=2",), ["batch.rows_per_update=3", "val.every=3"]),
        (6, ("parallel.shard=3",), ["batch.tokens=null", "batch.micro_batch_size=2"]),
        (8, ("parallel.shard=2", "parallel.replicate=2"), []),
        (4, (), ["model.lora.rank=4", "optim.lr=1e-2", "model.gradient_checkpointing=true"]),
    ],
)
def test_supervised_fine_tuning(
    model: Path, tmp_path: Path, processes: int, layout: tuple[str, ...], words: list[str]
) -> None:
    one, several = divided(write_sft_recipe(tmp_path, model), processes, *words, layout=layout)
    assert_same(one, several)
    # One Hugging Face folder, whatever wrote the slices.
    exports = [load_file(run / "export" / "model.safetensors") for run in (one, several)]
    assert close(*exports)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "processes"), [("dpo", 2), ("dpo", 4), ("rm", 2), ("distill", 2)])
def test_methods_that_compare_and_judge(model: Path, tmp_path: Path, method: str, processes: int) -> None:
    words = []
    if method == "distill":
        write_tiny(tmp_path / "teacher", seed=5, hidden=128, layers=1)
        words = [f"distill.teacher={tmp_path / 'teacher'}"]
    one, several = divided(write_recipe(tmp_path, model, method), processes, *words)
    assert_same(one, several)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SIZES, head_dim=16),
        Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
    ],
    ids=["norms of heads", "experts"],
)
def test_other_models(model: Path, tmp_path: Path, config: PreTrainedConfig) -> None:
    """Experts that the files have one by one: each process reads its own."""
    torch.manual_seed(0)
    folder = shutil.copytree(model, tmp_path / "model")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = ["run.steps=2", "log.samples=99", "batch.prompts_per_update=2"]
    one, several = divided(write_online_recipe(tmp_path, folder), 4, *words)
    assert samples(several) == samples(one)
    assert_same(one, several)
    exports = [load_file(run / "export" / "model.safetensors") for run in (one, several)]
    assert close(*exports)


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(model: Path, tmp_path: Path) -> None:
    """Two ranks that divide a model, then one process, then four as two groups; the curve is that of one process."""
    recipe = write_sft_recipe(tmp_path, model)
    words = [*COMMON, "checkpoint.every=2", "checkpoint.keep_last=9", "val.every=2"]
    assert lockstep("train", recipe, "run.name=one", *words).returncode == 0
    whole = torchrun("train", recipe, "run.name=moved", *words, "parallel.tensor_parallel=2")
    assert whole.returncode == 0, whole.stderr
    one, run = tmp_path / "runs" / "one", tmp_path / "runs" / "moved"
    assert_same(one, run)
    shutil.rmtree(folder_of(run / "checkpoints", 6))
    shutil.rmtree(folder_of(run / "checkpoints", 4))
    alone = lockstep("train", recipe, "run.name=moved", *words)
    assert alone.returncode == 0, alone.stderr
    assert "after step 2" in " ".join(alone.stdout.split())
    assert_same(one, run)
    shutil.rmtree(folder_of(run / "checkpoints", 6))
    four = torchrun("train", recipe, "run.name=moved", *words, "parallel.tensor_parallel=2", processes=4)
    assert four.returncode == 0, four.stderr
    assert "after step 4" in " ".join(four.stdout.split())
    assert_same(one, run)


@pytest.mark.slow
def test_bf16_with_masters_learns_as_one_process(model: Path, tmp_path: Path) -> None:
    one, several = divided(write_sft_recipe(tmp_path, model), 4, "model.dtype=bf16", "run.export=false")
    losses = [[told["train/loss"] for _, told in facts(run)] for run in (one, several)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


@pytest.mark.slow
def test_ranks_that_go_on_as_a_tensor_group_draw_the_same_dropout(model: Path, tmp_path: Path) -> None:
    """Two sharded ranks save; a tensor group of two and a single process continue with the masks of the first rank.

    The adapters see whole inputs (`q_proj`, `v_proj`), so both draw the same masks and must compute the same.
    """
    recipe = write_sft_recipe(tmp_path, model)
    words = [*COMMON, "optim.schedule=constant", "optim.warmup=0", "optim.lr=1e-2", "run.export=false"]
    words += ["model.lora.rank=4", "model.lora.dropout=0.5", "model.lora.targets=[q_proj,v_proj]"]
    words += ["checkpoint.every=1", "checkpoint.keep_last=9"]
    jobs = [[str(recipe), *words, "run.steps=1"], [str(recipe), *words, "run.steps=3", "parallel.tensor_parallel=2"]]
    done = torchrun(job_ranks.write_jobs(tmp_path, jobs), program=job_ranks.PROGRAM, processes=2)
    assert done.returncode == 0, done.stderr
    one, divided_run = tmp_path / "runs" / "one", tmp_path / "runs" / "run"
    shutil.copytree(divided_run, one)
    for step in (2, 3):
        shutil.rmtree(folder_of(one / "checkpoints", step))
    run_recipe(load_recipe(str(recipe), [*words, "run.steps=3", "run.name=one"]))
    assert_same(one, divided_run)
