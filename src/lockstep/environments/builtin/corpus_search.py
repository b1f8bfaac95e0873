"""The tool `search`: BM25 over a small corpus, in plain Python.

The score of a document is that of Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond"
(2009), with the inverse document frequency of Lucene, which is never negative.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.errors import Refusal

K1, B = 1.2, 0.75
RESULTS, LONGEST = 3, 1000
_WORD = re.compile(r"\w+")


class Corpus:
    """Documents that can be searched by words."""

    def __init__(self, documents: Sequence[str]):
        self.documents = list(documents)
        self._counts = [Counter(words(document)) for document in self.documents]
        self._lengths = [sum(count.values()) for count in self._counts]
        self._mean_length = sum(self._lengths) / max(1, len(self._lengths))
        holding = Counter(word for count in self._counts for word in count)
        total = len(self.documents)
        self._rarity = {word: math.log(1 + (total - n + 0.5) / (n + 0.5)) for word, n in holding.items()}

    def score(self, query: str, document: int) -> float:
        """Returns the BM25 score of a document. Repeated words of the query count once."""
        count = self._counts[document]
        scale = K1 * (1 - B + B * self._lengths[document] / self._mean_length) if self._mean_length else 0.0
        found = sorted(set(words(query)) & count.keys())
        return sum(self._rarity[word] * count[word] * (K1 + 1) / (count[word] + scale) for word in found)

    def search(self, query: str, most: int = RESULTS) -> list[str]:
        """Returns the best documents, the best first. Documents without a word of the query are not results."""
        scores = [(self.score(query, number), -number) for number in range(len(self.documents))]
        best = sorted((one for one in scores if one[0] > 0), reverse=True)[:most]
        return [self.documents[-number] for _, number in best]


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def read_corpus(path: Path, where: str) -> Corpus:
    """Reads a corpus: JSON lines with `text` and optionally `title`, or a text file with blank lines between the
    documents."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = f"{path} cannot be read: {error}"
        raise Refusal.at(where, why, "write search:path/to/corpus.jsonl", code="no-such-file") from error
    if path.suffix != ".jsonl":
        documents = [part.strip() for part in re.split(r"\n\s*\n", text)]
    else:
        documents = [_document(line, f"{path} line {n}") for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    documents = [document for document in documents if document]
    if not documents:
        raise Refusal.at(where, f"{path} has no document", "give a corpus with at least one", code="too-few-rows")
    return Corpus(documents)


def _document(line: str, where: str) -> str:
    try:
        row = json.loads(line)
        parts = [row[name] for name in ("title", "text") if name in row]
    except (ValueError, TypeError):
        parts = []
    if not parts or not all(isinstance(part, str) for part in parts):
        raise Refusal.at(where, "is not an object with the text `text`", "fix the line", code="not-text")
    return ": ".join(parts)


def search_tool(path: str, where: str) -> Callable[..., str]:
    """Returns the tool `search` for the corpus of a file."""
    corpus = read_corpus(Path(path).expanduser(), where)

    def search(query: str) -> str:
        """Searches documents by words and returns the best ones.

        Args:
            query: The words to search for.
        """
        found = [document[:LONGEST] for document in corpus.search(query)]
        return "\n\n".join(f"[{number}] {text}" for number, text in enumerate(found, 1)) or "no document matches"

    return search
