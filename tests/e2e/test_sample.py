"""`lockstep sample` as a whole: what it writes, that it goes on after a kill, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from commands import lockstep, torchrun
from conftest import REWARD, question_rows, write_jsonl
from kills import Moment, interrupted, killed
from lockstep.commands.sample import Job, sample_responses
from lockstep.data.encode.prompt_rows import read_questions
from lockstep.data.sources.read import read_rows
from lockstep.errors import Refusal
from lockstep.recipe.keys_reward import Reward
from lockstep.types import Sampling

Rows = list[dict[str, object]]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    write_jsonl(tmp_path / "questions.jsonl", question_rows(10))
    return tmp_path


def job(home: Path, model: Path, name: str, function: str = "letters", **more: object) -> Job:
    reward = Reward(function=f"{home / 'reward.py'}:{function}", workers=1, max_failures=0.9)
    given: dict[str, object] = {"n": 3, "sampling": Sampling(12, seed=5), "reward": reward, "chunk": 4, **more}
    return Job(str(model), str(home / "questions.jsonl"), home / name, **given)  # type: ignore[arg-type]


def sampled(home: Path, model: Path, name: str, function: str = "letters", **more: object) -> Rows:
    sample_responses(job(home, model, name, function, **more), "cpu")
    assert not (home / f"{name}.parts").exists()
    return pq.read_table(home / name).to_pylist()


def words(home: Path, model: Path, name: str, *more: object) -> list[object]:
    function = f"{home / 'reward.py'}:letters"
    options = ["-n", 3, "--max-new-tokens", 12, "--chunk", 1, "--device", "cpu", "--reward-function", function]
    return ["sample", model, home / "questions.jsonl", home / name, *options, *more]


def test_every_question_gets_its_scored_responses(
    home: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = sampled(home, tiny_folder, "out.parquet", system="Be brief.")
    assert [(row["question"], row["sample"]) for row in rows] == [(q, s) for q in range(10) for s in range(3)]
    questions = read_questions(read_rows(str(home / "questions.jsonl")))
    for row in rows:
        question = questions[row["question"]]  # type: ignore[call-overload]
        assert row["prompt"] == [{"role": "system", "content": "Be brief."}, *question.prompt]
        assert row["ground_truth"] == question.ground_truth
        assert json.loads(str(row["extra_info"])) == question.extra_info
        assert row["data_source"] == "arithmetic"
        assert row["reward"] == len(set(str(row["response"]))) / 20
        assert json.loads(str(row["rewards"])) == {"function": row["reward"]}
        assert row["failure"] is None
        assert 0 < row["tokens"] <= 12  # type: ignore[operator]
        assert (row["tokens"] == 12) or row["stop"] == "token"
    assert len({row["response"] for row in rows}) > 15, "samples must differ"
    rewards = [float(row["reward"]) for row in rows]  # type: ignore[arg-type]
    best = sum(max(rewards[i : i + 3]) for i in range(0, 30, 3)) / 10
    told = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert f"{sum(rewards) / 30:.4f}" in told["mean"]
    assert f"{best:.4f}" in told["best"]
    assert "30, " in told["responses"]
    # A long path stays whole, so that it can be copied.
    assert all(len(line) <= 80 for line in told.values() if "/" not in line)


@pytest.mark.slow
def test_chunks_and_what_stands_beside_a_question_change_nothing(home: Path, tiny_folder: Path) -> None:
    whole = sampled(home, tiny_folder, "whole.parquet", chunk=64)
    assert sampled(home, tiny_folder, "chunks.parquet", chunk=3) == whole
    assert sampled(home, tiny_folder, "few.parquet", rows=4) == whole[:12]
    other = sampled(home, tiny_folder, "other.parquet", sampling=Sampling(12, seed=6))
    assert [row["response"] for row in other] != [row["response"] for row in whole]


@pytest.mark.slow
def test_slices_are_answered_as_in_the_whole(home: Path, tiny_folder: Path) -> None:
    whole = sampled(home, tiny_folder, "all.parquet")
    parts = [sampled(home, tiny_folder, f"{first}.parquet", first=first, rows=6) for first in (0, 6)]
    assert [len(part) for part in parts] == [18, 12]
    assert [row for part in parts for row in part] == whole
    with pytest.raises(Refusal, match="beyond the last of 10 rows"):
        sampled(home, tiny_folder, "none.parquet", first=10)


def test_the_rule_of_the_data_source_scores_without_options(home: Path, tiny_folder: Path) -> None:
    rows = sampled(home, tiny_folder, "rule.parquet", reward=Reward(), rows=2)
    assert all(json.loads(str(row["rewards"])) == {"rule": row["reward"]} for row in rows)


@pytest.mark.slow
def test_failures_are_stored_and_never_zero(home: Path, tiny_folder: Path) -> None:
    rows = sampled(home, tiny_folder, "picky.parquet", "picky")
    failed = [row for row in rows if row["failure"] is not None]
    assert failed, "the rows must hold responses that cannot be judged"
    assert all(ord(str(row["response"])[0]) > 128 and row["reward"] is None for row in failed)
    assert all("cannot judge this" in str(row["failure"]) for row in failed)
    strict = Reward(function=f"{home / 'reward.py'}:picky", workers=1, max_failures=0.01)
    with pytest.raises(Refusal, match=r"--max-failures 0\.01"):
        sampled(home, tiny_folder, "strict.parquet", reward=strict)


@pytest.mark.slow
def test_what_a_reward_prints_is_kept_beside_the_samples(home: Path, tiny_folder: Path) -> None:
    printing = "\n\ndef loud(data_source, solution_str, ground_truth, extra_info):\n"
    printing += '    print("judging", extra_info["index"], flush=True)\n'
    printing += '    assert extra_info["index"] != 7, "not seven"\n    return len(set(solution_str)) / 20\n'
    (home / "reward.py").write_text(REWARD + printing, encoding="utf-8")
    sampled(home, tiny_folder, "loud.parquet", "loud")
    log = home / "loud.parquet.rewards" / "worker-0.log"
    lines = log.read_text(encoding="utf-8").splitlines()
    # The dry run's calls come first; then every question's three responses.
    assert [lines.count(f"judging {index}") >= 3 for index in range(10)] == [True] * 10
    # Where it fails the file is named, while the samples hold the reason alone.
    strict = Reward(function=f"{home / 'reward.py'}:loud", workers=1, max_failures=0.01)
    with pytest.raises(Refusal, match="not seven") as refused:
        sampled(home, tiny_folder, "strict.parquet", reward=strict)
    assert f"its last output is in {home / 'strict.parquet.rewards' / 'worker-0.log'}" in str(refused.value)


@pytest.mark.slow
def test_killed_and_started_again_writes_the_same_file(home: Path, tiny_folder: Path) -> None:
    write_jsonl(home / "questions.jsonl", question_rows(20))
    whole = lockstep(*words(home, tiny_folder, "whole.parquet"))
    assert whole.returncode == 0, whole.stderr
    parts = home / "killed.parquet.parts"

    for chunks in (3, 9):
        killed(words(home, tiny_folder, "killed.parquet"), Moment(f"{parts}/[0-9]*.parquet", chunks))
    # Half a chunk that a kill left behind is no chunk.
    (parts / ".writing-00015.parquet").write_bytes(b"PAR1")
    refused = lockstep(*words(home, tiny_folder, "killed.parquet", "--temperature", 0.5))
    assert refused.returncode == 2
    assert "--temperature" in refused.stderr
    assert "remove the folder" in " ".join(refused.stderr.split())
    done = lockstep(*words(home, tiny_folder, "killed.parquet"))
    assert done.returncode == 0, done.stderr
    assert "chunks; resuming" in " ".join(done.stdout.split())
    assert (home / "killed.parquet").read_bytes() == (home / "whole.parquet").read_bytes()
    assert not parts.exists()


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished_and_says_so(home: Path, tiny_folder: Path) -> None:
    write_jsonl(home / "questions.jsonl", question_rows(20_000))
    first = home / "out.parquet.parts" / "00000.parquet"
    status, told = interrupted(words(home, tiny_folder, "out.parquet"), Moment(str(first)))
    assert status == 130, told
    assert "out.parquet.parts keeps the finished chunks" in " ".join(told.split())
    assert "Traceback" not in told
    assert first.is_file()


@pytest.mark.slow
def test_what_was_begun_with_something_else_is_refused(home: Path, tiny_folder: Path) -> None:
    """A reward that stops the second chunk leaves the first; then one thing after another changes."""
    (home / "reward.py").write_text(
        "def letters(data_source, solution_str, ground_truth, extra_info):\n"
        "    if extra_info['index'] == 7 and solution_str not in ('', '14', '#### 14'):\n"
        "        raise ValueError('not this one')\n"
        "    return float(len(solution_str))\n",
        encoding="utf-8",
    )
    strict = Reward(function=f"{home / 'reward.py'}:letters", workers=1, max_failures=0.2)
    model = shutil.copytree(tiny_folder, home / "model")

    def again(**more: object) -> str:
        with pytest.raises(Refusal) as refused:
            sampled(home, model, "out.parquet", **{"reward": strict, **more})  # type: ignore[arg-type]
        return str(refused.value)

    assert "3 of 12 responses could not be scored" in again()
    assert (home / "out.parquet.parts" / "00000.parquet").is_file()
    assert "3 of 12 responses" in again()
    assert again(n=2).startswith("--n [changed-setting]: ")
    assert again(chunk=5).startswith("--chunk [changed-setting]: ")
    assert again(sampling=Sampling(12, seed=5, top_k=3)).startswith("--top-k [changed-setting]: ")
    assert again(system="Be brief.").startswith("--system [changed-setting]: ")
    assert again(reward=strict.model_copy(update={"format": ".*"})).startswith("--format [changed-setting]: ")
    (home / "reward.py").write_text((home / "reward.py").read_text() + "\n", encoding="utf-8")
    assert again().startswith("--reward-function file [changed-setting]: ")
    write_jsonl(home / "questions.jsonl", question_rows(11))
    assert "DATA [changed-setting]: " in again()
    os.utime(model / "model.safetensors", (1, 1))
    assert "MODEL model.safetensors [changed-setting]: " in again()


def test_refusals_come_before_the_model(home: Path, tiny_folder: Path) -> None:
    (home / "there.parquet").write_bytes(b"mine")
    (home / "left.parquet.parts").mkdir()
    (home / "left.parquet.parts" / "00000.parquet").write_bytes(b"")
    longer = Sampling(100_000)
    unruled = write_jsonl(home / "unruled.jsonl", [{**row, "data_source": "x/y"} for row in question_rows(2)])
    named = question_rows(1)
    named[0]["prompt"] = [{"role": "user", "content": "hello", "name": "me"}]
    for given, said in [
        (job(home, tiny_folder, "out.jsonl"), "ends with .parquet"),
        (job(home, tiny_folder, "there.parquet"), "already exists"),
        (job(home, tiny_folder, "left.parquet"), "has no manifest.json"),
        (job(home, tiny_folder, "a.parquet", sampling=Sampling(12, temperature=0.0)), "greedy"),
        (job(home, tiny_folder, "a.parquet", dtype="fp8"), "--dtype"),
        (job(home, tiny_folder, "a.parquet", sampling=longer), "--max-new-tokens"),
        (
            job(home, tiny_folder, "a.parquet", reward=Reward(function="none.py:f")),
            "--reward-function [no-such-file]: file none.py",
        ),
        (job(home, tiny_folder, "a.parquet", reward=Reward(format="(")), "--format [invalid-regex]: "),
        (Job(str(tiny_folder), str(unruled), home / "a.parquet", 2, Sampling(4), Reward()), "--rule SOURCE=RULE"),
        (
            Job(str(tiny_folder), str(write_jsonl(home / "n.jsonl", named)), home / "a.parquet", 2, longer, Reward()),
            "has name",
        ),
    ]:
        with pytest.raises(Refusal) as refused:
            sample_responses(given, "cpu")
        assert said in str(refused.value)
    assert (home / "there.parquet").read_bytes() == b"mine"
    assert not (home / "a.parquet.parts").exists()


@pytest.mark.slow
@pytest.mark.torchrun
def test_two_processes_write_what_one_does(home: Path, tiny_folder: Path) -> None:
    one = lockstep(*words(home, tiny_folder, "one.parquet", "--chunk", 4))
    assert one.returncode == 0, one.stderr
    two = torchrun(*words(home, tiny_folder, "two.parquet", "--chunk", 4))
    assert two.returncode == 0, two.stderr
    assert pq.read_table(home / "two.parquet").equals(pq.read_table(home / "one.parquet"))
    assert two.stdout.count("wrote") == 1


def test_samples_become_pairs_and_rows_to_train_on(home: Path, tiny_folder: Path) -> None:
    assert lockstep(*words(home, tiny_folder, "s.parquet", "--chunk", 64)).returncode == 0
    samples = pq.read_table(home / "s.parquet").to_pylist()
    done = lockstep("pairs", home / "s.parquet", home / "pairs.jsonl", "--kind", "pairs", "--keep-cut")
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if str(home) not in line)
    pairs = [json.loads(line) for line in (home / "pairs.jsonl").read_text().splitlines()]
    rewards = [[row["reward"] for row in samples[i : i + 3] if row["response"].strip()] for i in range(0, 30, 3)]
    wanted = [max(group) - min(group) for group in rewards if group and max(group) > min(group)]
    assert [pair["margin"] for pair in pairs] == pytest.approx(wanted)
    done = lockstep("pairs", home / "s.parquet", home / "best.parquet", "--kind", "sft", "--keep-cut")
    assert done.returncode == 0, done.stderr
    recipe = home / "sft.yaml"
    recipe.write_text(
        f"run: {{folder: {home / 'runs'}, steps: 1}}\ndevice: cpu\nmodel: {{path: {tiny_folder}}}\n"
        f"data: {{train: {home / 'best.parquet'}}}\n",
        encoding="utf-8",
    )
    trained = lockstep("train", recipe)
    assert trained.returncode == 0, trained.stderr
    refused = lockstep("pairs", home / "s.parquet", home / "k.jsonl", "--kind", "kto", "--min-margin", 0.1)
    assert refused.returncode == 2
    assert "does not apply to --kind kto" in refused.stderr
