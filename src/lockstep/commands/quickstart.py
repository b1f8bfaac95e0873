"""`lockstep quickstart`: trains the embedded tiny model to add numbers, with SFT and then with GRPO, on any machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import join

import typer

from lockstep.run.metrics import read_metrics
from lockstep.run.model_card import before_and_after
from lockstep.run.output import write
from lockstep.run.screen import Screen, shown

RUN = "runs/grpo-arithmetic"
MODEL = Path("quickstart/model")

NEXT = f"""
Next:
  lockstep generate {RUN} --chat   talk to it
  lockstep view                                   its curves and samples, in a browser
  head -n 1 {RUN}/samples.jsonl    what it said and earned
  lockstep recipes ppo                            what a method sets
  lockstep train grpo-arithmetic method=dapo run.name=dapo
  lockstep plan grpo-arithmetic batch.prompts=64  batches and memory of a run
  lockstep export {RUN} my-model   a Hugging Face folder

Before and after GRPO (reward of sampled answers in training, greedy accuracy on
sums that the model was not trained on):"""


def quickstart_commands(overrides: Sequence[str]) -> list[list[str]]:
    """Returns the commands of the quickstart. `overrides` are recipe keys for both training runs."""
    return [
        ["tiny", str(MODEL)],
        ["data", "arithmetic", "quickstart/carry", "--difficulty", "2"],
        ["train", "warmup-arithmetic", *overrides],
        ["train", "grpo-arithmetic", *overrides],
        ["generate", RUN, "What is 42 + 37?"],
    ]


def run_quickstart(overrides: Sequence[str], run_command: Callable[[list[str]], object]) -> None:
    """Prints and runs the commands of the quickstart in this process, which imports torch only once."""
    for number, words in enumerate(quickstart_commands(overrides), 1):
        write()
        Screen.on_stdout().print(shown(f"{number}. {join(['lockstep', *words])}", "bold"), soft_wrap=True)
        if words[0] == "tiny" and (MODEL / "config.json").is_file():
            continue
        if code := run_command(words):
            raise typer.Exit(int(str(code)))
    write(NEXT)
    for name, change in before_and_after(read_metrics(Path(RUN) / "metrics.jsonl")):
        write(f"  {name:14}{change}")
