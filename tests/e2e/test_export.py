"""What leaves a run loads in plain transformers and says the same; what generation does with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.commands.export import export_run
from lockstep.errors import Refusal
from lockstep.model.load import load_policy
from lockstep.model.weights import restore_weights
from lockstep.recipe import load_recipe
from lockstep.recipe.measure import measure_of
from lockstep.run import checkpoint as checkpoints
from lockstep.run.console import Console
from lockstep.train.offline import train_offline

IDS = torch.tensor([[257, 65, 66, 43, 49, 50, 51, 10]])


def trained(recipe_file: Path, *overrides: str):
    """Train, and return the run folder and the logits of the trained policy itself."""
    recipe = load_recipe(str(recipe_file), list(overrides))
    train_offline(recipe, Console.silent())
    folder = Path(recipe.run.folder) / recipe.run.name
    policy = load_policy(recipe.model, torch.device("cpu"), "sdpa", recipe.run.seed)
    newest = checkpoints.newest(folder / "checkpoints")
    assert newest is not None
    restore_weights(policy.model, newest.weights, "test")
    with torch.no_grad(), policy.generating() as model:
        return folder, model(IDS).logits


@pytest.mark.daily("True")
@pytest.mark.parametrize("lora", [False, True])
def test_the_export_gives_the_policys_logits(recipe_file: Path, tmp_path: Path, lora: bool) -> None:
    folder, logits = trained(recipe_file, *(["model.lora.rank=4", "optim.lr=1e-2"] if lora else []))
    start = AutoModelForCausalLM.from_pretrained(load_recipe(str(recipe_file)).model.path)
    with torch.no_grad():
        assert (start(IDS).logits - logits).abs().max() > 0.01, "training changed nothing"
        for path in (folder / "export", tmp_path / "again"):
            if path.name == "again":
                assert "; verified: " in export_run(folder, path, step=None, best=False, adapter=False)
            theirs = AutoModelForCausalLM.from_pretrained(path)(IDS).logits
            torch.testing.assert_close(theirs, logits, rtol=1e-4, atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder / "export").chat_template


@pytest.mark.slow
def test_the_adapter_alone_is_a_peft_folder(recipe_file: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    folder, logits = trained(recipe_file, "model.lora.rank=4", "optim.lr=1e-2")
    assert "; verified: " in export_run(folder, tmp_path / "adapter", step=None, best=False, adapter=True)
    base = AutoModelForCausalLM.from_pretrained(load_recipe(str(recipe_file)).model.path)
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")(IDS).logits
    torch.testing.assert_close(theirs, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_export_names_what_it_cannot_do(recipe_file: Path, tmp_path: Path) -> None:
    folder, _ = trained(recipe_file)
    with pytest.raises(Refusal, match="has no adapter"):
        export_run(folder, tmp_path / "x", step=None, best=False, adapter=True)
    with pytest.raises(Refusal, match="no checkpoint of step 99"):
        export_run(folder, tmp_path / "x", step=99, best=False, adapter=False)
    with pytest.raises(Refusal, match="not a run folder"):
        export_run(tmp_path / "runs", tmp_path / "x", step=None, best=False, adapter=False)
    with pytest.raises(Refusal, match="is not empty"):
        export_run(folder, folder / "checkpoints", step=None, best=False, adapter=False)


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_and_exported(recipe_file: Path, tmp_path: Path) -> None:
    """A learning rate that ruins the model at the end: the best step is an early one."""
    settings = ["run.steps=6", "checkpoint.every=1", "checkpoint.keep_last=1", "checkpoint.keep_best=1"]
    folder, _ = trained(
        recipe_file, *settings, "optim.lr=0.3", "optim.warmup=4", "optim.schedule=constant", "optim.clip=null"
    )
    steps = checkpoints.steps_in(folder / "checkpoints")
    found = checkpoints.best_step(folder / "checkpoints", measure_of("val/loss"))
    assert found is not None
    best = found[0]
    assert steps == [best, 6]
    assert f"step {best} of" in export_run(folder, tmp_path / "best", step=None, best=True, adapter=False)


@pytest.mark.slow
def test_export_stops_where_training_ended(recipe_file: Path, tmp_path: Path) -> None:
    """A base model whose own end token is another one than the template's."""
    import shutil

    from transformers import GenerationConfig

    base = tmp_path / "base"
    shutil.copytree(load_recipe(str(recipe_file)).model.path, base)
    config = GenerationConfig.from_pretrained(base)
    config.eos_token_id = 0
    config.save_pretrained(base)
    folder, _ = trained(recipe_file, f"model.path={base}")
    end = AutoTokenizer.from_pretrained(base).eos_token_id
    assert GenerationConfig.from_pretrained(folder / "export").eos_token_id == [0, end]
