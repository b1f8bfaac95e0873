"""Every file of a run folder, damaged in every way, before every verb that reads it: a message that names the file and
no traceback. What can be gone on without is told instead; nothing is passed over in silence."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from conftest import chat_rows, question_rows, run, write_jsonl


@dataclass(frozen=True)
class Scene:
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "run"

    def words(self, verb: str) -> list[object]:
        """One verb on the run. Training goes on for a step, with one checkpoint kept among the best."""
        recipe, questions = self.folder / "recipe.yaml", self.folder / "questions.jsonl"
        answers = ["--max-new-tokens", 2, "--device", "cpu"]
        return {
            "train": ["train", recipe, "run.steps=5", "run.export=false"],
            "eval": ["eval", self.run, questions, *answers],
            "sample": ["sample", self.run, questions, self.folder / "out.parquet", "--n", 1, *answers],
            "generate": ["generate", self.run, "hello", *answers],
            "show": ["data", "show", self.run / "recipe.yaml"],
            "export": ["export", self.run, self.folder / "exported"],
            "best": ["export", self.run, self.folder / "exported", "--best"],
            "compare": ["compare", self.run, self.folder / "pristine", "--report", self.folder / "report.html"],
            "replay": ["replay", self.run],
        }[verb]


@pytest.fixture(scope="module")
def made(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A run with validation, two checkpoints, a tape with weights, samples and an exported model."""
    folder = tmp_path_factory.mktemp("damaged")
    train = write_jsonl(folder / "train.jsonl", chat_rows(16))
    val = write_jsonl(folder / "val.jsonl", chat_rows(4, seed=1))
    questions = write_jsonl(folder / "questions.jsonl", question_rows(2))
    (folder / "recipe.yaml").write_text(
        f"""
method: sft
device: cpu
run: {{name: run, folder: {folder / "runs"}, steps: 4}}
model: {{path: {tiny_folder}}}
data: {{train: {train}, val: {val}}}
val: {{questions: {questions}, max_new_tokens: 2}}
batch: {{rows_per_update: 4, tokens: 256}}
optim: {{lr: 1e-3, schedule: constant, warmup: 0}}
checkpoint: {{every: 2, keep_last: 2, keep_best: 1}}
tape: {{record: true, steps: 2, weights: true}}
""",
        encoding="utf-8",
    )
    scene = Scene(folder)
    assert run("train", folder / "recipe.yaml") == 0
    shutil.copytree(scene.run, folder / "pristine")
    return scene


@pytest.fixture
def scene(made: Scene) -> Iterator[Scene]:
    """The run as it was; what a test made of it is gone afterwards."""
    yield made
    shutil.rmtree(made.run)
    shutil.copytree(made.folder / "pristine", made.run)
    for left in ("exported", "out.parquet.parts"):
        shutil.rmtree(made.folder / left, ignore_errors=True)
    (made.folder / "out.parquet").unlink(missing_ok=True)


WAYS = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "not what it should be": lambda content: b"\x80\x00 no such thing\n" * 3,
    "of another type": lambda content: b"[1, 2]\n",
}
VERBS = ("train", "eval", "sample", "generate", "show", "export", "best", "compare", "replay")
LAST, OLDER = "checkpoints/step_4", "checkpoints/step_2"
READ = {
    "recipe.yaml": ("show", "export", "compare", "replay"),
    "env.json": ("train", "compare"),
    "metrics.jsonl": ("train", "compare"),
    "samples.jsonl": ("train", "compare"),
    f"{LAST}/manifest.json": ("train", "export"),
    f"{LAST}/state.json": ("train", "export"),
    f"{LAST}/model.safetensors": ("train", "export"),
    f"{LAST}/optimizer.safetensors": ("train", "export"),
    f"{OLDER}/state.json": ("train", "best"),
    "export/config.json": ("eval", "sample", "generate"),
    "export/generation_config.json": ("eval", "sample", "generate"),
    "export/tokenizer.json": ("eval", "sample", "generate"),
    "export/tokenizer_config.json": ("eval", "sample", "generate"),
    "export/model.safetensors": ("eval", "sample", "generate"),
    "tape/tape.json": ("replay",),
    "tape/step_000001.safetensors": ("replay",),
    "tape/step_000001.rows.parquet": ("replay",),
    "tape/weights_000001.safetensors": ("replay",),
}
# What training goes on without, aloud: a damaged checkpoint where an older one is whole, and steps that are not logged.
TOLD = {(file, "train") for file in READ if file.startswith("checkpoints")} | {("metrics.jsonl", "train")}
# A line that a kill cut short and a file without samples are nothing unusual; half a recipe can still be a recipe.
HARMLESS = {
    ("samples.jsonl", "truncated"),
    ("samples.jsonl", "empty"),
    ("metrics.jsonl", "truncated"),
    ("recipe.yaml", "truncated"),
}


def _cases() -> Iterator[object]:
    """For every day each verb meets each file that it reads with one kind of damage; the kinds take turns. `compare`
    and `replay`, which are quick and have a remark for each kind, meet all of them."""
    for number, (file, verbs) in enumerate(READ.items()):
        for (place, verb), (kind, way) in product(enumerate(verbs), enumerate(WAYS)):
            daily = verb in ("compare", "replay") or kind == (number + place) % len(WAYS)
            yield pytest.param(file, verb, way, marks=() if daily else pytest.mark.slow)


@pytest.mark.parametrize(("file", "verb", "way"), _cases())
def test_damage_is_named(scene: Scene, capsys: pytest.CaptureFixture[str], file: str, verb: str, way: str) -> None:
    path = scene.run / file
    path.write_bytes(WAYS[way](path.read_bytes()))
    capsys.readouterr()
    code = run(*scene.words(verb))  # what is not caught is raised here: a traceback
    output = " ".join("".join(capsys.readouterr()).split())
    assert code in ((0, 1, 2) if (file, verb) in TOLD or (file, way) in HARMLESS else (1, 2)), output
    if (file, way) not in HARMLESS:
        assert path.name in output, output


@pytest.mark.parametrize("verb", VERBS)
def test_the_run_itself_is_sound(scene: Scene, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    """So that what is refused above is refused for its damage."""
    assert run(*scene.words(verb)) == 0, capsys.readouterr()
    assert "damaged" not in " ".join("".join(capsys.readouterr()).split()).replace("damaged0", "")
