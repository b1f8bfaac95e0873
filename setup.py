"""`TARGET_DEVICE=NPU pip install ...` installs the extra [npu] too. Everything else is in pyproject.toml."""

from __future__ import annotations

import os
from typing import Any

from setuptools import Distribution, setup


class ForTarget(Distribution):
    def parse_config_files(self, *arguments: Any, **options: Any) -> None:
        super().parse_config_files(*arguments, **options)
        target = os.environ.get("TARGET_DEVICE", "").strip().lower()
        if target not in ("", "cpu", "cuda", "npu"):
            raise SystemExit(f"TARGET_DEVICE={target}: it is NPU, CUDA or CPU, and only NPU adds packages")
        if target == "npu":
            self.install_requires = [*self.install_requires, *self.extras_require["npu"]]
            self._finalize_requires()  # the metadata has its own copy, taken from the file above


setup(distclass=ForTarget)
