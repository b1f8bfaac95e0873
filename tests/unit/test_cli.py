"""The command: what each verb prints and how it fails, on a tiny model that has learnt four sums by heart."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from commands import lockstep
from conftest import write_jsonl
from hang import HANG
from lockstep.cli import main
from lockstep.model.tiny import write_tiny
from lockstep.recipe.loader import builtin_names, load_recipe
from lockstep.version import own_commit

SUMS = {"2+3?": "#### 5", "7+6?": "#### 13", "4+4?": "#### 8", "9+1?": "#### 10"}
VERBS = (
    "train",
    "plan",
    "recipes",
    "tiny",
    "generate",
    "eval",
    "sample",
    "pairs",
    "export",
    "dequantize",
    "import-gguf",
    "data",
    "cache",
)


class Done(NamedTuple):
    code: int
    out: str
    err: str


class Home(NamedTuple):
    """A folder with a trained run: `runs/sums`, `model`, `recipe.yaml`, `rows.jsonl`, `questions.jsonl`."""

    path: Path
    trained: str


def call(*words: object) -> int:
    """The entry point in this process; the exit code."""
    before = sys.argv
    sys.argv = ["lockstep", *map(str, words)]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        sys.argv = before
    return 0


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: object) -> Done:
        capsys.readouterr()
        code = call(*words)
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Trained by the real command in a process of its own, with piped output."""
    folder = tmp_path_factory.mktemp("home")
    write_tiny(folder / "model", hidden=64, layers=2)
    rows = write_jsonl(folder / "rows.jsonl", [{"prompt": q, "response": a} for q, a in SUMS.items()])
    questions = write_jsonl(
        folder / "questions.jsonl",
        [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": question}],
                "reward_model": {"style": "rule", "ground_truth": answer.removeprefix("#### ")},
            }
            for question, answer in SUMS.items()
        ],
    )
    values = {
        "device": "cpu",
        "run": {"name": "sums", "folder": str(folder / "runs"), "steps": 60},
        "model": {"path": str(folder / "model")},
        "data": {"train": str(rows), "val": str(rows)},
        "batch": {"rows_per_update": 4, "tokens": 256},
        "optim": {"lr": 3e-3, "warmup": 5},
        "val": {"every": 30, "at_start": True, "questions": str(questions), "max_new_tokens": 10},
        "log": {"every": 20},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    done = lockstep("train", folder / "recipe.yaml", COLUMNS="80")
    assert done.returncode == 0, done.stderr
    return Home(folder, done.stdout)


def narrow(text: str, *long_words: object) -> bool:
    """Within 80 columns; the test folder's own long paths stay whole and may stick out."""
    for word in long_words:
        text = text.replace(str(word), "HERE")
    return all(len(line) <= 80 for line in text.splitlines())


# -- without a model ---------------------------------------------------------------------------------------------------


def test_the_version_by_every_door(command: Callable[..., Done]) -> None:
    import lockstep as package

    version = f"lockstep {package.__version__} (commit {own_commit()})\n"
    assert command("--version").out == version
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.cli", "--version"], capture_output=True, text=True, check=True, timeout=HANG
    )
    assert done.stdout == version


def test_the_list_of_recipes_fits_and_those_of_one_data_set_agree_on_its_folder(command: Callable[..., Done]) -> None:
    listed = command("recipes").out
    assert narrow(listed)
    assert len(re.findall(r"^[a-z]+-[a-z0-9-]+  ", listed, re.MULTILINE)) == len(builtin_names())
    for name in (one for one in builtin_names() if "gsm8k" in one):
        recipe = load_recipe(name)
        assert [source.path for source in recipe.data.train] == ["data/gsm8k/train.parquet"]
        assert recipe.val.questions == "data/gsm8k/test.parquet"
        assert "lockstep data gsm8k data/gsm8k " in command("recipes", name).out


def test_help_lists_the_verbs_and_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "lockstep", "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
    )
    assert done.returncode == 0
    listed = [line.split()[0] for line in done.stdout.partition("Commands:")[2].splitlines() if line.strip()]
    assert set(listed) >= set(VERBS)
    assert narrow(done.stdout)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "lockstep.cli" in imported
    assert not imported & {"torch", "transformers", "pydantic", "pyarrow", "numpy", "yaml"}


@pytest.mark.parametrize("verb", [*[(verb,) for verb in VERBS], ("data", "show"), ("data", "arithmetic")])
def test_every_verb_explains_itself(command: Callable[..., Done], verb: tuple[str, ...]) -> None:
    done = command(*verb, "--help")
    assert done.code == 0
    usage, _, rest = done.out.partition("\n\n")
    assert f"lockstep {' '.join(verb)}" in " ".join(usage.split())
    assert rest.strip()
    assert narrow(done.out)


