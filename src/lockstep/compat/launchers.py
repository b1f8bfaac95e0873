"""Finds the training command of verl or OpenRLHF in a shell command, behind launchers and containers.

The program may follow `torchrun`, `deepspeed`, `ray job submit ... --`, `srun`, `apptainer exec`, `docker exec`,
`conda run`, `uv run`, `accelerate launch`, `env NAME=VALUE` or `nohup`. It may also be inside a string: `bash -c
"..."`, `eval "..."`, `sbatch --wrap "..."`, `ssh HOST "..."`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from lockstep.compat.shell import Script, Word, read_script

# Patterns for the module, the file and the launcher flags of a command such as `torchrun --nproc-per-node 8 -m
# verl.trainer.main_ppo`.
_MODULE = re.compile(r"^(?:lockstep\.compat\.)?(verl|openrlhf|recipe)(\.[\w]+)+$")
_FILE = re.compile(r"(?:^|/)(verl|openrlhf|recipe)/(?:[\w/]+/)?(\w+)\.py$")
_PREFIX = "lockstep.compat."
_OURS = re.compile(r"^lockstep\.compat\.(verl|openrlhf)$")
# Scripts of OpenRLHF before 0.4, which are files in its folder examples/. Other projects have files of these names.
_OLD_FILE = re.compile(r"(?:^|/)(train_(?:sft|dpo|rm|kto|kd|prm|ppo|ppo_ray|pt|rs)|batch_inference)\.py$")
_OLD_FLAGS = ("--pretrain", "--reward_pretrain", "--prompt_data")
# Settings that only verl has: a program with two of them is a copy of verl or a recipe.
_VERL_KEYS = ("actor_rollout_ref.", "algorithm.adv_estimator", "data.train_files", "trainer.project_name")
_PYTHON_FILE = re.compile(r"^[\w./-]+\.py$")
_DEVICES = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--num_processes")
_NODES = ("--nnodes", "--num_nodes", "--num_machines")
_STRINGS = ("bash", "sh", "zsh", "dash")


@dataclass(frozen=True)
class TrainingCommand:
    """A training command: the trainer (`peer`), its program and words, and the launcher's devices and nodes."""

    peer: str
    program: str
    words: tuple[Word, ...]
    devices: int | None = None
    nodes: int | None = None
    module: str = ""
    """The program with its folders, such as `verl.trainer.main_ppo`, if the command names them."""

    @property
    def line(self) -> int:
        return self.words[0].line if self.words else 0


def training_of(words: Sequence[Word], variables: Mapping[str, str] | None = None) -> TrainingCommand | None:
    """Returns the training command of verl or OpenRLHF that a command of a script runs, or None if it runs none.

    `variables` are the script's variables, which a single-quoted string reads when its shell runs.
    """
    inner = _string_command(words, variables or {})
    if inner is not None:
        trainings = [training_of(command, variables) for command in inner.commands]
        return next((training for training in trainings if training is not None), None)
    for place, word in enumerate(words):
        if "data_preprocess" in word.text:  # a data script, which does not train
            return None
        before = words[place - 1].text if place else ""
        found = _program(word.text, before, words[place + 1 :])
        if found is None:
            continue
        peer, module, used = found
        devices, nodes = _number(words[:place], _DEVICES), _number(words[:place], _NODES)
        return TrainingCommand(
            peer, module.rsplit(".", 1)[-1], tuple(words[place + 1 + used :]), devices, nodes, module
        )
    return None


def _program(text: str, before: str, after: Sequence[Word]) -> tuple[str, str, int] | None:
    """Returns trainer, module and the number of further words that name the program, if the word names a program."""
    module = before in ("-m", "--module")
    file = _FILE.search(text) if not text.startswith("-") and "=" not in text else None
    if module and _OURS.match(text) and after:
        return text.rsplit(".", 1)[1], after[0].text, 1
    if module and _MODULE.match(text):
        return _peer(text), text.removeprefix(_PREFIX), 0
    if file is not None:
        return _peer(file[1]), file[0].lstrip("/")[:-3].replace("/", "."), 0
    words = [word.text for word in after]
    old = _OLD_FILE.search(text)
    if old is not None and any(word.split("=")[0] in _OLD_FLAGS for word in words):
        return "openrlhf", old[1], 0
    starts = module or (_PYTHON_FILE.match(text) is not None and "python" in PurePosixPath(before).name)
    keys = sum(any(word.lstrip("+").startswith(key) for word in words) for key in _VERL_KEYS)
    if starts and keys > 1:
        return "verl", text.removesuffix(".py").strip("./").replace("/", "."), 0
    return None


def _peer(module: str) -> str:
    return "openrlhf" if module.removeprefix(_PREFIX).startswith("openrlhf") else "verl"


def _string_command(words: Sequence[Word], variables: Mapping[str, str]) -> Script | None:
    """Returns the inner script of a command that runs a string."""
    texts = [word.text for word in words]
    if texts[:1] == ["eval"] and len(texts) > 1:
        return _inner(" ".join(texts[1:]), words[1].line, variables, one_line=True)
    for place, text in enumerate(texts):
        option = texts[place + 1] if place + 1 < len(texts) else ""
        shell = PurePosixPath(text).name in _STRINGS and re.fullmatch(r"-[a-z]*c", option) is not None
        if shell and place + 2 < len(texts):
            return _inner(texts[place + 2], words[place + 2].line, variables)
        if text == "--wrap" and option:
            return _inner(option, words[place + 1].line, variables)
        if text.startswith("--wrap="):
            return _inner(text.removeprefix("--wrap="), words[place].line, variables)
    if texts[:1] == ["ssh"] and len(texts) > 2 and " " in texts[-1]:
        return _inner(texts[-1], words[-1].line, variables)
    return None


def _inner(text: str, line: int, variables: Mapping[str, str], *, one_line: bool = False) -> Script:
    inner = read_script(text, variables)
    inner.commands = [
        [Word(word.text, line if one_line else line + word.line - 1) for word in command] for command in inner.commands
    ]
    return inner


def _number(words: Sequence[Word], names: Sequence[str]) -> int | None:
    for place, word in enumerate(words):
        name, equals, value = word.text.partition("=")
        if name in names:
            value = value if equals else words[place + 1].text if place + 1 < len(words) else ""
            return int(value) if value.isdigit() else None
    return None


# SLURM ---------------------------------------------------------------------------------------------------------------

_SBATCH = re.compile(r"^#SBATCH\s+(-\w|--[\w-]+)(?:[=\s]\s*)(\S+)", re.MULTILINE)
_SLURM = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "-N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "--gres": ("SLURM_GPUS_ON_NODE",),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--ntasks": ("SLURM_NTASKS",),
    "-n": ("SLURM_NTASKS",),
    "--cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "-c": ("SLURM_CPUS_PER_TASK",),
    "--job-name": ("SLURM_JOB_NAME",),
    "-J": ("SLURM_JOB_NAME",),
    "--partition": ("SLURM_JOB_PARTITION",),
    "-p": ("SLURM_JOB_PARTITION",),
}


def slurm_variables(script: str) -> dict[str, str]:
    """Returns the variables that SLURM sets from the `#SBATCH` lines of a script."""
    values: dict[str, str] = {}
    for option, value in _SBATCH.findall(script):
        # `--gres=gpu:a100:8` and `--gpus-per-node=a100:8` name the type of the devices, too.
        number = value.rsplit(":", 1)[-1] if "g" in option and option != "-g" else value
        values |= dict.fromkeys(_SLURM.get(option, ()), number if "gpu" in option or "gres" in option else value)
    return values
