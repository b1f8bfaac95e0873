"""Detects secrets (passwords, API keys) in values, masks them in text, and resolves references to secrets.

A recipe refers to a secret by name, where `${env:NAME}` is an environment variable and `${file:PATH}` is the text of a
file. Files and output contain only the reference, not the secret. The secret itself is read when it is used, and masked
in all output.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

MASK = "***"
# Recipe keys in which references to secrets (`${env:NAME}`) are replaced by the secret. `*` matches one name.
EXPANDED = (
    *("reward.remote", "reward.arguments.*", "rollout.url", "rollout.server.env.*"),
    *("rollout.tools", "rollout.environment_args.*", "rollout.agent", "val.agent"),
)

_REFERENCE = re.compile(r"\$\{(env|file):([^{}]+)\}")
# Matches user:password@. Digits before the path are a port, not a password, as in http://host:8000/@name. The lengths
# in the regular expression are bounded, because an unbounded one could take hours on a malicious text.
_PASSWORD = re.compile(
    r"(?i)(\b[a-z][a-z0-9+.-]{0,20}://[^\s/:@'\"]{0,256}:)(?!\d{0,9}(?:[/?#]|$))([^\s'\"]{1,2048})(?=@)"
)
# In a URL, a long user name (16 characters or more) without a password is treated as a token.
_USER = re.compile(r"(?i)(\b[a-z][a-z0-9+.-]{0,20}://)([^\s/:@'\"]{16,2048})(?=@)")
_PARAMETER = re.compile(r"([?&;]([\w.~-]+)=)([^&;#\s'\"]+)")
_PARAMETER_WORD = re.compile(
    r"(?:api|access)?key|secret|token|pass|passwd|password|pwd|sig|signature|credentials?|auth|authorization"
)
_NAME = re.compile(
    r"(?i)(?:secret|passw(?:or)?d|passphrase|credentials?|authorization|(?:api|access|private|auth|secret)[_-]?key|"
    r"(?:api|access|auth|bearer|refresh|hf|hub|session|github|gitlab|wandb)[_-]?token|use_wandb|wandb[._-]key)$"
)
# Matches API tokens by their standard prefix, such as `sk-` or `hf_`.
_TOKEN = re.compile(
    r"\b(?:sk-(?:(?:proj|ant|or|svcacct|admin)-[A-Za-z0-9_-]{20,}|[A-Za-z0-9]{20,})|hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|"
    r"AKIA[0-9A-Z]{16}|xox[abpr]-[\w-]{10,})\b"
)
# Placeholders that users write where a tool requires an API key although the server needs none. They are no secrets.
_PLACEHOLDERS = frozenset({"", "empty", "none", "null", "dummy", "no-key", "x"})
_PAIR = re.compile(r"([\w.-]+)\s*:\s*([^,{}\[\]]+)")
_FLAG = re.compile(r"--?([\w.-]+)(?:=(.*))?$", re.DOTALL)
# Secrets shorter than this are not masked, because they would match ordinary text.
_SHORTEST = 4
_concealed: set[str] = set()
# Unicode private-use characters, which temporarily replace the references in a text while the text is masked.
_PLACE = re.compile("[\ue000-\uf8ff]")


class Unresolved(ValueError):
    """Raised if a reference to a secret cannot be resolved. The message says what to do."""


def conceal(value: str) -> None:
    """Registers a secret, so that it is masked in all later output."""
    if len(value) >= _SHORTEST:
        _concealed.add(value)


def without_concealed(text: str) -> str:
    """Masks all secrets in the text that were passed to `conceal`."""
    for value in sorted(_concealed, key=len, reverse=True):
        text = text.replace(value, MASK)
    return text


def masked(text: str) -> str:
    """Masks passwords and keys in URLs, tokens, and secrets passed to `conceal`."""
    text = _TOKEN.sub(MASK, without_concealed(text))
    if "://" not in text:
        return text
    # References to secrets contain colons and slashes, so they are temporarily replaced by single characters.
    named: dict[str, str] = {}
    text = _REFERENCE.sub(lambda found: _place(found[0], named), text)
    if "@" in text:
        text = _USER.sub(_mask_last, _PASSWORD.sub(_mask_last, text))
    text = _PARAMETER.sub(lambda found: _mask_last(found) if _secret_parameter(found[2]) else found[0], text)
    return _PLACE.sub(lambda found: named.get(found[0], found[0]), text)


def _place(reference: str, named: dict[str, str]) -> str:
    sign = chr(0xE000 + len(named) % 6400)
    named[sign] = reference
    return sign


def masked_words(words: Sequence[str]) -> list[str]:
    """Returns the words of a command line with secrets masked, including the value of options such as `--api-key
    KEY`."""
    masked_line: list[str] = []
    for word in words:
        flag, before = _FLAG.match(word), _FLAG.match(masked_line[-1]) if masked_line else None
        name, equals, value = word.partition("=")
        if before is not None and before[2] is None and _NAME.search(before[1]) and not word.startswith("-"):
            masked_line.append(_kept(word))
        elif equals and _NAME.search(flag[1] if flag else name):
            masked_line.append(f"{name}={_kept(value)}")
        elif equals and value[:1] in ("{", "["):
            masked_line.append(masked(f"{name}={_PAIR.sub(_mask_pair, value)}"))
        else:
            masked_line.append(masked(word))
    return masked_line


def _mask_pair(found: re.Match[str]) -> str:
    """Masks the value of `HF_TOKEN: value` inside a YAML mapping on the command line."""
    return f"{found[1]}: {_kept(found[2].strip())}" if _NAME.search(found[1]) else found[0]


def masked_tree(value: Any, name: str = "") -> Any:
    """Returns a copy of nested dicts and lists in which secrets are masked."""
    if isinstance(value, dict):
        return {key: masked_tree(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        words = [inner for inner in value if isinstance(inner, str)]
        return masked_words(words) if len(words) == len(value) else [masked_tree(inner) for inner in value]
    if not isinstance(value, str):
        return value
    return _kept(value) if _NAME.search(name) and value else masked(value)


def comparable(value: Any, name: str = "") -> Any:
    """Returns the value without secrets, so that two values that differ only in a secret or its reference are equal."""
    if not isinstance(value, str):
        return value
    if _NAME.search(name):
        return MASK
    if "://" not in value:
        return masked(value)
    value = _REFERENCE.sub("reference", value)
    scheme, _, rest = value.partition("://")
    host, slash, path = rest.rpartition("@")[2].partition("/") if _has_user(value) else rest.partition("/")
    path, _, query = path.partition("?")
    kept = [part for part in query.split("&") if part and not _secret_parameter(part.partition("=")[0])]
    return f"{scheme}://{host}{slash}{path}" + ("?" + "&".join(kept) if kept else "")


def _has_user(address: str) -> bool:
    return "@" in address and bool(_PASSWORD.search(address) or "@" in address.partition("://")[2].partition("/")[0])


def secrets_in(values: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields (key, why, remedy) for each secret in a recipe, and for each reference in a key that does not support
    references."""
    name = key.rpartition(".")[2]
    if isinstance(values, dict):
        for inner, value in values.items():
            yield from secrets_in(value, f"{key}.{inner}" if key else str(inner))
    elif isinstance(values, list):
        if key == "rollout.server.args":
            yield from _secret_flags([str(word) for word in values], key)
        for number, value in enumerate(values):
            yield from ((key, *problem[1:]) for problem in secrets_in(value, f"{key}.{number}"))
    elif isinstance(values, str):
        base = key.rpartition(".")[0] if name.isdigit() else key
        if references(values) and not is_expanded(base):
            yield (
                key,
                "contains a reference to a secret, but this key does not support references",
                f"references work in {_places()}",
            )
        elif masked(values) != values or (_is_secret_key(base, name, values) and _kept(values) != values):
            yield (
                key,
                "contains a secret, which would be written to files of the run",
                _REMEDY.format(name=_variable(base)),
            )