def test_recipes(command: Callable[..., Done]) -> None:
    listed = command("recipes")
    assert listed.code == 0
    assert "\nsft-arithmetic" in listed.out
    printed = command("recipes", "sft-arithmetic")
    assert yaml.safe_load(printed.out)["method"] == "sft"


def test_tiny_writes_a_model_and_never_overwrites(command: Callable[..., Done], tmp_path: Path) -> None:
    assert command("tiny", tmp_path / "m").code == 0
    assert command("tiny", tmp_path / "m").code == 0
    (tmp_path / "m" / "config.json").write_text("{}")
    done = command("tiny", tmp_path / "m")
    assert done.code == 2
    assert "config.json" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "nowhere.yaml"], ["recipe nowhere.yaml", "built in: "]),
        (["plan", "sft-arithmetic", "optim.lrr=1"], ["did you mean optim.lr?"]),
        (["train", "sft-arithmetic", "model.path=./none"], ["model.path ./none", "give the path of a model"]),
        (["train", "sft-arithmetic"], ["model.path quickstart/model", "lockstep tiny quickstart/model"]),
        (["data", "show", "sft-arithmetic", "data.train=none.jsonl"], ["none.jsonl", "does not exist"]),
        (["recipes", "none"], ["built in: agent-calculator"]),
        (["eval", "./none", "none.jsonl"], ["does not exist"]),
        (["eval", "./none", "none.jsonl", "--dtype", "fp8"], ["fp32, bf16, fp16"]),
        (["generate", "./none", "hello"], ["no such folder"]),
        (["export", "./none", "out"], ["is not a run folder"]),
        (["import-gguf", "none.gguf", "out"], ["none.gguf"]),
        (["generate", "./none", "hello", "--device", "gpu"], ["did you mean cuda?"]),
        (["train", "sft-arithmetic", "device=gpu"], ["unknown device 'gpu'", "did you mean cuda?"]),
        (["plan", "grpo-arithmetic", "device=gpu"], ["unknown device 'gpu'", "did you mean cuda?"]),
        (["trian"], ["No such command 'trian'"]),
    ],
)
def test_errors_give_advice_and_exit_2(
    command: Callable[..., Done], words: list[str], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command(*words)
    assert done.code == 2
    assert narrow(done.err, tmp_path)
    one_line = " ".join(done.err.split())
    for part in said:
        assert part in one_line
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir())


# -- with a model ------------------------------------------------------------------------------------------------------


def test_train_in_plain_lines(home: Home) -> None:
    lines = home.trained.splitlines()
    assert narrow(home.trained, home.path)
    assert "\x1b" not in home.trained
    assert "\r" not in home.trained
    assert lines[0] == "sft run sums: loading libraries ..."
    assert lines[1] == "device cpu, as requested"
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/60", "20/60", "40/60", "60/60"]
    assert all(word in steps[0] for word in ("loss ", "lr ", "grad ", "tok/s "))
    validations = [line.split()[3] for line in lines if line.startswith("validation after step")]
    assert validations == ["0:", "30:", "60:"]
    last = home.trained.rpartition("sums: 60 steps done")[2]
    assert "val/accuracy  0 -> 1" in last
    assert f"lockstep generate {home.path / 'runs' / 'sums'} --chat" in " ".join(last.split())
    assert {entry.name for entry in (home.path / "runs" / "sums").iterdir()} >= {
        *("recipe.yaml", "env.json", "metrics.jsonl", "samples.jsonl", "checkpoints", "export")
    }


def test_plan(command: Callable[..., Done], home: Home) -> None:
    done = command("plan", home.path / "recipe.yaml", "batch.rows_per_update=3", "run.steps=null", "run.epochs=2")
    assert done.code == 0
    assert narrow(done.out, home.path)
    one_line = " ".join(done.out.split())
    assert "rows 4 an epoch, 8 in all" in one_line
    assert "updates 3 of 3 rows (1.3 an epoch)" in one_line
    for phase in ("load", "forward and backward", "optimizer step", "validation"):
        assert phase in done.out
    assert "fits: cpu has" in done.out
    assert not (home.path / "runs" / "plan").exists()


def test_plan_for_several_devices(command: Callable[..., Done], home: Home) -> None:
    done = command("plan", home.path / "recipe.yaml", "--devices", "2")
    assert "each of 2 device(s)" in " ".join(done.out.split())


