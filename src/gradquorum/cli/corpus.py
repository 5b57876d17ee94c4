"""The text the demo learns from: words, a vocabulary, and skip-gram pairs."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

MAX_BYTES = 4 * 2**20  # what is read of a file: as much as a demo can learn in a minute, and /dev/zero ends
MIN_COUNT = 10
MIN_WORDS = 500  # words of the vocabulary in the text; with fewer there is nothing to learn from
MIN_VOCABULARY = 20
_WORD = re.compile(r"[^\W\d]\w+")  # `__init__` and `utf_8` are words, `x` and `3` are not


class TextError(ValueError):
    """The text cannot be used; the message is one line for the person who chose it."""


@dataclass(frozen=True)
class Corpus:
    """A text as ids into its vocabulary, the most frequent word first.

    Attributes:
        words: the vocabulary, `words[id]`.
        counts: occurrences of each word `[num_words]`, descending.
        ids: the text, words outside the vocabulary left out `[length]`.
    """

    words: list[str]
    counts: Ids
    ids: Ids

    @classmethod
    def from_text(cls, text: str) -> Corpus:
        """Split `text` into lower-case words and keep those frequent enough to learn about.

        That is `MIN_COUNT` times or more, in a short text less, but at least twice.

        Raises:
            TextError: too few words, or too few different ones, are left.
        """
        found = _WORD.findall(text.lower())
        min_count = min(max(len(found) // 5000, 2), MIN_COUNT)
        frequent = [(word, count) for word, count in Counter(found).most_common() if count >= min_count]
        id_of = {word: i for i, (word, _) in enumerate(frequent)}
        ids = np.array([id_of[word] for word in found if word in id_of], dtype=np.int64)
        if len(ids) < MIN_WORDS or len(frequent) < MIN_VOCABULARY:
            raise TextError(
                f"the text is too short: {len(ids)} words and {len(frequent)} different ones that occur "
                f"{min_count} times or more; {MIN_WORDS} and {MIN_VOCABULARY} are needed"
            )
        return cls([word for word, _ in frequent], np.array([count for _, count in frequent]), ids)

    def skip_gram_pairs(self, rng: np.random.Generator, *, window: int = 8, threshold: float = 1e-3) -> Ids:
        """Return shuffled `(center, context)` pairs of words that stand close together, `[num_pairs, 2]`.

        As in word2vec, occurrences of frequent words are left out at random before pairing (a word of
        frequency f stays with probability sqrt(threshold / f); the threshold is at least the mean frequency,
        so that few different words are not all left out), and a pair at distance d is kept with
        probability (window - d + 1) / window, so that close words weigh more.

        Source: Mikolov et al. 2013, "Distributed Representations of Words and Phrases", section 2.3.
        """
        threshold = max(threshold, 1 / len(self.words))
        stay = np.sqrt(threshold * self.counts.sum() / self.counts)
        text = self.ids[rng.random(len(self.ids)) < stay[self.ids]]
        parts = []
        for distance in range(1, window + 1):
            left, right = text[:-distance], text[distance:]
            kept = rng.random(len(left)) < (window - distance + 1) / window
            parts += [np.stack([left, right], 1)[kept], np.stack([right, left], 1)[kept]]
        pairs = np.concatenate(parts)
        return pairs[rng.permutation(len(pairs))]


def python_documentation() -> str:
    """Return the documentation text that every CPython ships, about 60,000 words.

    Raises:
        TextError: this Python comes without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise TextError("this Python ships without pydoc_data.topics; give a text of your own") from None
    return "\n".join(topics.values())


def read_text(path: Path) -> str:
    """Return the first `MAX_BYTES` of a UTF-8 text file.

    Raises:
        TextError: the file is missing, unreadable, empty, binary, or in another encoding.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES)
    except OSError as error:
        raise TextError(f"cannot read {path}: {error.strerror}") from None
    if not data.strip():
        raise TextError(f"{path} is empty")
    if b"\0" in data:
        raise TextError(f"{path} is a binary file, not a text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if len(data) == MAX_BYTES and error.start > MAX_BYTES - 4:  # a character cut in two by the limit
            return data[: error.start].decode("utf-8-sig")
        raise TextError(f"{path} is not UTF-8 text (byte {error.start})") from None
