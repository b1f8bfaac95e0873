"""A model folder onto the hub."""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import Refusal, first_line
from lockstep.model.hub import ask_hub, hub_errors, looks_like_hub

REMEDY = "push from a machine that can reach it; the exported folder can be copied there"


def refuse_no_hub(name: str) -> None:
    """Everything that would end a push, before a model is written for it."""
    from huggingface_hub import get_token

    where = f"--push {name}"
    if not looks_like_hub(name):
        raise Refusal.at(where, "is no name of the hub", "write OWNER/NAME")
    status = ask_hub(name, where, "nothing was pushed", REMEDY)
    if get_token() is None:
        raise Refusal.at(where, "the hub takes nothing without a token", "set HF_TOKEN, or run: hf auth login")
    if status in (401, 403):
        why = f"the hub refuses this token ({status})"
        raise Refusal.at(where, why, "use a token that may write to it")


def push_folder(folder: Path, name: str, message: str, *, private: bool, kept: bool) -> str:
    """All files of a folder as one commit, into a repository that is made where there is none. `kept` says that the
    folder stays when the push fails."""
    from huggingface_hub import HfApi, constants

    api = HfApi(endpoint=constants.ENDPOINT)
    try:
        api.create_repo(name, private=private or None, exist_ok=True)
        done = api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except hub_errors() as error:
        left = f"the model is in {folder}" if kept else "the run is as it was"
        remedy = f"{left}; try again, or copy the folder there by hand: hf upload {name} DIR"
        raise Refusal.at(f"--push {name}", f"the hub did not take it: {first_line(error)}", remedy) from error
    return f"pushed to {done.commit_url}"
