"""The version from git's tags, and the files of the package that a build must contain."""

from __future__ import annotations

import re
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from lockstep.version import checkout_commit, version_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "lockstep"
Git = Callable[..., str]


@pytest.mark.parametrize(
    ("described", "version"),
    [
        ("v0.2.0", "0.2.0"),
        ("v0.2.0-0-gabc123def", "0.2.0"),
        ("v0.2.0-0-gabc123def-dirty", "0.2.1.dev0+gabc123def.dirty"),
        ("v0.2.9-3-gabc123def", "0.2.10.dev3+gabc123def"),
        ("v1.0rc1-3-gabc123def", "1.0rc2.dev3+gabc123def"),
        ("-7-gabc123def", "0.1.0.dev7+gabc123def"),
    ],
)
def test_version_of_a_description(described: str, version: str) -> None:
    assert version_of(described) == version


def test_a_tag_that_is_no_version_is_refused() -> None:
    with pytest.raises(ValueError, match="release-1"):
        version_of("release-1")


@pytest.fixture
def git(tmp_path: Path) -> Git:
    def run(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    return run


def test_commit_is_that_of_our_own_checkout_only(tmp_path: Path, git: Git) -> None:
    package, foreign = tmp_path / "src" / "package", tmp_path / ".venv" / "package"
    for place in (package, foreign):
        place.mkdir(parents=True)
        (place / "__init__.py").write_text("")
    assert checkout_commit(package) is None
    git("init", "-q")
    git("add", "src")
    git("commit", "-q", "-m", "start")
    git("tag", "-a", "v1", "-m", "first")
    assert checkout_commit(package) == git("rev-parse", "HEAD")
    assert checkout_commit(foreign) is None
    (package / "__init__.py").write_text("changed = True")
    assert checkout_commit(package) == git("rev-parse", "HEAD") + "-dirty"


def identity(folder: Path) -> tuple[str, str | None]:
    """What a copy of the package says about itself, read as setup.py reads it."""
    module = runpy.run_path(str(folder / "version.py"))
    return module["package_version"](), module["own_commit"]()


def test_version_of_a_checkout_an_archive_and_a_build(tmp_path: Path, git: Git) -> None:
    package = tmp_path / "lockstep"
    package.mkdir()
    (package / "version.py").write_text((PACKAGE / "version.py").read_text())
    (package / "__init__.py").touch()
    assert identity(package) == ("0.1.0.dev0", None)
    (tmp_path / ".gitattributes").write_text("lockstep/version.py export-subst\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    commit = git("rev-parse", "HEAD")
    assert identity(package) == (f"0.1.0.dev1+g{commit[:9]}", commit)
    git("tag", "v0.3.0")
    git("tag", "nightly")
    assert identity(package) == ("0.3.0", commit)
    git("archive", "-o", str(tmp_path / "archive.tar"), "HEAD")
    (tmp_path / "unpacked").mkdir()
    subprocess.run(["tar", "-xf", "../archive.tar"], cwd=tmp_path / "unpacked", check=True)
    assert identity(tmp_path / "unpacked" / "lockstep") == ("0.3.0", commit)
    (package / "_build.py").write_text('VERSION = "9.9"\nCOMMIT = "abc"\n')
    assert identity(package) == ("9.9", "abc")


def test_a_build_contains_every_file_of_the_package() -> None:
    """`make test-dist` compares a built wheel with git's list; this test needs no build."""
    row = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith('lockstep = ["'))
    patterns = re.findall(r'"([^"]+)"', row)
    files = [file.relative_to(PACKAGE) for file in PACKAGE.rglob("*") if file.is_file()]
    data = [file for file in files if file.suffix not in (".py", ".pyc")]
    assert len(data) > 40
    assert not [file for file in data if not any(PurePosixPath(file).match(pattern) for pattern in patterns)]
    assert not [
        file for file in files if file.suffix == ".py" and not (PACKAGE / file.parent / "__init__.py").is_file()
    ]


def test_the_changelog_has_every_released_version() -> None:
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (\S+)", log, flags=re.MULTILINE)
    tags = subprocess.run(["git", "tag", "--list", "v[0-9]*"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert headings[0] == "Unreleased"
    assert not {tag.removeprefix("v") for tag in tags.stdout.split()} - set(headings)
    # The citation is of the newest release.
    version, date = re.findall(r"^## (\d\S*) - (\S+)$", log, flags=re.MULTILINE)[0]
    assert headings[1] == version
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {version}\ndate-released: {date}\n" in citation
