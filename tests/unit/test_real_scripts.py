"""Training scripts of public projects that use verl or OpenRLHF: each converts, or is refused with reason and remedy.

Every day a sample runs; `slow` runs all. `python tests/support/real_scripts.py` records the outcomes that the pages
docs/from-verl.md and docs/from-openrlhf.md count.
"""

from __future__ import annotations

import json
import re

import pytest

from lockstep.compat.shell import read_script
from lockstep.compat.shell_expansion import MARK
from real_scripts import FOLDER, outcome_of, problems_of, real_scripts, recorded

SCRIPTS = real_scripts()
SAMPLE = set(list(SCRIPTS)[::60])
CASES = [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in SCRIPTS]


def test_the_collection_is_large_and_diverse() -> None:
    assert len(SCRIPTS) >= 300
    assert len({script.repository for script in SCRIPTS.values()}) >= 40
    assert sum(script.peer == "openrlhf" for script in SCRIPTS.values()) >= 60
    assert not {script.repository.lower() for script in SCRIPTS.values()} & {
        "volcengine/verl",
        "verl-project/verl",
        "openrlhf/openrlhf",
    }
    assert set(recorded()) == set(SCRIPTS)


def test_three_quarters_of_three_hundred_scripts_with_released_keys_convert() -> None:
    released = [name for name, script in SCRIPTS.items() if script.group == "released"]
    assert len(released) >= 300
    assert sum(recorded()[name] == "converted" for name in released) >= 0.75 * len(released)


def test_the_files_hold_no_foreign_paths_hosts_or_keys() -> None:
    for peer in ("verl", "openrlhf"):
        file = FOLDER / f"real_{peer}.json"
        text = file.read_text(encoding="utf-8")
        assert not re.search(
            r"https?://(?!host:8000)|/home/|/mnt/|/root/|hf_[A-Za-z]{20}|\b[0-9a-f]{40}\b(?!\",\"lic)", text
        )
        for project in json.loads(text):
            assert re.fullmatch(r"[0-9a-f]{40}", project["commit"])
            assert project["licence"]


@pytest.mark.parametrize("name", CASES)
def test_it_converts_or_names_reason_and_remedy(name: str) -> None:
    problems = problems_of(SCRIPTS[name])
    if recorded()[name] == "converted":
        assert not problems, [problem.where for problem in problems]
    for problem in problems:
        assert problem.why, problem.where
        assert problem.remedy, problem.where


@pytest.mark.slow
def test_the_recorded_outcomes_are_current() -> None:
    found = {name: outcome_of(script) for name, script in SCRIPTS.items()}
    assert found == recorded(), "run `python tests/support/real_scripts.py`, then `make docs`"


@pytest.mark.slow
def test_each_setting_of_a_converted_script_has_an_outcome() -> None:
    for name in [name for name, outcome in recorded().items() if outcome == "converted"]:
        done = SCRIPTS[name].convert()
        assert len(done.outcomes) == len(done.settings.given)
        for found in done.outcomes:
            assert found.to if found.outcome in ("mapped", "changed") else found.note, (name, found.key)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("A=0,1,2,3\nrun n=$(echo $A | awk -F',' '{print NF}')", ["run", "n=4"]),
        ("A=0,1\nrun n=$(( $(echo $A | grep -o , | wc -l) + 1 ))", ["run", "n=2"]),
        ("A=0,1,2\nrun n=$(echo $A | tr ',' '\\n' | wc -l)", ["run", "n=3"]),
        (
            "M=Org/Name-7B\nrun $(echo $M | cut -d'/' -f2) $(echo $M | awk -F/ '{print $NF}')",
            ["run", "Name-7B", "Name-7B"],
        ),
        ("run $(echo True | tr '[:upper:]' '[:lower:]')", ["run", "true"]),
        ("M=a\nrun $(echo $M | sed s/a/b/)", ["run", f"{MARK}$(echo $M | sed s/a/b/){MARK}"]),
        ("run last \\", ["run", "last"]),
    ],
)
def test_pipelines_of_filters_are_evaluated(script: str, words: list[str]) -> None:
    """The expected words are those that bash prints."""
    assert [word.text for word in read_script(script).commands[0]] == words
