"""Fills in what docs/architecture.md says of the code: the layers and the lines of a GRPO step. Draws the
imports as docs/architecture.svg.

    python tools/architecture.py            writes the pages anew
    python tools/architecture.py --check    ends with 1 where a page is not current

`make docs` runs it, tests/unit/test_architecture_page.py keeps the pages current.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lockstep"
PAGES = sorted((ROOT / "docs").glob("architecture*.md"))
FIGURE = ROOT / "docs" / "architecture.svg"
LAYERS = ROOT / "tests" / "unit" / "test_architecture.py"
"""The test that holds the layers is where they are written down."""
READ = ("train/online.py", "train/rollouts.py", "train/update.py", "algorithms/policy_loss.py")
"""Who has read these, in this order, has read a GRPO step."""


@cache
def folder_imports(root: Path) -> dict[str, set[str]]:
    """Which folders (or single modules) of the package import which others, also inside of functions."""
    found: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        home = path.relative_to(root).parts[0].removesuffix(".py")
        if home in ("__init__", "__main__"):  # they hand on what the others are
            continue
        targets = {name.split(".")[1] for name in _imported(ast.parse(path.read_text(encoding="utf-8")), root.name)}
        found.setdefault(home, set()).update(targets - {home})
    return {home: targets & found.keys() for home, targets in found.items()}


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Dotted names below the package; what is imported for types alone is left out."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in names if name.startswith(f"{package}."))
        waiting += (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler))


def reduced(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that others imply: a to c where there are a to b and b to c."""

    def reach(name: str) -> set[str]:
        return edges[name].union(*(reach(target) for target in edges[name]))

    return {
        name: targets - set().union(*(reach(target) for target in targets)) if targets else set()
        for name, targets in edges.items()
    }


def layers(root: Path) -> list[tuple[str, ...]]:
    """From the top, what really exists of each layer."""
    here = folder_imports(root).keys()
    for node in ast.parse(LAYERS.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "LAYERS":
            assert node.value is not None
            held = [tuple(name for name in layer if name in here) for layer in ast.literal_eval(node.value)]
            return [layer for layer in held if layer]
    raise SystemExit(f"{LAYERS} has no LAYERS")


def figure(root: Path) -> str:
    """Returns the folders as SVG, a row per layer, with arrows for the imports."""
    edges, rows = reduced(folder_imports(root)), layers(root)
    rows = [*rows[:-1], rows[-1][:7], rows[-1][7:]] if len(rows[-1]) > 7 else rows
    width, row_height, box_height = 1040, 66, 26
    boxes: dict[str, tuple[float, float, float]] = {}
    for number, row in enumerate(rows):
        sizes = [max(70, 8 * len(name) + 18) for name in row]
        gap = (width - sum(sizes)) / (len(row) + 1)
        at = gap
        for name, size in zip(row, sizes, strict=True):
            boxes[name] = (at, 20 + number * row_height, size)
            at += size + gap
    parts = []
    for name, targets in sorted(edges.items()):
        for target in sorted(targets):
            (x, y, size), (to_x, to_y, to_size) = boxes[name], boxes[target]
            same = y == to_y
            x1, y1 = x + size / 2, y + (box_height if not same else 0)
            x2, y2 = to_x + to_size / 2, to_y - (4 if not same else 0)
            bend = -34 if same else (y2 - y1) / 2
            curve = (
                f"M{x1:g} {y1:g} C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend if not same else y2 + bend:g} {x2:g} {y2:g}"
            )
            parts.append(f"<path d='{curve}' fill='none' stroke='#7a8aa0' stroke-width='1.1' marker-end='url(#a)'/>")
    for name, (x, y, size) in boxes.items():
        place = f"x='{x:g}' y='{y:g}' width='{size:g}' height='{box_height}'"
        parts.append(f"<rect {place} rx='4' fill='#e8eefb' stroke='#4a62a8'/>")
        parts.append(f"<text x='{x + size / 2:g}' y='{y + 17:g}' text-anchor='middle'>{name}</text>")
    marker = (
        "<marker id='a' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
        "<path d='M0 0L8 4L0 8z' fill='#7a8aa0'/></marker>"
    )
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {len(rows) * row_height}' role='img'"
    font = "font-family='DejaVu Sans Mono, Menlo, Consolas, monospace' font-size='12'>"
    ground = f"<rect width='{width}' height='{len(rows) * row_height}' fill='#fbfbfb'/>"
    title = "<title>The folders of lockstep and their imports</title>"
    return "\n".join([f"{head} {font}", title, f"<defs>{marker}</defs>", ground, *parts, "</svg>", ""])


def layer_text(root: Path) -> str:
    return "\n".join(["```", *("   ".join(layer) for layer in layers(root)), "```"])


def code_lines(text: str) -> int:
    """Lines that hold code: no blank ones, comments, docstrings or imports."""
    code: set[int] = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        alone = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if (alone or isinstance(node, ast.Import | ast.ImportFrom)) and node.end_lineno is not None:
            code -= set(range(node.lineno, node.end_lineno + 1))
    return len(code)


def reading(root: Path) -> str:
    rows = []
    for name in READ:
        text = (root / name).read_text(encoding="utf-8")
        rows.append((name, len(text.splitlines()), code_lines(text)))
    rows.append(("all four", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    return "\n".join(["```", *(f"{name:24}{lines:4} lines, {code:4} of code" for name, lines, code in rows), "```"])


PARTS = {"layers": layer_text, "reading": reading}


def filled(page: str, root: Path = PACKAGE) -> str:
    """The page with what stands between `<!-- printed: NAME -->` and `<!-- end -->` made anew."""

    def part(found: re.Match[str]) -> str:
        return f"<!-- printed: {found[1]} -->\n{PARTS[found[1]](root)}\n<!-- end -->"

    return re.sub(r"<!-- printed: (\w+) -->\n.*?<!-- end -->", part, page, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check, old = parser.parse_args().check, []
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        if filled(page) != page:
            old.append(path.relative_to(ROOT).as_posix())
            if not check:
                path.write_text(filled(page), encoding="utf-8")
    if not FIGURE.is_file() or FIGURE.read_text(encoding="utf-8") != figure(PACKAGE):
        old.append(FIGURE.relative_to(ROOT).as_posix())
        if not check:
            FIGURE.write_text(figure(PACKAGE), encoding="utf-8")
    print(*[f"{'not current' if check else 'written'}: {name}" for name in old] or ["current"], sep="\n")
    return 1 if check and old else 0


if __name__ == "__main__":
    sys.exit(main())
