"""A trained reward model as a folder: sequence classification that gives the scores it was trained to give."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from lockstep.commands.export import export_run
from lockstep.data.batching import micro_batch
from lockstep.errors import Refusal
from lockstep.model.export_folder import export_value_model
from lockstep.model.heads import ValueModel, merge_adapters
from lockstep.model.load import load_value_model
from lockstep.model.resolve import folders_of
from lockstep.model.weights import restore_weights, trained_weights
from lockstep.recipe import load_recipe
from lockstep.recipe.schema import Lora, Model
from lockstep.reward.model import STATS, load_reward_model
from lockstep.run import checkpoint as checkpoints
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.train.offline import train_offline
from lockstep.types import Origin, Question, ScoredExample
from preference_rows import write_recipe

CPU = torch.device("cpu")
SEQUENCES = [[257, 3, 1, 4, 1, 5], [257, 9, 2], [257, 6, 5, 3, 5, 8, 9, 7, 9, 10]]


@torch.no_grad()
def scores(model: ValueModel, sequences: list[list[int]]) -> list[float]:
    rows = [ScoredExample(ids, bytes(len(ids)), Origin("x", 0), positions=(len(ids) - 1,)) for ids in sequences]
    return model.eval()(micro_batch(rows, packed=True, pad_id=0)).tolist()


def trained(path: Path, **settings: Any) -> tuple[Model, ValueModel]:
    """As after some steps: every trained weight moved away from where it started."""
    model = Model(path=str(path), **settings)
    module = load_value_model(model, str(path), CPU, "sdpa", seed=3)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, weight in module.trainable():
            weight += 0.05 * torch.randn(weight.shape, generator=draw)
    return model, module


@pytest.mark.daily("lora1", "None")
@pytest.mark.parametrize("lora", [None, Lora(rank=4, alpha=8.0), Lora(rank=2, alpha=8.0, targets=["q_proj", "v_proj"])])
def test_the_folder_gives_the_trained_scores(tiny_folder: Path, tmp_path: Path, lora: Lora | None) -> None:
    settings, module = trained(tiny_folder, lora=lora)
    wanted = scores(module, SEQUENCES)
    assert max(wanted) - min(wanted) > 0.1
    out = tmp_path / "out"
    export_value_model(settings, trained_weights(module.stored), out, where="test", folders=folders_of(settings))
    config = AutoConfig.from_pretrained(out)
    assert config.architectures == ["Qwen2ForSequenceClassification"]
    assert config.num_labels == 1
    library = AutoModelForSequenceClassification.from_pretrained(out)
    with torch.no_grad():
        alone = [float(library(input_ids=torch.tensor([ids])).logits) for ids in SEQUENCES]
    assert alone == pytest.approx(wanted, abs=1e-5)
    # Rows of unlike length together, by the reward's own padding.
    assert load_reward_model(str(out), CPU).score(SEQUENCES) == pytest.approx(wanted, abs=1e-5)
    again = load_value_model(Model(path=str(out)), str(out), CPU, "sdpa", seed=0)
    assert scores(again, SEQUENCES) == pytest.approx(wanted, abs=1e-5)
    assert AutoTokenizer.from_pretrained(out).chat_template


def test_an_adapter_is_merged_in_fp32_and_rounded_once(tiny_folder: Path, tmp_path: Path) -> None:
    settings, module = trained(tiny_folder, lora=Lora(rank=4, alpha=8.0), dtype="bf16")
    weights = trained_weights(module.stored)
    export_value_model(settings, weights, tmp_path / "out", where="test", folders=folders_of(settings))
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype="auto")
    assert {p.dtype for p in exported.parameters()} == {torch.bfloat16}
    plain = Model(path=str(tiny_folder), lora=settings.lora)
    whole = load_value_model(plain, str(tiny_folder), CPU, "sdpa", seed=0)
    restore_weights(whole, {name: weight.float() for name, weight in weights.items()}, "test")
    layer = whole.decoder.layers[0].self_attn.q_proj
    merged = layer.weight + 2.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    ours = exported.model.layers[0].self_attn.q_proj.weight
    torch.testing.assert_close(ours, merged.detach().bfloat16(), rtol=0, atol=0)


def test_merging_leaves_no_adapter_behind(tiny_folder: Path) -> None:
    _, module = trained(tiny_folder, lora=Lora(rank=4, alpha=8.0))
    before = scores(module, SEQUENCES)
    merge_adapters(module.decoder)
    assert not [name for name in module.state_dict() if "lora" in name or "base_layer" in name]
    assert scores(module, SEQUENCES) == pytest.approx(before, abs=1e-5)


def test_a_reward_model_is_trained_on_and_exported_again(tiny_folder: Path, tmp_path: Path) -> None:
    settings, module = trained(tiny_folder)
    export_value_model(
        settings, trained_weights(module.stored), tmp_path / "first", where="test", folders=folders_of(settings)
    )
    settings, module = trained(tmp_path / "first")
    export_value_model(
        settings, trained_weights(module.stored), tmp_path / "second", where="test", folders=folders_of(settings)
    )
    again = load_reward_model(str(tmp_path / "second"), CPU)
    assert again.score(SEQUENCES) == pytest.approx(scores(module, SEQUENCES), abs=1e-5)


@pytest.mark.daily("ends0", "ends2")
@pytest.mark.parametrize("ends", [[258], [256, 257, 258], [258, 10, 257, 0, 1]])
def test_padding_ends_no_text(tiny_folder: Path, tmp_path: Path, ends: list[int]) -> None:
    """The tokenizer's own padding token is 258; where texts end with it the library would score the token before."""
    settings, module = trained(tiny_folder)
    export_value_model(
        settings,
        trained_weights(module.stored),
        tmp_path / "out",
        where="test",
        folders=folders_of(settings),
        end_tokens=ends,
    )
    reward = load_reward_model(str(tmp_path / "out"), CPU)
    assert reward.model.config.pad_token_id not in ends
    sequences = [[257, 5, 6, 7, 8, 9, end] for end in ends] + [[257, 5, ends[0]]]
    assert reward.score(sequences) == pytest.approx(scores(module, sequences), abs=1e-5)


