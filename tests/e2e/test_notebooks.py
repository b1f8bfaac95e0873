"""The notebooks run in a real kernel, and each shows what it says. `make test-notebooks` installs the kernel."""

from __future__ import annotations

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hang import HANG

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
in_a_kernel = pytest.mark.skipif(
    not (find_spec("nbclient") and find_spec("ipykernel")), reason="no notebook kernel: run make test-notebooks"
)


def executed(name: str, folder: Path) -> tuple[str, str]:
    """The text and the HTML that the cells of a notebook show."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    client = NotebookClient(notebook, timeout=HANG, kernel_name="python3", resources={"metadata": {"path": folder}})
    client.execute()
    outputs: list[Any] = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    html = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    return "".join(output.get("text", "") for output in outputs), "".join(html)


@pytest.mark.slow
@in_a_kernel
def test_sft(tmp_path: Path) -> None:
    text, html = executed("sft.ipynb", tmp_path)
    assert "right: 4 of 4" in text
    steps = int(re.findall(r"steps: (\d+)", text)[0])
    assert 5 < steps < 200
    assert f'<progress max="200" value="{steps}"' in html
    assert "train/perplexity" in (tmp_path / "runs/capitals/metrics.jsonl").read_text()


@pytest.mark.slow
@in_a_kernel
def test_grpo_with_a_reward_of_its_own(tmp_path: Path) -> None:
    text, html = executed("grpo.ipynb", tmp_path)
    first, last = (float(number) for number in re.findall(r"reward: ([\d.]+) -> ([\d.]+)", text)[0])
    assert first < 0.3
    assert last > 0.8
    assert '<progress max="20" value="20"' in html


@pytest.mark.slow
@in_a_kernel
def test_comparing_two_devices(tmp_path: Path) -> None:
    text, _ = executed("compare.ipynb", tmp_path)
    assert "verdict: in step" in text
    assert "exit code: 0" in text


def test_notebooks_are_stored_without_outputs_and_each_is_run_here() -> None:
    files = sorted(NOTEBOOKS.glob("*.ipynb"))
    assert {file.name for file in files} == set(re.findall(r'executed\("(\w+\.ipynb)"', Path(__file__).read_text()))
    for file in files:
        cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
        assert cells
        for cell in cells:
            ast.parse("".join(cell["source"]), file.name)
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
