"""What a run finds broken, missing or asked for wrongly: said in words, with the file, the steps or the option."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conftest import question_rows, run, write_jsonl
from kills import interrupted, lines
from lockstep.commands.sample import Parts
from lockstep.errors import Refusal
from lockstep.run.checkpoint import damage_of
from lockstep.run.folder import RunFolder
from lockstep.run.metrics import missing_steps, read_metrics
from lockstep.run.trackers.tracker import tracker_id
from refusals import refuses
from runs import facts

Capture = pytest.CaptureFixture[str]
QUICK = ["run.export=false", "data.val=[]", "optim.schedule=constant"]


def told(capsys: Capture) -> str:
    return " ".join("".join(capsys.readouterr()).split())


# -- metrics


@pytest.mark.parametrize(
    ("steps", "last", "words"),
    [([1, 2, 3], 3, ""), ([0, 1, 4, 6], 7, "2 to 3, 5, 7"), ([], 2, "1 to 2"), ([2, 3], 3, "1"), ([], 0, "")],
)
def test_missing_steps_in_words(steps: list[int], last: int, words: str) -> None:
    assert missing_steps(steps, last) == words


def without(file: Path, *steps: int) -> None:
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(line for line in lines if json.loads(line)["step"] not in steps), encoding="utf-8")


@pytest.mark.slow
def test_a_hole_in_the_metrics_is_said_with_its_steps(recipe_file: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "runs" / "run"
    assert run("train", recipe_file, *QUICK) == 0
    shutil.copytree(folder, tmp_path / "whole")
    without(folder / "metrics.jsonl", 2, 3, 5)
    told(capsys)
    assert run("compare", folder, tmp_path / "whole") == 0
    assert "steps 2 to 3, 5 are lost" in told(capsys)
    assert run("train", recipe_file, *QUICK, "run.steps=8") == 0
    assert "the metrics of steps 2 to 3, 5 of 6" in told(capsys)
    assert [step for step, _ in read_metrics(folder / "metrics.jsonl")] == [1, 4, 6, 7, 8]


@pytest.mark.parametrize("steps", [6, 7])
def test_missing_metrics_are_said(recipe_file: Path, tmp_path: Path, capsys: Capture, steps: int) -> None:
    """Of a run that is done already, too."""
    folder = tmp_path / "runs" / "run"
    assert run("train", recipe_file, *QUICK) == 0
    (folder / "metrics.jsonl").unlink()
    told(capsys)
    assert run("train", recipe_file, *QUICK, f"run.steps={steps}") == 0
    assert "metrics.jsonl is missing: the metrics of steps 1 to 6 of 6" in told(capsys)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    assert run("compare", folder, folder) == 2
    assert "metrics.jsonl [missing-file]" in told(capsys)


@pytest.mark.slow
def test_ctrl_c_adds_no_validation(recipe_file: Path, tmp_path: Path) -> None:
    """Its checkpoint is not one of those that the best is chosen from, so nothing is measured for it."""
    settings = ["checkpoint.every=100000", "checkpoint.keep_best=1", "run.export=false", "optim.schedule=constant"]
    folder = tmp_path / "runs" / "run"
    words = ["train", recipe_file, *settings, "run.steps=100000"]
    status, output = interrupted(words, lines(folder / "metrics.jsonl", 3))
    assert status == 130, output
    stopped = facts(folder)
    assert not any(name.startswith("val/") for _, values in stopped for name in values)
    settings.append(f"run.steps={len(stopped) + 3}")
    assert run("train", recipe_file, *settings) == 0
    assert run("train", recipe_file, *settings, "run.name=whole") == 0
    assert facts(folder) == facts(tmp_path / "runs" / "whole")


# -- checkpoints


@pytest.fixture(scope="module")
def checkpoint(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    rows = write_jsonl(folder / "rows.jsonl", [{"prompt": "1+1?", "response": "#### 2"}] * 4)
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"{{method: sft, device: cpu, run: {{name: run, folder: {folder}, steps: 1, export: false}}, "
        f"model: {{path: {tiny_folder}}}, data: {{train: {rows}}}, batch: {{rows_per_update: 4, tokens: 256}}}}",
        encoding="utf-8",
    )
    assert run("train", recipe) == 0
    return folder / "run" / "checkpoints" / "step_1"


@pytest.mark.parametrize(
    ("manifest", "why"),
    [
        ({}, "has no entry for model.safetensors"),
        ([], "contains list, not a JSON object"),
        (None, "contains NoneType, not a JSON object"),
        ("model.safetensors", "contains str, not a JSON object"),
        ({"model.safetensors": 3}, "has no entry for optimizer.safetensors"),
        ("without state.json", "has no entry for state.json"),
        ("entries of another kind", "has no size and checksum"),
        ("another folder's file", "has no size and checksum of '../step_1/model.safetensors'"),
    ],
)
def test_a_manifest_that_is_not_one_counts_as_damage(
    checkpoint: Path, tmp_path: Path, manifest: object, why: str
) -> None:
    folder = tmp_path / "step_1"
    shutil.copytree(checkpoint, folder)
    assert damage_of(folder) is None
    whole = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    special: dict[object, object] = {
        "without state.json": {name: entry for name, entry in whole.items() if name != "state.json"},
        "entries of another kind": dict.fromkeys(whole, "whole"),
        "another folder's file": {**whole, "../step_1/model.safetensors": whole["model.safetensors"]},
    }
    content = special.get(manifest, manifest) if isinstance(manifest, str) else manifest
    (folder / "manifest.json").write_text(json.dumps(content), encoding="utf-8")
    assert why in str(damage_of(folder))


def test_a_critic_that_the_manifest_does_not_tell_of(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step_1"
    shutil.copytree(checkpoint, folder)
    shutil.copy(folder / "model.safetensors", folder / "critic.safetensors")
    assert damage_of(folder) == "manifest.json has no entry for critic.safetensors"


@pytest.mark.slow
def test_an_older_checkpoint_with_a_broken_state_is_set_aside(
    recipe_file: Path, tmp_path: Path, capsys: Capture
) -> None:
    settings = ["checkpoint.every=2", "checkpoint.keep_best=1", "checkpoint.keep_last=2", "run.export=false"]
    assert run("train", recipe_file, *settings, "run.steps=4") == 0
    places = tmp_path / "runs" / "run" / "checkpoints"
    (places / "step_2" / "state.json").write_text('{"val_loss": "low"}', encoding="utf-8")
    told(capsys)
    assert run("export", tmp_path / "runs" / "run", tmp_path / "out", "--best") == 2
    assert "step_2/state.json [damaged-checkpoint] its val/loss is 'low'" in told(capsys)
    assert run("train", recipe_file, *settings, "run.steps=6") == 0
    assert "set aside as damaged-step_2" in told(capsys)
    assert {path.name for path in places.iterdir()} == {"damaged-step_2", "step_4", "step_6"}


# -- model folders


@pytest.fixture
def model(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def verbs(model: Path, recipe: Path, home: Path) -> list[list[object]]:
    data = write_jsonl(home / "questions.jsonl", question_rows(2))
    return [
        ["train", recipe, f"model.path={model}"],
        ["generate", model, "hello", "--device", "cpu"],
        ["eval", model, data, "--device", "cpu"],
        ["sample", model, data, home / "out.parquet", "--device", "cpu"],
    ]


@pytest.mark.parametrize(
    ("gone", "why"),
    [
        (("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"), "has no tokenizer"),
        (("tokenizer.json",), "has no vocabulary"),
    ],
)
def test_a_folder_without_a_tokenizer_says_so(
    model: Path, recipe_file: Path, tmp_path: Path, capsys: Capture, gone: tuple[str, ...], why: str
) -> None:
    """transformers makes one that turns every text into nothing."""
    for name in gone:
        (model / name).unlink()
    for words in verbs(model, recipe_file, tmp_path):
        assert run(*words) == 2
        output = told(capsys)
        assert str(model) in output
        assert why in output


def test_truncated_weights_are_named(
    model: Path, recipe_file: Path, online_file: Path, tmp_path: Path, capsys: Capture
) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for words in verbs(model, recipe_file, tmp_path):
        assert run(*words) == 2
        assert f"{weights} is damaged" in told(capsys)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert run("train", online_file, "reward.function=null", f"reward.model={model}") == 2
    assert f"{weights} is damaged" in told(capsys)


@pytest.mark.parametrize("verb", ["generate", "eval", "sample"])
@pytest.mark.parametrize("number", [-3, 0])
def test_no_tokens_cannot_be_asked_for(
    tiny_folder: Path, recipe_file: Path, tmp_path: Path, capsys: Capture, verb: str, number: int
) -> None:
    words = next(each for each in verbs(tiny_folder, recipe_file, tmp_path) if each[0] == verb)
    assert run(*words, "--max-new-tokens", number) == 2
    assert "Invalid value for '--max-new-tokens'" in told(capsys)


# -- what is kept beside


def test_damaged_chunks_of_samples_are_named(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "out.parquet", {"--n": 1})
    parts.folder.mkdir()
    for content in (b"", b"[1]", b"\x80", b'{"--n": '):
        (parts.folder / "manifest.json").write_bytes(content)
        with pytest.raises(Refusal, match=r"manifest\.json"):
            parts.check()
    (parts.folder / "manifest.json").write_text('{"--n": 1}', encoding="utf-8")
    parts.check()
    (parts.folder / "00001.parquet").write_bytes(b"PAR1 and no more")
    with refuses("00001.parquet", "damaged-file"):
        parts.finished(3)


@pytest.mark.parametrize("content", [b"", b"[1]", b"\x80", b'{"wandb": '])
def test_damaged_ids_of_trackers_are_named(tmp_path: Path, content: bytes) -> None:
    folder = RunFolder(tmp_path)
    folder.trackers.write_bytes(content)
    with pytest.raises(Refusal, match=r"trackers\.json"):
        tracker_id(folder, "wandb", resumed_at=3)
