"""Errors in user input. Each error says where the problem is, what is wrong, and how to fix it."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lockstep.masking import Unresolved, expanded, masked
from lockstep.version import PACKAGE_FOLDER

if TYPE_CHECKING:
    from typing import Self  # Python 3.10 does not have typing.Self

# Error codes with their meaning. If one code occurs for several keys or files, `Problem.where` distinguishes them.
CODES = {
    # Settings: keys, options, environment
    "unknown-key": "the key, option or flag does not exist",
    "unknown-name": "the value is not one of the names that the key accepts",
    "not-set": "a required key, option or value is not set",
    "empty-value": "the value is empty",
    "invalid-value": "the value has the wrong type or format",
    "invalid-name": "the value is not a valid name",
    "invalid-syntax": "the argument cannot be parsed",
    "invalid-regex": "the value is not a regular expression",
    "invalid-address": "the value is not the address of a server or cluster",
    "invalid-yaml": "the file or value is not valid YAML",
    "nested-too-deeply": "the value has too many nested levels",
    "not-a-group": "a single value is set where a group of keys is needed, or the reverse",
    "not-a-number": "the value is not a finite number",
    "out-of-range": "the number is outside the allowed range",
    "empty-range": "the lower bound is not below the upper bound",
    "indivisible": "one number is not a multiple of another, but must be",
    "wrong-count": "a list does not have the required number of entries",
    "wrong-type": "the value has the wrong type",
    "duplicate-name": "the same name occurs twice",
    "conflicting-keys": "two settings cannot be used together",
    "unused-key": "the setting has no effect in this run",
    "needs-key": "the setting needs another setting that is missing",
    "unsupported-combination": "the settings do not work in this combination",
    "unresolved-reference": "a variable or reference in a setting has no value",
    "secret-in-recipe": "a secret is stored in the recipe, or the key does not support references to secrets",
    "missing-secret": "a secret or login that the run needs is missing",
    "bad-environment": "environment variables are missing or invalid",
    "reserved-flag": "lockstep sets this flag itself, so it must not be given",
    "open-server": "the server would accept requests of other machines without an API key",
    "identical-samples": "several samples are requested, but greedy decoding returns the same answer every time",
    "truncated-sampling": "rollout engine and trainer would use different sampling distributions",
    "off-policy": "the loss does not correct for responses of an older policy",
    "no-steps-left": "the warm-up leaves no step for training",
    "unknown-source": "no row has the named `data_source`",
    "unknown-metric": "the run does not have this metric",
    "unknown-module": "no module of the model matches the name",
    # Files and folders
    "no-such-file": "the file or folder does not exist",
    "not-a-file": "the path is a folder or a pipe, but a file is needed",
    "not-a-folder": "the path is a file, but a folder is needed",
    "not-a-run": "the folder is not a run folder",
    "already-exists": "the target file or folder exists already",
    "not-empty": "the output folder is not empty",
    "missing-file": "a file that belongs to the folder is missing",
    "several-candidates": "the path matches several inputs",
    "unreadable": "the file cannot be read",
    "unwritable": "the file or folder cannot be written",
    "damaged-file": "the file is truncated or damaged",
    "unsupported-format": "the file format is not supported",
    "unsupported-version": "the version of the file format is not supported",
    "untrusted-code": "loading the file would run code, and lockstep does not run code of files",
    "disk-full": "not enough free disk space",
    "file-system-error": "the operating system refused the operation",
    "folder-in-use": "another process uses the run folder",
    "no-file-locks": "the file system cannot lock files",
    "no-home": "there is no home directory for the cache",
    "not-shared": "the machines of the run do not have the same files",
    # Rows of data
    "no-rows": "no row is left to train on or to score",
    "too-few-rows": "there are fewer rows than needed",
    "invalid-row": "the row does not have the expected structure",
    "invalid-json": "the file or value is not valid JSON",
    "invalid-csv": "the file is not valid CSV",
    "not-utf8": "the text is not UTF-8",
    "mixed-rows": "rows of one source differ in columns or types",
    "missing-column": "the row or file lacks a column",
    "unclear-columns": "the columns with prompts, responses or labels cannot be identified",
    "empty-field": "a field of the row is empty",
    "not-text": "a value is not text, and only text is supported",
    "invalid-chat": "the chat is not a list of messages with role and content",
    "unknown-role": "a message has an unknown role",
    "invalid-tool": "a tool or tool call is malformed",
    "invalid-turn-weight": "the training weight of a turn is invalid",
    "invalid-label": "the label of a row or step is invalid",
    "invalid-ground-truth": "the reward rule cannot use the ground truth",
    "empty-prompt": "the prompt is empty",
    "no-answer": "the row has no answer to train on",
    "prompt-ends-with-assistant": "the prompt ends with an assistant turn",
    "different-prompts": "the responses of a row answer different prompts",
    "identical-responses": "the responses of a row are equal",
    "swapped-responses": "the rejected response has a higher score than the chosen response",
    "one-class-only": "all rows have the same label",
    "missing-placeholder": "a text or template lacks a required placeholder",
    "lost-content": "the output format cannot represent part of the row",
    "row-too-long": "the row has more tokens than the limit",
    "truncated-away": "truncation removes all tokens that would be trained",
    "over-context": "the sequence is longer than the context of the model",
    "over-batch-tokens": "the row does not fit into batch.tokens",
    "rotary-limit": "the sequence is so long that the model changes its rotary position embedding (longrope, dynamic)",
    "no-trained-token": "the loss mask selects no token",
    "no-end-token": "the trained text does not end with an end-of-sequence token",
    "two-bos-tokens": "the text starts with two BOS tokens",
    "unknown-token": "a token or word is not a single token of the vocabulary",
    "no-chat-template": "the row or option needs a chat template",
    "template-error": "the chat template raised an error",
    "template-changes-chat": "the chat template drops or changes content",
    "template-unstable": "the chat template renders the same turns differently in different chats",
    # Models, adapters and checkpoints
    "unsupported-model": "the model or one of its operations is not supported",
    "wrong-model-kind": "the model has the wrong type, such as a language model instead of a reward model",
    "unsupported-dtype": "the device does not support the data type",
    "quantized-weights": "the weights are quantized in a way that lockstep cannot read or use here",
    "missing-weight": "a weight of the model is missing in the file or message",
    "unknown-weight": "a weight does not belong to the model",
    "wrong-shape": "a tensor does not have the expected shape",
    "not-finite": "a number is NaN or infinite",
    "untied-weights": "the output head differs from the embedding, but must be tied to it",
    "other-vocabulary": "the tokenizers or vocabularies of two models differ",
    "other-weights": "the model does not have the weights that the recorded run started from",
    "no-tokenizer": "the model folder has no usable tokenizer",
    "no-adapter": "the model or folder has no LoRA adapter",
    "no-base-model": "the base model of the adapter is not available",
    "unfit-adapter": "the LoRA adapter cannot be trained or merged",
    "router-loss": "the load-balancing loss of the mixture-of-experts model must be set or disabled",
    "router-noise": "the expert routers of the model add random noise in training",
    "missing-shard": "parts of a checkpoint are missing or belong to another run",
    "no-checkpoint": "the checkpoint does not exist",
    "damaged-checkpoint": "the checkpoint is incomplete or was changed",
    "export-differs": "the exported model gives other outputs than the trained model",
    "hub-access": "the Hugging Face hub has no such entry, or rejects the access token",
    "hub-failed": "the Hugging Face hub is not reachable, or the transfer failed",
    # Devices, processes and packages
    "unknown-device": "the device name is unknown",
    "device-unavailable": "the device is not available on this machine",
    "device-in-use": "another process of the run uses the device",
    "device-error": "the device reported an error",
    "cpu-fallback": "an operator without a device kernel would run on the CPU",
    "wrong-kernel": "a kernel computes wrong results on this device",
    "too-few-devices": "fewer devices are visible than requested",
    "not-enough-memory": "the device has too little memory",
    "wrong-process-count": "the number of processes does not fit the parallel layout",
    "one-process-only": "this function does not support several processes",
    "missing-package": "a package is not installed",
    "unfit-package": "the version of a package is not compatible",
    "ray-unreachable": "the Ray cluster does not answer",
    "unreachable-host": "other machines cannot reach this machine",
    "port-unavailable": "the address or port cannot be opened",
    # Functions and rewards
    "invalid-function": "the function cannot be found or called",
    "import-failed": "the file or module cannot be imported",
    "import-side-effect": "importing the file starts a run",
    "function-raised": "a user function raised an exception",
    "function-too-slow": "a user function exceeded its time limit",
    "invalid-return": "a user function returned a value that cannot be used",
    "process-lost": "the process that runs a user function ended",
    "no-sandbox": "this machine cannot run programs in a sandbox",
    "no-rule": "the data source has no reward rule",
    "reward-failed": "the reward of some responses could not be computed",
    "missing-reward-part": "the score of a response lacks one of the required rewards",
    "equal-rewards": "all rewards are equal",
    # Training, engines and servers
    "missing-input": "a required input is missing",
    "missing-logprobs": "the rollout engine returned no usable log-probabilities",
    "logprobs-differ": "the log-probabilities of rollout engine and trainer differ",
    "weights-differ": "the rollout engine does not have the weights of the trainer",
    "weights-changed": "the weights of the inference server changed during generation",
    "weight-sync-failed": "the transfer of weights to the rollout engine failed",
    "server-failed": "the inference server reported an error",
    "server-lost": "the inference server ended or does not answer",
    "unfit-server": "the inference server runs with settings that do not fit the run",
    "worker-lost": "the rollout process ended or does not answer",
    "wrong-response": "the inference server returned a response that does not fit the request",
    "empty-response": "a response has no token",
    "wrong-initial-loss": "policy and reference are equal, but the first loss is not the loss of equal models",
    "idle-updates": "several updates in a row did not change the model",
    "changed-setting": "a setting differs from the setting of the checkpoint or output folder",
    "changed-model": "a model has changed since the checkpoint",
    "changed-data": "the data has changed since it was read",
    "tracker-failed": "the experiment tracker could not start",
    "mixed-units": "one step mixes losses summed over tokens and losses summed over sequences",
    "unsaved-gradients": "accumulated gradients would not be saved",
    "nothing-trained": "no optimizer step was made yet",
    # Comparison, replay and migration
    "no-steps": "the log contains no step",
    "ambiguous-steps": "the log has several values of a metric for one step",
    "unnamed-metric": "the log does not name its metric",
    "nothing-in-common": "the two runs have no metric or update in common",
    "no-tape": "the run has no tape, which is the record of tensors that a replay needs",
    "missing-on-tape": "the tape (the run's record of tensors) does not contain what the replay needs",
    "not-replayable": "the run cannot be replayed in the requested mode",
    "not-training": "the command to migrate does not train a model",
    "unsupported-setting": "lockstep has no equivalent of the setting",
    "more-problems": "there are more problems of the same kind than shown",
}


@dataclass(frozen=True)
class Problem:
    """One problem. `where` names a key, a file and row, a token or a device. `code` is the error code."""

    where: str
    why: str
    remedy: str = ""
    code: str = field(kw_only=True)
    """The error code, a key of `CODES`. Error codes stay the same, but message texts may change."""

    def __post_init__(self) -> None:
        # The texts of a problem contain input values and are printed and logged, so secrets are masked.
        for name in ("where", "why", "remedy"):
            object.__setattr__(self, name, masked(getattr(self, name)))

    def __str__(self) -> str:
        return f"{self.where} [{self.code}]: {self.why}" + (f"\n    -> {self.remedy}" if self.remedy else "")


# Constructors for problems of recipe checks: a key without effect, a key that needs another key, keys that conflict.
unused = partial(Problem, code="unused-key")
needs = partial(Problem, code="needs-key")
conflict = partial(Problem, code="conflicting-keys")
unfit = partial(Problem, code="unsupported-combination")


class Refusal(Exception):
    """Invalid input. The exception carries all problems, not only the first."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @classmethod
    def at(cls, where: object, why: str, remedy: str = "", *, code: str) -> Self:
        """Returns a refusal with one problem. `where` is converted to text."""
        return cls([Problem(str(where), why, remedy, code=code)])


