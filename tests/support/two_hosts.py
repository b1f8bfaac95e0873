"""Two hosts on one machine: two network namespaces with a cable (a veth pair) between them, and nothing else.

A host has its own addresses, host name and process numbers; both have this machine's disk, as hosts with a shared disk
have. The cable can be cut and restored. It needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LINK = "cable"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@cache
def why_none() -> str:
    """Why this machine cannot have two hosts, or nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if not (shutil.which("ip") and shutil.which("unshare")):
        return "there is no `ip` (iproute2) or no `unshare` (util-linux)"
    try:
        with two_hosts() as (first, _):
            done = subprocess.run([*first.prefix, "true"], capture_output=True, text=True, check=False)
            return done.stderr.strip()
    except subprocess.CalledProcessError as error:
        return f"this machine makes no network namespaces: {error.stderr.strip()}"


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    folder: Path

    @property
    def prefix(self) -> list[str]:
        """The opening words of a command that runs on this host. It ends when the command before it is killed."""
        setup = f'mount --bind {self.folder / "hosts"} /etc/hosts && hostname {self.name} && exec "$@"'
        space = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return ["ip", "netns", "exec", self.name, *space, "sh", "-c", setup, "sh"]

    def start(self, words: Sequence[object], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen(
                [*self.prefix, *map(str, words)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1", **environment},
            )

    def run(self, words: Sequence[object], **environment: str) -> subprocess.CompletedProcess[str]:
        given: Mapping[str, str] = {**os.environ, **environment}
        return subprocess.run(
            [*self.prefix, *map(str, words)], capture_output=True, text=True, env=given, check=False, timeout=600
        )

    def link(self, state: str) -> None:
        """`down` cuts the cable at this host, `up` restores it."""
        _ip("-n", self.name, "link", "set", LINK, state)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="lockstep-hosts-") as folder:
        named = [f"lockstep-{os.getpid()}-{letter}" for letter in "ab"]
        hosts = [Host(name, f"10.213.7.{number}", Path(folder)) for number, name in enumerate(named, start=1)]
        known = [f"{host.address} {host.name}" for host in hosts]
        (Path(folder) / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]), encoding="utf-8")
        for host in hosts:
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "del", host.name)
        first, second = hosts
        _ip("link", "add", LINK, "netns", first.name, "type", "veth", "peer", "name", LINK, "netns", second.name)
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", LINK)
            _ip("-n", host.name, "link", "set", "lo", "up")
            host.link("up")
        yield first, second
