"""What passed its check is remembered for this device, and a home that is no use costs a check, not a traceback."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from lockstep.device.base import EMULATED
from lockstep.device.cpu import Cpu, _arm_chip
from lockstep.device.select import select
from lockstep.model import trials
from lockstep.model.check import check_architecture
from lockstep.rollout.engine_check import check_engine_architecture

CPU = torch.device("cpu")
KEY = "a" * 64

pytestmark = pytest.mark.usefixtures("nothing_remembered")


@contextmanager
def an_ordinary_user() -> Iterator[None]:
    """Permissions mean nothing to root, who runs tests in containers."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def assert_costs_a_check_at_every_start() -> None:
    assert not trials.is_verified(KEY)
    trials.remember(KEY)
    assert trials.is_verified(KEY)
    trials._verified_here.cache_clear()  # as in another process
    assert not trials.is_verified(KEY)


def test_it_is_remembered_by_the_next_process() -> None:
    trials.remember(KEY)
    trials._verified_here.cache_clear()
    assert trials.is_verified(KEY)
    assert not trials.is_verified("b" * 64)


def test_a_cache_that_may_not_be_read(tmp_path: Path) -> None:
    trials.remember(KEY)
    trials._verified_here.cache_clear()
    models = tmp_path / "cache" / "models"
    models.chmod(0)
    try:
        with an_ordinary_user():
            assert_costs_a_check_at_every_start()
    finally:
        models.chmod(0o755)


def test_a_cache_that_may_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o555)
    with an_ordinary_user():
        assert_costs_a_check_at_every_start()


@pytest.mark.parametrize("place", ["file/cache", "n" * 300], ids=["below a file", "a name too long"])
def test_a_cache_that_cannot_be_a_folder(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / place))
    assert_costs_a_check_at_every_start()


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number which nobody has."""
    for variable in ("LOCKSTEP_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)

    def nobody(number: int) -> pwd.struct_passwd:
        raise KeyError(f"uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert_costs_a_check_at_every_start()
    check_architecture(LlamaConfig(), "folder", torch.float32, "sdpa", CPU)


def test_another_chip_is_checked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig()

    def check() -> None:
        check_architecture(config, "folder", torch.float32, "sdpa", CPU)
        check_engine_architecture(config, "sdpa", select("cpu"), CPU)

    check()
    built: list[str] = []
    for user in ("model.check", "rollout.engine_check"):
        refused = f"lockstep.{user}.build_miniature"
        monkeypatch.setattr(refused, lambda *_, user=user: built.append(user) or _stop())
    check()
    assert not built
    monkeypatch.setattr(Cpu, "chip", lambda self: "another")
    for _ in range(2):
        with pytest.raises(_Stopped):
            check_architecture(config, "folder", torch.float32, "sdpa", CPU)
        with pytest.raises(_Stopped):
            check_engine_architecture(config, "sdpa", select("cpu"), CPU)
    assert built == ["model.check", "rollout.engine_check"] * 2


class _Stopped(Exception):
    pass


def _stop() -> None:
    raise _Stopped


def test_an_emulated_device_does_not_vouch_for_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = trials.hardware(CPU)
    monkeypatch.setenv(EMULATED, "cpu")
    assert trials.hardware(CPU) != real


def test_an_arm_core_is_told_from_another() -> None:
    """Lines of /proc/cpuinfo on Arm, which gives no model's name."""
    listing = "processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: {}\nCPU revision\t: 1\n"
    assert _arm_chip(listing.format("0xd0c")) == "Arm 0x41 part 0xd0c"
    assert _arm_chip(listing.format("0xd40")) == "Arm 0x41 part 0xd40"
    assert _arm_chip("processor\t: 0\nvendor_id\t: GenuineIntel\n") is None
