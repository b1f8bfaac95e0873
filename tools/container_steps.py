"""Runs the steps of a container file in a copy of a plain root folder, where no container engine can build images.

    debootstrap --include=ca-certificates,python3-dev,python3-venv,python3-pip bookworm base
    ln -s python3 base/usr/bin/python && rm base/usr/lib/python3*/EXTERNALLY-MANAGED
    python tools/container_steps.py docker/Dockerfile.cpu --root base --out /tmp/image -- quickstart run.steps=2

The words after -- go to the entry point. `--build-arg NAME=VALUE` replaces an ARG. `--mount PATH` shows a folder of
this machine in the root, and `--env NAME=VALUE` sets a variable for the steps only, such as PIP_FIND_LINKS.
`--until N` stops after the first N steps. bubblewrap (`bwrap`) isolates the file system, and the steps run as root, as
in a build. The sources are a clone of this repository, so commit first.

Without a registry, a docker daemon gets its base image from `tar -C base -c . | docker import - NAME`.
tools/check_image.sh checks a built image.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


@dataclass
class Stage:
    """One FROM of the file: its root folder and what its instructions set so far."""

    root: Path
    variables: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0"
    entry: list[str] = field(default_factory=list)
    shell: list[str] = field(default_factory=lambda: ["sh", "-c"])


def instructions(text: str) -> list[tuple[str, str]]:
    """Returns the instructions in order; continued lines are joined, comments are dropped."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", lines)
    return [(words[0], words[1]) for line in joined.splitlines() if len(words := line.split(None, 1)) == 2]


def home_of(stage: Stage) -> str:
    """Returns the home folder that a container engine sets: that of the root's /etc/passwd, or / for other users."""
    rows = (line.split(":") for line in (stage.root / "etc/passwd").read_text(encoding="utf-8").splitlines())
    return next((row[5] for row in rows if stage.user in (row[0], row[2])), "/")


def run_inside(stage: Stage, command: list[str], args: argparse.Namespace, environment: dict[str, str]) -> None:
    shown = [word for path in args.mount for word in ("--ro-bind", path, path)]
    home = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin", "HOME": home_of(stage)}
    values = {**home, **environment}
    given = [word for name, value in values.items() for word in ("--setenv", name, value)]
    resolver = str(Path("/etc/resolv.conf").resolve())
    isolation = [
        "bwrap",
        "--clearenv",
        "--cap-add",
        "ALL",
        "--bind",
        str(stage.root),
        "/",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
    ]
    isolation += [
        "--ro-bind",
        resolver,
        "/etc/resolv.conf",
        "--perms",
        "1777",
        "--tmpfs",
        "/tmp",
        *shown,
        *given,
        "--chdir",
        stage.folder,
    ]
    if stage.user != "0":
        command = ["setpriv", "--reuid", stage.user, "--regid", stage.user, "--clear-groups", *command]
    subprocess.run([*isolation, *command], check=True)


def copy_into(stage: Stage, words: list[str], stages: dict[str, Stage], source: Path) -> None:
    if words[0].startswith("--from="):
        source = stages[words.pop(0).removeprefix("--from=")].root
    *names, target = words
    goal = stage.root / os.path.join(stage.folder, target).lstrip("/")
    for name in names:
        path = source / name.lstrip("/")
        if path.is_dir():
            shutil.copytree(path, goal, dirs_exist_ok=True)
        else:
            into = goal / path.name if target.endswith("/") else goal
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, into)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=int, default=sys.maxsize)
    parser.add_argument("--mount", action="append", default=[])
    parser.add_argument("--build-arg", action="append", default=[])
    parser.add_argument("--env", action="append", default=[])
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, words = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    given, only_steps = (dict(pair.split("=", 1) for pair in pairs) for pairs in (args.build_arg, args.env))
    args.out.mkdir(parents=True)
    source = args.out / "source"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(source)], check=True)
    stages: dict[str, Stage] = {}
    stage = Stage(args.out)
    for number, (verb, rest) in enumerate(instructions(args.file.read_text(encoding="utf-8")), 1):
        if number > args.until:
            print(f"stopped after {args.until} steps")
            return 0
        print(f"step {number}: {verb} {rest[:100]}", flush=True)
        began = time.monotonic()
        if verb == "FROM":
            name = rest.split(" AS ")[1] if " AS " in rest else "image"
            stage = stages[name] = Stage(args.out / name)
            subprocess.run(["cp", "-a", "--reflink=auto", str(args.root), str(stage.root)], check=True)
        elif verb == "ARG":
            name, _, default = rest.partition("=")
            stage.variables[name] = given.get(name, default)
        elif verb == "ENV":
            for pair in shlex.split(rest):
                name, value = pair.split("=", 1)
                stage.variables[name] = value.replace("$PATH", "/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin")
        elif verb == "WORKDIR":
            stage.folder = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif verb == "COPY":
            copy_into(stage, shlex.split(rest), stages, source)
        elif verb == "USER":
            stage.user = rest
        elif verb == "RUN":
            run_inside(stage, [*stage.shell, rest], args, {**stage.variables, **only_steps})
            print(f"step {number}: {time.monotonic() - began:.0f} s", flush=True)
        elif verb == "SHELL":
            stage.shell = json.loads(rest)
        elif verb == "ENTRYPOINT":
            stage.entry = json.loads(rest)
        elif verb == "CMD":
            run_inside(stage, [*stage.entry, *(words or json.loads(rest))], args, stage.variables)
        elif verb != "STOPSIGNAL":
            raise SystemExit(f"step {number}: {verb} is not supported")
    return 0


if __name__ == "__main__":
    sys.exit(main())