def _is_secret_key(key: str, name: str, value: str) -> bool:
    return is_expanded(key) and _NAME.search(name) is not None and value.lower() not in _PLACEHOLDERS


_REMEDY = (
    "put the secret into an environment variable or a file and refer to it: ${{env:{name}}} or ${{file:PATH}} "
    "(in single quotes on a command line)"
)


def _variable(key: str) -> str:
    return "REWARD_KEY" if key.startswith("reward.") else "ENGINE_KEY"


def _secret_flags(words: list[str], key: str) -> Iterator[tuple[str, str, str]]:
    for word, following in pairwise([*words, ""]):
        flag = _FLAG.match(word)
        if flag and _NAME.search(flag[1]) and (flag[2] or (following and not following.startswith("-"))):
            why = f"--{flag[1]} contains a secret, which is visible in the process list"
            yield key, why, "remove it: lockstep gives its own servers a key; for your servers set LOCKSTEP_SERVER_KEY"


def is_expanded(key: str) -> bool:
    """Returns whether this recipe key supports references to secrets."""
    parts = key.split(".")
    return any(
        len(parts) == len(pattern.split("."))
        and all(expected in ("*", part) for expected, part in zip(pattern.split("."), parts, strict=True))
        for pattern in EXPANDED
    )


def _places() -> str:
    return ", ".join(key.removesuffix(".*") for key in EXPANDED)