def test_the_tokenizers_padding_is_kept_where_it_can_be(tiny_folder: Path, tmp_path: Path) -> None:
    settings, module = trained(tiny_folder)
    export_value_model(
        settings,
        trained_weights(module.stored),
        tmp_path / "out",
        where="test",
        folders=folders_of(settings),
        end_tokens=[10],
    )
    assert AutoConfig.from_pretrained(tmp_path / "out").pad_token_id == 258


@pytest.mark.daily("True")
@pytest.mark.parametrize("lora", [False, True])
def test_a_whole_run_ends_in_a_reward(tiny_folder: Path, tmp_path: Path, lora: bool) -> None:
    words = ["optim.lr=1e-2", *(["model.lora.rank=4"] if lora else [])]
    recipe = load_recipe(str(write_recipe(tmp_path, tiny_folder, "rm")), words)
    train_offline(recipe, Console.silent())
    run = tmp_path / "runs" / "run"
    module = load_value_model(recipe.model, str(tiny_folder), CPU, "sdpa", seed=0)
    newest = checkpoints.newest(run / "checkpoints")
    assert newest is not None
    restore_weights(module, newest.weights, "test")
    raw = scores(module, SEQUENCES)
    last = read_metrics(run / "metrics.jsonl")[-1][1]
    stats = json.loads((run / "export" / STATS).read_text())
    assert stats == pytest.approx({"mean": last["val/score_mean"], "std": last["val/score_std"]})
    assert stats["std"] > 1e-3
    reward = load_reward_model(str(run / "export"), CPU)
    assert reward.score(SEQUENCES) == pytest.approx([(s - stats["mean"]) / stats["std"] for s in raw], abs=1e-3)
    # Rows of the run end with a line break, after the template's end of a turn.
    question = Question("x", [{"role": "user", "content": "1+1?"}], "2", Origin("x", 0))
    assert reward.encode(question, "#### 2")[-1] == 10
    assert newest.state.end_tokens == [10]


@pytest.mark.slow
def test_the_scores_spread_outlives_a_resume(tiny_folder: Path, tmp_path: Path) -> None:
    """Step 5 is saved between validations: its spread is that of step 3, also when the run broke off after step 4."""
    words = ["run.steps=6", "val.every=3", "checkpoint.every=1", "checkpoint.keep_last=9", "run.export=false"]
    recipe = load_recipe(str(write_recipe(tmp_path, tiny_folder, "rm")), words)
    train_offline(recipe, Console.silent())
    steps = tmp_path / "runs" / "run" / "checkpoints"
    before = checkpoints.read(checkpoints.folder_of(steps, 5)).state.carried
    third = read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")[2][1]
    assert before == {"score_mean": third["val/score_mean"], "score_std": third["val/score_std"]}
    for step in (5, 6):
        shutil.rmtree(checkpoints.folder_of(steps, step))
    train_offline(recipe, Console.silent())
    assert checkpoints.read(checkpoints.folder_of(steps, 5)).state.carried == before


def test_without_validation_rows_scores_are_said_to_be_raw(tiny_folder: Path, tmp_path: Path, capsys) -> None:
    recipe = load_recipe(str(write_recipe(tmp_path, tiny_folder, "rm")), ["data.val=[]"])
    train_offline(recipe, Console.open())
    export = tmp_path / "runs" / "run" / "export"
    assert not (export / STATS).exists()
    said = " ".join(capsys.readouterr().out.split())
    assert "scores of the exported model are not normalised" in said
    assert "data.val" in said
    reward = load_reward_model(str(export), CPU)
    assert (reward.mean, reward.std) == (0.0, 1.0)


@pytest.mark.slow
def test_what_cannot_be_exported_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    recipe = load_recipe(str(write_recipe(tmp_path, tiny_folder, "rm")), ["model.lora.rank=4", "run.steps=2"])
    train_offline(recipe, Console.silent())
    run = tmp_path / "runs" / "run"
    with pytest.raises(Refusal, match="a reward model also has a trained head"):
        export_run(run, tmp_path / "x", step=None, best=False, adapter=True)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(Refusal, match="is not empty"):
        export_run(run, tmp_path / "taken", step=None, best=False, adapter=False)
    assert "exported step 2" in export_run(run, tmp_path / "fine", step=None, best=False, adapter=False)


def test_a_process_reward_model_keeps_its_words(tiny_folder: Path, tmp_path: Path) -> None:
    recipe = load_recipe(str(write_recipe(tmp_path, tiny_folder, "prm")), ['prm.tokens=["Y","N"]'])
    train_offline(recipe, Console.silent())
    kept = json.loads((tmp_path / "runs" / "run" / "export" / "process_reward.json").read_text())
    assert kept == {"placeholder": "@", "tokens": ["Y", "N"]}
