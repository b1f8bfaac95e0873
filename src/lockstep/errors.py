"""Errors in user input. Each says where the problem is, what is wrong, and how to fix it."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from lockstep.masking import Unresolved, expanded, masked

if TYPE_CHECKING:
    from typing import Self  # Python 3.10 does not have it

# The kinds of problems. Where the same kind occurs for several keys or files, `Problem.where` tells them apart.
CODES = {
    # Settings: keys, options, environment
    "unknown-key": "no such key, option or flag",
    "unknown-name": "the value is not one of the names that the key accepts",
    "not-set": "a required key, option or value is not set",
    "empty-value": "the value is empty",
    "invalid-value": "the value has the wrong type or form",
    "invalid-name": "not a valid name",
    "invalid-syntax": "the argument cannot be parsed",
    "invalid-regex": "not a regular expression",
    "invalid-address": "not the address of a server or cluster",
    "invalid-yaml": "not valid YAML",
    "nested-too-deeply": "the value has too many levels",
    "not-a-group": "a single value where a group of keys is needed, or the reverse",
    "not-a-number": "not a finite number",
    "out-of-range": "a number outside the allowed range",
    "empty-range": "the lower bound is not below the upper bound",
    "indivisible": "one size is not a multiple of the other",
    "wrong-count": "the number of entries does not match",
    "wrong-type": "an object of another type is needed",
    "duplicate-name": "the same name occurs twice",
    "conflicting-keys": "two settings exclude each other",
    "unused-key": "the setting has no effect in this run",
    "needs-key": "the setting needs another one",
    "unsupported-combination": "these settings do not work together",
    "unresolved-reference": "a variable or reference has no value",
    "secret-in-recipe": "a secret is stored in the recipe, or the key does not support references to secrets",
    "missing-secret": "a secret or login that the run needs is missing",
    "bad-environment": "variables of the environment are missing or invalid",
    "reserved-flag": "lockstep sets this flag itself",
    "open-server": "the server would be open to other machines without a key",
    "identical-samples": "greedy decoding returns the same answer every time",
    "truncated-sampling": "engine and trainer would use different sampling distributions",
    "off-policy": "the loss does not correct for responses of an older policy",
    "no-steps-left": "warm-up takes all steps",
    "unknown-source": "no row has this data source",
    "unknown-metric": "the run does not have this metric",
    "unknown-module": "no module of the model matches the name",
    # Files and folders
    "no-such-file": "the file or folder does not exist",
    "not-a-file": "a folder or a pipe where a file is needed",
    "not-a-folder": "a file where a folder is needed",
    "not-a-run": "not a run folder",
    "already-exists": "the target exists already",
    "not-empty": "the output folder is not empty",
    "missing-file": "a file that belongs to the folder is missing",
    "several-candidates": "the path matches several inputs",
    "unreadable": "the file cannot be read",
    "unwritable": "the file or folder cannot be written",
    "damaged-file": "the file is truncated or damaged",
    "unsupported-format": "the kind of file is not supported",
    "unsupported-version": "the format version is not supported",
    "untrusted-code": "the file would run code, and lockstep does not run it",
    "disk-full": "not enough free disk space",
    "file-system-error": "the operating system refused the operation",
    "folder-in-use": "another process uses the run folder",
    "no-file-locks": "the file system cannot lock files",
    "no-home": "there is no folder for the cache",
    "not-shared": "the machines of the run do not have the same files",
    # Rows of data
    "no-rows": "no row is left to train on or to score",
    "too-few-rows": "more rows are needed",
    "invalid-row": "the row does not have the expected structure",
    "invalid-json": "not valid JSON",
    "invalid-csv": "not valid CSV",
    "not-utf8": "the text is not UTF-8",
    "mixed-rows": "rows differ in columns or types",
    "missing-column": "the row or file lacks a column",
    "unclear-columns": "the meaning of the columns is unclear",
    "empty-field": "a field of the row is empty",
    "not-text": "only text is supported",
    "invalid-chat": "not a list of messages with role and content",
    "unknown-role": "a message has an unknown role",
    "invalid-tool": "a tool or tool call is malformed",
    "invalid-turn-weight": "the training weight of a turn is invalid",
    "invalid-label": "the label of a row or step is invalid",
    "invalid-ground-truth": "the ground truth does not suit the rule",
    "empty-prompt": "the prompt is empty",
    "no-answer": "there is no answer to train on",
    "prompt-ends-with-assistant": "the prompt ends with an assistant turn",
    "different-prompts": "the responses of a row answer different prompts",
    "identical-responses": "the responses of a row are the same",
    "swapped-responses": "the rejected response is rated above the chosen one",
    "one-class-only": "all rows have the same label",
    "missing-placeholder": "a placeholder is missing in a text or template",
    "lost-content": "the output format cannot represent part of the row",
    "row-too-long": "the row exceeds the limit on its length",
    "truncated-away": "truncation removes what would be trained",
    "over-context": "longer than the context of the model",
    "over-batch-tokens": "does not fit into batch.tokens",
    "rotary-limit": "longer than the range in which rotary positions are fixed",
    "no-trained-token": "the loss mask selects no token",
    "no-end-token": "the text does not end with an end token",
    "two-bos-tokens": "the text starts with two BOS tokens",
    "unknown-token": "not one token of the vocabulary",
    "no-chat-template": "the row or option needs a chat template",
    "template-error": "the chat template raised an error",
    "template-changes-chat": "the chat template drops or changes content",
    "template-unstable": "the chat template renders the same turns differently",
    # Models, adapters and checkpoints
    "unsupported-model": "the model or one of its operations is not supported",
    "wrong-model-kind": "a model of another kind is needed",
    "unsupported-dtype": "the device does not support the data type",
    "quantized-weights": "quantized weights cannot be trained",
    "missing-weight": "a weight is missing",
    "unknown-weight": "the model has no place for a weight",
    "wrong-shape": "a tensor has another shape",
    "not-finite": "a number is NaN or infinite",
    "untied-weights": "the output head differs from the embedding",
    "other-vocabulary": "the tokenizers or vocabularies of two models differ",
    "other-weights": "not the weights that the recorded run started from",
    "no-tokenizer": "the model folder has no usable tokenizer",
    "no-adapter": "there is no adapter",
    "no-base-model": "the base model of the adapter is not available",
    "unfit-adapter": "the adapter cannot be trained or merged",
    "router-loss": "the load-balancing loss of the model must be set or disabled",
    "router-noise": "the routers of the model add noise in training",
    "missing-shard": "parts of a checkpoint are missing or belong to another run",
    "no-checkpoint": "there is no such checkpoint",
    "damaged-checkpoint": "the checkpoint is incomplete or changed",
    "export-differs": "the exported model computes something else",
    "hub-access": "the hub has no such entry, or rejects the token",
    "hub-failed": "the hub is not reachable, or the transfer failed",
    # Devices, processes and packages
    "unknown-device": "no such kind of device",
    "device-unavailable": "the device is not available on this machine",
    "device-in-use": "another process of the run uses the device",
    "device-error": "the device reported an error",
    "cpu-fallback": "an operator would run on the CPU",
    "wrong-kernel": "a kernel computes wrong results on this device",
    "too-few-devices": "fewer devices than requested",
    "not-enough-memory": "the device has too little memory",
    "wrong-process-count": "the number of processes does not fit the layout",
    "one-process-only": "several processes are not supported here",
    "missing-package": "a package is not installed",
    "unfit-package": "the version of a package does not fit",
    "ray-unreachable": "the Ray cluster does not answer",
    "unreachable-host": "other machines cannot reach this one",
    "port-unavailable": "the address or port cannot be opened",
    # Functions and rewards
    "invalid-function": "the function cannot be found or called",
    "import-failed": "the file or module cannot be imported",
    "import-side-effect": "importing the file starts a run",
    "function-raised": "a user function raised an exception",
    "function-too-slow": "a user function exceeded its time limit",
    "invalid-return": "a function returned a value that cannot be used",
    "process-lost": "the process of a user function ended",
    "no-rule": "the data source has no reward rule",
    "reward-failed": "responses could not be scored",
    "missing-reward-part": "the score lacks a part",
    "equal-rewards": "all rewards are equal",
    # Training, engines and servers
    "missing-input": "the method needs an input that is missing",
    "missing-logprobs": "the engine returned no usable log-probabilities",
    "logprobs-differ": "the log-probabilities of engine and trainer differ",
    "weights-differ": "the engine does not have the weights of the trainer",
    "weights-changed": "the weights of the server changed during generation",
    "weight-sync-failed": "the weights did not reach the engine",
    "server-failed": "the inference server reported an error",
    "server-lost": "the inference server ended or does not answer",
    "unfit-server": "the inference server runs with other settings",
    "worker-lost": "the rollout process ended or does not answer",
    "wrong-response": "the server returned a response that does not fit the request",
    "empty-response": "a response has no token",
    "wrong-initial-loss": "the first loss is not that of equal models",
    "idle-updates": "updates change nothing",
    "changed-setting": "a setting differs from that of the checkpoint or output",
    "changed-model": "a model has changed since the checkpoint",
    "changed-data": "the data has changed since it was read",
    "tracker-failed": "the experiment tracker could not start",
    "mixed-units": "sums over tokens and over sequences are mixed",
    "unsaved-gradients": "accumulated gradients would be lost",
    "nothing-trained": "no update was made yet",
    # Comparison, replay and migration
    "no-steps": "the log contains no step",
    "ambiguous-steps": "a step has several values",
    "unnamed-metric": "the log does not name its metric",
    "nothing-in-common": "the two runs have nothing to compare",
    "no-tape": "the run has no tape",
    "missing-on-tape": "the tape does not contain what the replay needs",
    "not-replayable": "the run cannot be replayed this way",
    "not-training": "the command does not train",
    "unsupported-setting": "lockstep has no equivalent of the setting",
    "more-problems": "there are more problems of the same kind",
}


@dataclass(frozen=True)
class Problem:
    """One problem. `where` names a key, a file and row, a token or a device; `code` the kind of problem."""

    where: str
    why: str
    remedy: str = ""
    code: str = field(kw_only=True)
    """The kind of problem, one of `CODES`. Unlike the wording, it is stable."""

    def __post_init__(self) -> None:
        # The texts contain input values and are printed and logged, so secrets are masked.
        for name in ("where", "why", "remedy"):
            object.__setattr__(self, name, masked(getattr(self, name)))

    def __str__(self) -> str:
        return f"{self.where} [{self.code}]: {self.why}" + (f"\n    -> {self.remedy}" if self.remedy else "")


# Problems of the checks of recipes: a key without effect, one that needs another, keys that do not work together.
unused = partial(Problem, code="unused-key")
needs = partial(Problem, code="needs-key")
conflict = partial(Problem, code="conflicting-keys")
unfit = partial(Problem, code="unsupported-combination")


class Refusal(Exception):
    """Invalid input. Carries all problems, not only the first."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @classmethod
    def at(cls, where: object, why: str, remedy: str = "", *, code: str) -> Self:
        """A refusal with one problem; `where` is converted to text."""
        return cls([Problem(str(where), why, remedy, code=code)])