def references(text: str) -> list[str]:
    """Returns a description of each reference to a secret in the text, such as `the file PATH`."""
    kinds = {"env": "the environment variable", "file": "the file"}
    return [f"{kinds[kind]} {name}" for kind, name in _REFERENCE.findall(text)]


def variables(values: Any) -> set[str]:
    """Returns the names of the environment variables that a recipe refers to. All processes of the run need these
    variables."""
    inner = values.values() if isinstance(values, dict) else values if isinstance(values, list) else []
    found = _REFERENCE.findall(values) if isinstance(values, str) else []
    return {name for kind, name in found if kind == "env"}.union(*map(variables, inner))


def sources(values: Any, key: str = "") -> dict[str, str]:
    """Returns for each recipe key with a reference which environment variable or file its secret comes from."""
    if isinstance(values, dict):
        pairs = [(f"{key}.{name}" if key else str(name), value) for name, value in values.items()]
    elif isinstance(values, list):
        pairs = [(f"{key}.{number}", value) for number, value in enumerate(values)]
    else:
        found = references(values) if isinstance(values, str) else []
        return {key: f"{MASK} from {' and '.join(found)}"} if found else {}
    return {name: source for inner, value in pairs for name, source in sources(value, inner).items()}


def expanded(text: str) -> str:
    """Replaces references in the text by their secrets, and masks these secrets in all later output. Raises
    `Unresolved`."""
    if f"{MASK}@" in text or f"={MASK}" in text or text == MASK:
        raise Unresolved(f"its secret was masked ({MASK}): write a reference such as ${{env:NAME}} instead")
    return _REFERENCE.sub(lambda found: _read(found[1], found[2]), text)


def _read(kind: str, name: str) -> str:
    if kind == "env":
        value = os.environ.get(name, "")
        if not value:
            raise Unresolved(f"the environment variable {name} is not set")
    else:
        try:
            value = Path(name).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise Unresolved(f"the file {name} cannot be read: {error}") from error
        if not value:
            raise Unresolved(f"the file {name} is empty")
    conceal(value)
    return value


def _mask_last(found: re.Match[str]) -> str:
    return found[1] + _kept(found[found.re.groups])


def _kept(value: str) -> str:
    """Returns the value unchanged if it consists only of references and masks, otherwise returns MASK."""
    return value if not _REFERENCE.sub("", value).replace(MASK, "") or _only_places(value) else MASK


def _only_places(value: str) -> bool:
    return not _PLACE.sub("", value).replace(MASK, "")


def _secret_parameter(name: str) -> bool:
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return any(_PARAMETER_WORD.fullmatch(word) for word in words)