def with_secrets(text: str, key: str) -> str:
    """Returns a recipe value with its secret references resolved. A missing secret is reported at `key`."""
    try:
        return expanded(text)
    except Unresolved as error:
        raise Refusal.at(
            key, f"{text}: {error}", "provide the secret on every machine where the run starts", code="missing-secret"
        ) from error


class RenamedKey(FutureWarning):
    """The warning that a recipe uses the old name of a key."""


class LostProcess(Refusal):
    """Raised if a process of the run was killed or hangs. User input is not the cause, so the run can be resumed."""


def refuse_all(problems: Sequence[Problem], what: str = "") -> None:
    """Raises a `Refusal` if there are problems. If `what` is given, the refusal lists only the first problems and the
    number of further problems."""
    if problems:
        raise Refusal(shortened(problems, what) if what else problems)


def shortened(problems: Sequence[Problem], what: str, most: int = 10) -> list[Problem]:
    """Returns the first `most` problems, and one more problem with the number of the others."""
    hidden = len(problems) - most
    others = [Problem(f"{hidden:,} more {what}", "have problems too", code="more-problems")] if hidden > 0 else []
    return [*problems[:most], *others]


def missing_extra(package: str, extra: str, needed_for: str) -> Refusal:
    """Returns the refusal for an optional package that is not installed."""
    return Refusal.at(
        f"package {package}",
        f"is needed for {needed_for}, but is not installed",
        install_command(extra),
        code="missing-package",
    )


