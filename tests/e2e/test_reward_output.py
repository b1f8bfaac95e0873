"""What a reward function prints, in the folder of a real run."""

from __future__ import annotations

from pathlib import Path

from commands import lockstep

PRINTS = """
def score(data_source, solution_str, ground_truth, extra_info):
    print("judging", len(solution_str), "characters")
    if solution_str and ord(solution_str[0]) > 128:
        raise ValueError("cannot judge this")
    return len(set(solution_str)) / 20
"""


def test_the_last_lines_are_in_the_run_folder_and_named_where_a_function_fails(
    online_file: Path, tmp_path: Path
) -> None:
    """The function prints before there is a run folder, too, in the dry run: a folder that must be new is new."""
    (tmp_path / "prints.py").write_text(PRINTS)
    words = [f"reward.function={tmp_path / 'prints.py'}:score", "reward.workers=1", "run.steps=2", "run.resume=never"]
    done = lockstep("train", online_file, *words, "reward.max_failures=0.9")
    assert done.returncode == 0, done.stderr
    log = tmp_path / "runs" / "run" / "rewards" / "worker-0.log"
    lines = log.read_text().splitlines()
    assert lines[0].startswith("[process ")
    # The dry run tries an empty answer first.
    assert lines[1] == "judging 0 characters"
    assert len(lines) > 1 + 2 * 12
    said = "".join(done.stdout.split())
    assert "cannotjudgethis(prints.pyline5)" in said
    assert f"{log})" in said
    # The reason that is stored does not depend on which process was free.
    assert "worker-0" not in (log.parent.parent / "samples.jsonl").read_text()
