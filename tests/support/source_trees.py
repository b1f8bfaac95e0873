"""Syntax trees of source files, parsed once for all tests of a process.

Modules that read many of them have the group "source trees", so that one worker runs all of them.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    """No test may change a file after this has read it."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, in the order of `ast.walk`."""
    return tuple(ast.walk(parsed(path)))
