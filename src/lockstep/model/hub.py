"""A model of the hub as a local folder; where the hub cannot be reached, one sentence within seconds."""

from __future__ import annotations

import os
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path

from lockstep.errors import Refusal, first_line
from lockstep.model.streamed import weight_files

# `owner/name`, or a bare name, as the hub has them.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# What a model needs of a repository: settings, tokenizers and safetensors weights; no pickles, no code.
FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
# Name servers and sockets that never answer count too.
SECONDS = 4.0
_OFF = ("1", "ON", "YES", "TRUE")
_silent: dict[str, str] = {}
"""Addresses that did not answer this process, and what was said of it."""


def looks_like_hub(path: str) -> bool:
    """Whether the hub could have a model of this name."""
    return _NAME.fullmatch(path) is not None and path.count("/") == 1


def hub_folder(name: str, where: str, hint: str = "") -> str:
    """The files of a hub model on this machine: those of an earlier download, or fetched now. `hint` comes before the
    advice."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        local = snapshot_download(name, allow_patterns=FILES, local_files_only=True)
        # Other programs may have fetched a part of it.
        if (Path(local) / "config.json").is_file() and weight_files(local) is not None:
            return local
    except (LocalEntryNotFoundError, OSError):
        pass  # not here yet
    remedy = f"{hint}name a folder on this machine, or download the model where there is a network and copy it here"
    status = ask_hub(name, where, "there is no such folder", remedy)
    if status in (401, 403, 404):
        why = f"there is no such folder, and the hub has none of that name that may be read ({status})"
        raise Refusal.at(where, why, f"{hint}look at the name; for a private or gated one set HF_TOKEN")
    try:
        return snapshot_download(name, allow_patterns=FILES, endpoint=constants.ENDPOINT)
    except hub_errors() as error:
        why = f"cannot be fetched from the hub: {first_line(error)}"
        raise Refusal.at(where, why, "try again: what was fetched is kept") from error


def hub_errors() -> tuple[type[Exception], ...]:
    """What the hub's client lets through: its own errors, those of the disk, and those of the connection, whose class
    is that of whatever package the client's own error stands on."""
    from huggingface_hub.errors import HfHubHTTPError

    return (*HfHubHTTPError.__bases__, OSError, ValueError, RuntimeError)


def ask_hub(name: str, where: str, so: str, remedy: str, kind: str = "models") -> int:
    """Ask the hub once for a model, or for one of its `datasets`; the status of its answer. Where there is none: `so`
    begins the refusal."""
    from huggingface_hub import constants, get_token

    for switch in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(switch, "").upper() in _OFF:
            raise Refusal.at(where, f"{so}, and the hub may not be asked ({switch} is set)", remedy)
    address = f"{constants.ENDPOINT}/api/{kind}/{name}"
    if address in _silent:  # asked before: nobody waits twice
        raise Refusal.at(where, f"{so}, {_silent[address]}", remedy)
    request = urllib.request.Request(address)
    if token := get_token():
        request.add_header("Authorization", f"Bearer {token}")
    found: list[int | str] = []
    # A thread of its own: nothing ends a look-up of a name that hangs, and the process need not wait for it.
    asking = threading.Thread(target=lambda: found.append(_asked(request)), daemon=True)
    asking.start()
    asking.join(SECONDS)
    answer = found[0] if found else f"no answer in {SECONDS:g} s"
    if isinstance(answer, str):
        _silent[address] = f"and the hub ({constants.ENDPOINT}) cannot be reached: {answer}"
        raise Refusal.at(where, f"{so}, {_silent[address]}", remedy)
    return answer


def _asked(request: urllib.request.Request) -> int | str:
    """The status of the answer, or why there is none."""
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError as error:
        return first_line(error.reason) if isinstance(error.reason, Exception) else str(error.reason)
    except (OSError, ValueError) as error:
        return first_line(error)