def install_command(extra: str) -> str:
    """Returns the command that installs an extra into the running environment. The command works in every folder: it
    names the checkout, or the packages of the extra."""
    # Environments of uv have no pip.
    install = f"{sys.executable} -m pip install" if find_spec("pip") else f"uv pip install --python {sys.executable}"
    checkout = PACKAGE_FOLDER.parents[1]
    if (checkout / "constraints-common.txt").is_file():
        # Without the torch of constraints.txt, because the environments of some devices have another torch.
        return f'{install} -c "{checkout}/constraints-common.txt" -e "{checkout}[{extra}]"'
    # Not the name of this package: a wheel can come from elsewhere than the package index.
    return " ".join([install, *(f"'{package}'" for package in _packages_of(extra))])


def _packages_of(extra: str) -> list[str]:
    """Returns the requirements of an extra, without the condition that names the extra."""
    from importlib import metadata  # only for this error: the import takes longer than all of this module

    try:
        lines = metadata.requires("lockstep-rl") or []
    except metadata.PackageNotFoundError:  # a copy of the sources on PYTHONPATH
        return [f"lockstep-rl[{extra}]"]
    condition = re.compile(rf"""( and )?extra == ["']{extra}["']""")
    parts = [line.partition(";") for line in lines]
    kept = [(name.strip(), condition.sub("", marker).strip()) for name, _, marker in parts if condition.search(marker)]
    return [f"{name}; {marker}" if marker else name for name, marker in kept]


