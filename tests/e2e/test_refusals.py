"""What must be refused before or during training, with the row or key named and nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import FalconConfig

from conftest import chat_rows, run, write_jsonl
from lockstep.errors import Refusal
from lockstep.recipe import load_recipe
from lockstep.run import checkpoint as checkpoints
from lockstep.run.console import Console
from lockstep.run.files import checksum
from lockstep.run.metrics import read_metrics
from lockstep.train.offline import train_offline


def train(recipe_file: Path, *overrides: str) -> None:
    train_offline(load_recipe(str(recipe_file), list(overrides)), Console.silent())


def damaged_model(tiny_folder: Path, tmp_path: Path, change) -> Path:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_folder, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_every_problem_of_the_inputs_is_told_at_once(recipe_file: Path, tmp_path: Path) -> None:
    rows = [*chat_rows(3), {"messages": [{"role": "user", "content": "hi"}]}]
    write_jsonl(tmp_path / "bad.jsonl", rows)
    with pytest.raises(Refusal) as caught:
        train(
            recipe_file,
            f"data.train={tmp_path / 'bad.jsonl'}",
            "data.val=nowhere.jsonl",
            "val.questions=neither.parquet",
        )
    text = str(caught.value)
    for part in ("bad.jsonl line 4", "no assistant turn", "nowhere.jsonl", "neither.parquet"):
        assert part in text


def test_rows_longer_than_the_limit_name_themselves(recipe_file: Path) -> None:
    with pytest.raises(Refusal, match=r"train\.jsonl line \d+ \[row-too-long\]: .*data.max_tokens=48"):
        train(recipe_file, "data.max_tokens=48")


def test_dropped_rows_are_counted_and_said(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_offline(load_recipe(str(recipe_file), ["data.max_tokens=60", "data.overlong=drop"]), Console.open(plain=True))
    output = capsys.readouterr().out
    _, first = read_metrics(recipe_file.parent / "runs" / "run" / "metrics.jsonl")[0]
    dropped = int(first["data/dropped"])
    assert 0 < dropped < 48
    assert first["data/rows"] == 48 - dropped
    assert f"{dropped} rows were dropped: over the limit" in output
    assert f"{dropped} rows dropped, 0 truncated" in output


def test_a_loss_that_is_not_finite_names_rows_and_keeps_the_checkpoint(recipe_file: Path, tmp_path: Path) -> None:
    train(recipe_file, "checkpoint.every=3", "run.steps=3", "optim.schedule=constant")
    run = tmp_path / "runs" / "run"
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*.safetensors") if "checkpoints" in str(p)}
    # A poisoned weight in an otherwise whole checkpoint stands for a run that diverges after it.
    path = run / "checkpoints" / "step_3"
    weights = load_file(path / "model.safetensors")
    name = next(iter(weights))
    weights[name][3] = float("nan")
    save_file(weights, path / "model.safetensors")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["model.safetensors"] = {
        "bytes": (path / "model.safetensors").stat().st_size,
        "sha256": checksum(path / "model.safetensors"),
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    before[path / "model.safetensors"] = (path / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(Refusal, match="not finite") as caught:
        train(recipe_file, "checkpoint.every=3", "run.steps=6", "optim.schedule=constant")
    assert "train.jsonl line" in caught.value.problems[0].where
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert checkpoints.steps_in(run / "checkpoints") == [3]


def test_a_gradient_that_is_not_finite_stops_the_run(recipe_file: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """Weights so large that the loss is finite and its gradient is not."""

    def blow_up(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"].fill_(1e38)
        weights["model.embed_tokens.weight"].mul_(1e-38)

    folder = damaged_model(tiny_folder, tmp_path, blow_up)
    with pytest.raises(Refusal, match=r"gradient norm is (inf|nan)"):
        train(recipe_file, f"model.path={folder}")


def test_a_tokenizer_with_more_tokens_than_the_embedding(recipe_file: Path, tiny_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tmp_path / "foreign"
    shutil.copytree(tiny_folder, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<extra{i}>" for i in range(300)])
    tokenizer.save_pretrained(folder)
    with pytest.raises(Refusal, match=r"<extra299>.*the embedding has \d+ rows"):
        train(recipe_file, f"model.path={folder}")


def quantized(folder: Path) -> list[str]:
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    (folder / "config.json").write_text(json.dumps(settings))
    return [f"model.path={folder}"]


def unsupported(folder: Path) -> list[str]:
    """A config of Falcon in front of weights of another model: what loading would say of it comes first."""
    size = {"vocab_size": 600, "hidden_size": 64, "num_hidden_layers": 2}
    FalconConfig(**size, num_attention_heads=4).save_pretrained(folder)
    return [f"model.path={folder}"]


def no_wandb(folder: Path) -> list[str]:
    if find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    return ["log.track=[wandb]"]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (quantized, "its weights are quantized (awq)"),
        (unsupported, "do not use transformers' attention interface"),
        (no_wandb, "sink wandb"),
    ],
)
def test_plan_refuses_what_train_refuses_before_loading(
    recipe_file: Path,
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    broken: Callable[[Path], list[str]],
    why: str,
) -> None:
    shutil.copytree(tiny_folder, tmp_path / "other")
    words = broken(tmp_path / "other")
    said = []
    for verb in ("plan", "train"):
        assert run(verb, recipe_file, *words) == 2
        said.append(capsys.readouterr().err.split("problem", 1)[1])
    assert why in " ".join(said[0].split())
    assert said[0] == said[1]


def test_plan_tries_the_rewards(online_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text("def letters(data_source, solution_str, **more):\n    return 'high'\n")
    assert run("plan", online_file) == 2
    assert "reward.function" in capsys.readouterr().err


def test_plan_says_that_weights_are_missing(
    recipe_file: Path, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan needs the config alone; training is refused before a row is encoded. A folder in the place of the weights
    is no weights either."""
    shutil.copytree(tiny_folder, tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").unlink()
    for why in ("holds no weights: there is no model.safetensors", "model.safetensors is a folder, not a file"):
        assert run("plan", recipe_file, f"model.path={tmp_path / 'other'}") == 0
        assert why in " ".join("".join(capsys.readouterr()).split())
        assert run("train", recipe_file, f"model.path={tmp_path / 'other'}") == 2
        assert why in " ".join(capsys.readouterr().err.split())
        (tmp_path / "other" / "model.safetensors").mkdir(exist_ok=True)


def test_weights_that_would_start_random(recipe_file: Path, tiny_folder: Path, tmp_path: Path) -> None:
    folder = damaged_model(tiny_folder, tmp_path, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(Refusal, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        train(recipe_file, f"model.path={folder}")


@pytest.mark.slow
def test_what_cannot_fit_is_refused_before_loading(recipe_file: Path, tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "huge"
    folder.mkdir()
    for file in tiny_folder.iterdir():
        if file.name != "model.safetensors":
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 200}
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()  # never read
    with pytest.raises(Refusal, match=r"needs about [\d.]+ GiB") as caught:
        train(recipe_file, f"model.path={folder}")
    assert "gradient_checkpointing" in caught.value.problems[0].remedy


def test_two_runs_cannot_share_a_folder(recipe_file: Path, tmp_path: Path) -> None:
    from lockstep.run.folder import RunFolder

    folder = RunFolder(tmp_path / "runs" / "run")
    folder.create()
    with folder.lock(), pytest.raises(Refusal, match=f"process {os.getpid()}"):
        train(recipe_file)


def _small_disk(path: Path, mebibytes: int) -> bool:
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(path)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_full_disk_is_refused_before_anything_is_overwritten(recipe_file: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    if not _small_disk(disk, 10):
        pytest.skip("mounting a small disk needs privileges this machine does not give")
    try:
        train(recipe_file, f"run.folder={disk}", "run.steps=3", "run.export=false", "optim.schedule=constant")
        whole = {p: p.read_bytes() for p in (disk / "run" / "checkpoints").rglob("*") if p.is_file()}
        assert whole
        (disk / "ballast").write_bytes(b"x" * shutil.disk_usage(disk).free)
        with pytest.raises(Refusal, match=r"\[disk-full\]: .*[\d,]+ MiB.* 0 MiB"):
            train(recipe_file, f"run.folder={disk}", "run.steps=6", "run.export=false", "optim.schedule=constant")
        assert {p: p.read_bytes() for p in (disk / "run" / "checkpoints").rglob("*") if p.is_file()} == whole
    finally:
        subprocess.run(["umount", str(disk)], check=True)