def test_plan_refuses_what_cannot_fit(command: Callable[..., Done], home: Home) -> None:
    huge = home.path / "huge"
    shutil.copytree(home.path / "model", huge, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((huge / "config.json").read_text())
    config |= {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 200}
    config.pop("layer_types", None)
    (huge / "config.json").write_text(json.dumps(config))
    done = command("plan", home.path / "recipe.yaml", f"model.path={huge}")
    assert done.code == 2
    assert "forward and backward needs about" in " ".join(done.err.split())
    assert "lower batch.tokens" in " ".join(done.err.split())
    assert "memory of one device" in done.out, "the numbers are shown before the refusal"
    assert narrow(done.out, home.path)
    assert narrow(done.err)


def test_data_show_marks_what_is_trained(command: Callable[..., Done], home: Home) -> None:
    done = command("data", "show", home.path / "recipe.yaml", "--rows", "2")
    assert done.code == 0
    assert done.out.count("[[") == 2
    assert "<|im_start|>user\n7+6?<|im_end|>\n<|im_start|>assistant\n[[#### 13<|im_end|>]]\n" in done.out
    # <|im_start|>, "user", a line break, 4 characters, <|im_end|>, a line break: the tokenizer's tokens are bytes.
    assert "line 2: 32 tokens, 8 trained" in done.out
    # The other two of the four rows are not even encoded.
    assert "2 kept, 0 dropped, 0 truncated" in done.out
    assert "63, of which 15 trained" in done.out
    assert narrow(done.out, home.path)


def test_generate_says_what_was_learnt(home: Home) -> None:
    done = lockstep("generate", home.path / "runs" / "sums", "7+6?")
    assert (done.returncode, done.stdout) == (0, "#### 13\n"), done.stderr


def test_generate_wants_a_prompt(command: Callable[..., Done], home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    done = command("generate", home.path / "model")
    assert done.code == 2
    assert "give a prompt, or --chat" in done.err
    done = command("generate", home.path / "model", "2+3", "--raw", "--system", "Be Bo.")
    assert done.code == 2
    assert "--raw" in done.err
    assert "--system" in done.err


def test_generate_raw_equals_transformers(
    command: Callable[..., Done], home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = home.path / "model"
    done = command("generate", model, "2+3", "--raw", "--max-new-tokens", "6")
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer("2+3", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = AutoModelForCausalLM.from_pretrained(model).generate(ids, max_new_tokens=6, do_sample=False)
    assert done.out == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("2+3\n"))  # a prompt may come from a file or a pipe
    assert command("generate", model, "--raw", "--max-new-tokens", "6").out == done.out


def test_chat_goes_turn_by_turn(
    command: Callable[..., Done], home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = iter(["2+3?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(turns))
    done = command("generate", home.path / "runs" / "sums", "--chat", "--max-new-tokens", "12")
    assert done.code == 0
    assert done.out == "model> #### 5\n"


def test_eval_scores_and_stores_every_answer(command: Callable[..., Done], home: Home, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    done = command("eval", home.path / "runs" / "sums", home.path / "questions.jsonl", "--device", "cpu", "--out", out)
    assert done.code == 0, done.err
    assert narrow(done.out, home.path)
    values = {cells[1]: cells[3] for line in done.out.splitlines() if len(cells := line.split()) == 5}
    assert values["questions"] == "4"
    assert values["accuracy"] == values["answered"] == "1.0000"
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [answer["response"] for answer in answers] == list(SUMS.values())
    assert all(answer["score"] == 1 for answer in answers)
    before = command("eval", home.path / "model", home.path / "questions.jsonl", "--rows", "2", "--max-new-tokens", "4")
    assert "0.0000" in before.out


def test_export_loads_in_plain_transformers(command: Callable[..., Done], home: Home, tmp_path: Path) -> None:
    done = command("export", home.path / "runs" / "sums", tmp_path / "out")
    assert done.code == 0, done.err
    assert done.out.startswith("exported step 60 of ")
    exported, own = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "out", home.path / "runs" / "sums" / "export")
    )
    assert all(torch.equal(exported[name], own[name]) for name in own)
    again = command("export", home.path / "runs" / "sums", tmp_path / "out")
    assert again.code == 2
    assert "is not empty" in again.err
    assert command("export", home.path / "runs" / "sums", tmp_path / "b", "--step", "7").code == 2
    assert "it has 60" in command("export", home.path / "runs" / "sums", tmp_path / "b", "--step", "7").err
    assert "has no adapter" in command("export", home.path / "runs" / "sums", tmp_path / "b", "--adapter").err


@pytest.mark.parametrize("words", [("eval", "model", "questions.jsonl", "--rows", "0"), ("plan", "--devices", "0")])
def test_counts_of_zero_are_refused(command: Callable[..., Done], home: Home, words: tuple[str, ...]) -> None:
    given = [home.path / word if (home.path / word).exists() else word for word in words]
    if words[0] == "plan":
        given.insert(1, home.path / "recipe.yaml")
    assert command(*given).code == 2
