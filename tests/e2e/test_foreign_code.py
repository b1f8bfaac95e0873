"""Code that lies in a model's folder is never run, whatever is answered on stdin, and the refusal says why."""

from __future__ import annotations

import ast
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import lockstep
from commands import warm_python
from conftest import question_rows, run, write_jsonl
from hang import HANG

HOUSE = Path(lockstep.__file__).parent

CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

class TheirConfig(Qwen2Config):
    model_type = "theirs"

class TheirModel(Qwen2ForCausalLM):
    config_class = TheirConfig

class TheirTokenizer(Qwen2Tokenizer):
    pass
"""


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that the folder's code makes when it runs."""
    return tmp_path / "the code ran"


@pytest.fixture
def theirs(tiny_folder: Path, tmp_path: Path, mark: Path) -> Path:
    """A model folder with an architecture of its own in `theirs.py`."""
    folder = copied(tiny_folder, tmp_path / "theirs", mark)
    change(folder / "config.json", model_type="theirs", architectures=["TheirModel"], auto_map=MAP)
    return folder


MAP = {"AutoConfig": "theirs.TheirConfig", "AutoModelForCausalLM": "theirs.TheirModel"}


def copied(tiny_folder: Path, folder: Path, mark: Path) -> Path:
    shutil.copytree(tiny_folder, folder)
    (folder / "theirs.py").write_text(CODE.format(mark=str(mark)), encoding="utf-8")
    return folder


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **values}), encoding="utf-8")


def answering_yes(*words: object) -> subprocess.CompletedProcess[str]:
    """The command with `y` on its stdin, as often as it asks."""
    command = [*warm_python(), "-m", "lockstep", *map(str, words)]
    return subprocess.run(command, input="y\n" * 50, capture_output=True, text=True, timeout=HANG, check=False)


@pytest.fixture
def yes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The real entry point in this process, with the same answers: its exit code and all that it said."""

    def call(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 50))
        code = run(*words)
        return code, "".join(capsys.readouterr())

    return call


def verbs(model: Path, recipe: Path, home: Path) -> dict[str, list[object]]:
    data = write_jsonl(home / "questions.jsonl", question_rows(2))
    return {
        "train": ["train", recipe, f"model.path={model}"],
        "plan": ["plan", recipe, f"model.path={model}"],
        "show": ["data", "show", recipe, f"model.path={model}"],
        "generate": ["generate", model, "hello", "--max-new-tokens", 2],
        "eval": ["eval", model, data, "--max-new-tokens", 2],
        "sample": ["sample", model, data, home / "out.parquet", "--max-new-tokens", 2],
    }


def assert_refused(code: int, output: str, mark: Path, where: str) -> None:
    assert not mark.exists()
    assert code == 2, output
    assert "Traceback" not in output
    assert where in " ".join(output.split())
    assert "code from the model's folder" in " ".join(output.split())
    assert "[y/N]" not in output


def test_a_folder_with_code_is_refused_though_yes_is_piped(theirs: Path, mark: Path) -> None:
    """In a process of its own, with a real pipe."""
    done = answering_yes("generate", theirs, "hello")
    assert_refused(done.returncode, done.stdout + done.stderr, mark, str(theirs))


@pytest.mark.parametrize("verb", ["train", "plan", "show", "generate", "eval", "sample"])
def test_every_verb_refuses_it(
    theirs: Path, recipe_file: Path, tmp_path: Path, mark: Path, verb: str, yes: Callable[..., tuple[int, str]]
) -> None:
    assert_refused(*yes(*verbs(theirs, recipe_file, tmp_path)[verb]), mark, str(theirs))


def test_a_tokenizer_with_code_is_refused(
    tiny_folder: Path, tmp_path: Path, mark: Path, yes: Callable[..., tuple[int, str]]
) -> None:
    folder = copied(tiny_folder, tmp_path / "theirs", mark)
    settings = {"tokenizer_class": "TheirTokenizer", "auto_map": {"AutoTokenizer": ["theirs.TheirTokenizer", None]}}
    change(folder / "tokenizer_config.json", **settings)
    change(folder / "config.json", model_type="theirs", auto_map=MAP)
    assert_refused(*yes("generate", folder, "hello", "--max-new-tokens", 2), mark, str(folder))


def test_reward_models_with_code_are_refused(
    theirs: Path, online_file: Path, mark: Path, yes: Callable[..., tuple[int, str]]
) -> None:
    (theirs / "process_reward.json").write_text('{"placeholder": "+", "tokens": ["+", "-"]}', encoding="utf-8")
    for key in ("model", "process"):
        found = yes("train", online_file, "reward.function=null", f"reward.{key}={theirs}")
        assert_refused(*found, mark, f"reward.{key} {theirs}")


def test_an_architecture_that_transformers_has_is_its_own(
    tiny_folder: Path, tmp_path: Path, mark: Path, yes: Callable[..., tuple[int, str]]
) -> None:
    """Many folders bring code for a time before transformers knew them; its class is used and theirs is not run."""
    folder = copied(tiny_folder, tmp_path / "theirs", mark)
    change(folder / "config.json", auto_map=MAP)
    code, output = yes("generate", folder, "hello", "--max-new-tokens", 2)
    assert code == 0, output
    assert not mark.exists()


def trusting(tree: ast.Module) -> list[int]:
    """Lines of calls that could let a folder's code run: those of Auto classes without `trust_remote_code=False`."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("from_pretrained", "from_config")
        # An adapter and a quantizer have no code of their own.
        and not (isinstance(node.func.value, ast.Name) and node.func.value.id in ("PeftModel", "AutoHfQuantizer"))
        and not any(
            word.arg == "trust_remote_code" and isinstance(word.value, ast.Constant) and word.value.value is False
            for word in node.keywords
        )
    ]


@pytest.mark.slow
def test_no_call_leaves_the_question_open() -> None:
    found = {
        str(path.relative_to(HOUSE)): lines
        for path in sorted(HOUSE.rglob("*.py"))
        if (lines := trusting(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert found == {}


@pytest.mark.parametrize("words", ["path", "path, trust_remote_code=True", "path, trust_remote_code=x", "path, **more"])
def test_the_rule_can_fail(words: str) -> None:
    assert trusting(ast.parse(f"AutoConfig.from_pretrained({words})")) == [1]
    assert trusting(ast.parse("AutoConfig.from_pretrained(path, trust_remote_code=False)")) == []
