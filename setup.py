"""The parts of the build that pyproject.toml cannot express: the version from git, the pages of docs/ in
the wheel, and `TARGET_DEVICE`.

`TARGET_DEVICE=NPU pip install ...` installs the extra [npu] too.
"""

from __future__ import annotations

import os
import runpy
import shutil
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

PACKAGE = Path(__file__).parent / "src" / "lockstep"
VERSION = runpy.run_path(str(PACKAGE / "version.py"))


class ForTarget(Distribution):
    def parse_config_files(self, *arguments: Any, **options: Any) -> None:
        super().parse_config_files(*arguments, **options)
        target = os.environ.get("TARGET_DEVICE", "").strip().lower()
        if target not in ("", "cpu", "cuda", "npu"):
            raise SystemExit(f"TARGET_DEVICE={target}: it is NPU, CUDA or CPU, and only NPU adds packages")
        if target == "npu":
            self.install_requires = [*self.install_requires, *self.extras_require["npu"]]
            self._finalize_requires()  # the metadata has its own copy, taken from the file above


def store_version(folder: Path) -> None:
    """Writes version and commit into a built package, which has no git repository."""
    text = f'VERSION = "{VERSION["package_version"]()}"\nCOMMIT = "{VERSION["own_commit"]() or ""}"\n'
    (folder / VERSION["BUILD"]).write_text(text, encoding="utf-8")


def store_pages(folder: Path) -> None:
    """Copies the pages and figures of docs/ into a built package, for `lockstep help`."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in sorted((Path(__file__).parent / "docs").iterdir()):
        if page.suffix in (".md", ".svg", ".png"):
            shutil.copy(page, folder)


class BuildWithVersion(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            store_version(Path(self.build_lib) / "lockstep")
            store_pages(Path(self.build_lib) / "lockstep" / "docs")


class SourcesWithVersion(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        store_version(Path(base_dir) / "src" / "lockstep")


setup(
    distclass=ForTarget,
    version=VERSION["package_version"](),
    cmdclass={"build_py": BuildWithVersion, "sdist": SourcesWithVersion},
)
