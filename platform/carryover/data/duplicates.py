"""Texts that say the same: equal after normalisation, or nearly so.

Near duplicates share most word triples, or begin alike: a model that knows a riddle by heart
begins with it and goes on differently each time.
"""

from __future__ import annotations

import re
import unicodedata
import zlib

import numpy as np

_PERMUTATIONS = 64
_BANDS = 16
_PRIME = (1 << 31) - 1
_BEGINNING_WORDS = 12
_NOT_WORD = re.compile(r"[\W_]+")


def normalise(text: str) -> str:
    """Lower-case words with single spaces: case, punctuation and layout do not count."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    words = _NOT_WORD.sub(" ", folded).strip()
    # A text of symbols alone keeps them, so that "+" and "-" stay different.
    return words or " ".join(folded.split())


class SeenTexts:
    """Remembers texts and recognises repeats (MinHash over word triples, banded).

    Args:
        threshold: share of word triples in common (Jaccard, estimated to about 0.06) from which
            two texts count as the same, as do those with the same first 12 words; 1 finds only
            texts that are equal after normalisation.
    """

    def __init__(self, threshold: float = 0.7) -> None:
        self.threshold = threshold
        self._exact: set[str] = set()
        self._beginnings: set[str] = set()
        self._signatures: list[np.ndarray] = []
        self._bands: dict[tuple[int, bytes], list[int]] = {}
        generator = np.random.default_rng(0)
        self._scale = generator.integers(1, _PRIME, _PERMUTATIONS, dtype=np.uint64)
        self._shift = generator.integers(0, _PRIME, _PERMUTATIONS, dtype=np.uint64)

    def add(self, text: str) -> bool:
        """Remember a text; False if it, or one like it, is known (then nothing is added)."""
        normal = normalise(text)
        if normal in self._exact:
            return False
        if self.threshold < 1:
            words = normal.split()
            beginning = " ".join(words[:_BEGINNING_WORDS])
            if beginning in self._beginnings:
                return False
            signature = self._signature(normal)
            keys = [(band, rows.tobytes()) for band, rows in enumerate(np.split(signature, _BANDS))]
            candidates = {number for key in keys for number in self._bands.get(key, ())}
            for number in candidates:
                if np.mean(self._signatures[number] == signature) >= self.threshold:
                    return False
            for key in keys:
                self._bands.setdefault(key, []).append(len(self._signatures))
            self._signatures.append(signature)
            if len(words) >= _BEGINNING_WORDS:
                self._beginnings.add(beginning)
        self._exact.add(normal)
        return True

    def _signature(self, normal: str) -> np.ndarray:
        words = normal.split()
        triples = {" ".join(words[i : i + 3]) for i in range(max(1, len(words) - 2))}
        hashes = np.array([zlib.crc32(triple.encode()) for triple in triples], dtype=np.uint64)
        mixed = (hashes[:, None] % _PRIME * self._scale + self._shift) % np.uint64(_PRIME)
        return mixed.min(axis=0).astype(np.uint32)