def first_line(error: BaseException) -> str:
    """Returns the message of an error on one line."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    # If the first line ends with a colon, the message continues on the second line, so that line is added.
    return f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


# Remedies for file system errors, such as a full disk, a missing permission or a broken disk.
_MACHINE = {
    errno.ENOSPC: "free some disk space",
    errno.EDQUOT: "free some space of the disk quota",
    errno.EFBIG: "raise the file size limit",
    errno.EROFS: "choose a writable folder, or mount the file system writable",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.EIO: "check the disk and the kernel log",
    errno.ESTALE: "check the network file system",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def refusal_of_machine(error: OSError) -> Refusal | None:
    """Returns the refusal for a file system error with a known remedy, such as a full disk. Returns None for any other
    error."""
    if error.errno not in _MACHINE:
        return None
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return Refusal.at(
        " and ".join(names) or "the disk", str(error.strerror), _MACHINE[error.errno], code="file-system-error"
    )


def unwritten(path: object, error: Exception, remedy: str = "") -> Refusal:
    """Returns the refusal for a file that could not be written."""
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    advice = _MACHINE.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    return Refusal.at(
        path, f"could not be written: {why}", "; ".join(part for part in (advice, remedy) if part), code="unwritable"
    )


class Interrupted(Exception):
    """Raised when the user stops the run, after the current step was completed and saved."""


# Exit code EX_TEMPFAIL of sysexits.h. The run stalled or lost a process (`LostProcess`), so a retry can help.
STALLED = 75