def with_secrets(text: str, key: str) -> str:
    """Returns a recipe value with its secret references resolved. A missing secret is reported at `key`."""
    try:
        return expanded(text)
    except Unresolved as error:
        raise Refusal.at(
            key, f"{text}: {error}", "provide it on every machine where the run starts", code="missing-secret"
        ) from error


class RenamedKey(FutureWarning):
    """A recipe uses the old name of a key."""


class LostProcess(Refusal):
    """A process of the run was killed or hangs. The input is not the cause, so the run can be resumed."""


def refuse_all(problems: Sequence[Problem], what: str = "") -> None:
    """Raises a refusal if there are problems. With `what`, it lists the first problems and counts the others."""
    if problems:
        raise Refusal(shortened(problems, what) if what else problems)


def shortened(problems: Sequence[Problem], what: str, most: int = 10) -> list[Problem]:
    """Returns the first `most` problems and the number of the others."""
    hidden = len(problems) - most
    others = [Problem(f"{hidden:,} more {what}", "have problems too", code="more-problems")] if hidden > 0 else []
    return [*problems[:most], *others]


def missing_extra(package: str, extra: str, needed_for: str) -> Refusal:
    """Returns the refusal for an optional package that is not installed."""
    return Refusal.at(
        f"package {package}",
        f"needed for {needed_for} and not installed",
        f'in a checkout: pip install -c constraints.txt -e ".[{extra}]"; elsewhere: pip install "lockstep-rl[{extra}]"',
        code="missing-package",
    )


def first_line(error: BaseException) -> str:
    """Returns the message of an error on one line."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    # If the first line ends with a colon, the second line is added.
    return f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


# Remedies for errors of the file system: no space, no permission, broken disk.
_MACHINE = {
    errno.ENOSPC: "free some disk",
    errno.EDQUOT: "free some of the quota",
    errno.EFBIG: "raise the file size limit",
    errno.EROFS: "choose a writable folder, or mount it writable",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.EIO: "check the disk and the kernel log",
    errno.ESTALE: "check the network file system",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def refusal_of_machine(error: OSError) -> Refusal | None:
    """Returns the refusal for a file system error of the machine; None for any other error."""
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
    """The user stopped the run; the step was completed and saved."""


# Exit code EX_TEMPFAIL of sysexits.h: the run stalled or lost a process (`LostProcess`), and a retry can help.
STALLED = 75
