"""Labelled text: lines of `label<TAB>text`, split into words or characters and numbered.

A line without a tab is a text without a label: distillation can learn from those, too.
"""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from paddle.io import Dataset

NO_LABEL = -1
PAD, UNKNOWN = 0, 1  # ids that are no token's
LENGTH_STEP = 8  # lengths are rounded up to a multiple: batches of one length share a request
UNITS = ("words", "characters")

# A word (with what is within it, as in don't and well-known), or a sign by itself. Signs of scripts
# that write no blanks between words are one each.
_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_TOKEN = re.compile(rf"[{_IDEOGRAPHS}]|(?:(?![{_IDEOGRAPHS}])\w)+(?:['\u2019-]\w+)*|[^\w\s]")


class DataError(Exception):
    """The data cannot be used; the text names file, line and remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Texts with their labels, numbered by `classes`."""

    texts: tuple[str, ...]
    labels: np.ndarray  # (N,) int64, NO_LABEL where there is none

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, ids: Iterable[int]) -> "Texts":
        chosen = np.fromiter(ids, np.int64)
        return Texts(texts=tuple(self.texts[i] for i in chosen), labels=self.labels[chosen])

    @classmethod
    def without_label(cls, texts: Sequence[str]) -> "Texts":
        return cls(texts=tuple(texts), labels=np.full(len(texts), NO_LABEL, np.int64))

    def __add__(self, more: "Texts") -> "Texts":
        return Texts(
            texts=self.texts + more.texts, labels=np.concatenate([self.labels, more.labels])
        )


def read_lines(path: Path) -> list[tuple[str | None, str]]:
    """Return label (None: there is none) and text of each line; empty lines are left out.

    Raises:
        DataError: the file cannot be read, or a line has a label and no text.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    lines = []
    # Not splitlines: a text may hold separators that only Unicode knows as ends of lines.
    for number, line in enumerate(content.split("\n"), 1):
        label, tab, text = line.rstrip("\r").partition("\t")
        if not tab:
            label, text = "", label
        if not text.strip():
            if label.strip():
                raise DataError(
                    f"{path}, line {number}: label {label!r} has no text; write label<TAB>text"
                )
            continue
        lines.append((label.strip() or None, text))
    if not lines:
        raise DataError(f"{path}: it is empty; lines are label<TAB>text")
    return lines


def read_texts(path: Path, classes: Sequence[str]) -> Texts:
    """Return what a file holds.

    Raises:
        DataError: as of `read_lines`, or a label is none of `classes`.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    lines = read_lines(path)
    for label, text in lines:
        if label is not None and label not in numbers:
            raise DataError(
                f"{path}: label {label!r} (of {text[:40]!r}) is none of {', '.join(classes)}; the "
                f"classes are those of the training file"
            )
    labels = [NO_LABEL if label is None else numbers[label] for label, _ in lines]
    return Texts(texts=tuple(text for _, text in lines), labels=np.array(labels, np.int64))


def find_classes(path: Path) -> list[str]:
    """Return the labels of a training file, sorted.

    Raises:
        DataError: as of `read_lines`, or there are fewer than two.
    """
    classes = sorted({label for label, _ in read_lines(path) if label is not None})
    if len(classes) < 2:
        raise DataError(
            f"{path}: {len(classes)} different labels; at least two are needed, in lines of "
            f"label<TAB>text"
        )
    return classes


def tokenize(text: str, unit: str) -> list[str]:
    """Return the tokens of a text: words and signs, or characters. Case and width do not count."""
    text = unicodedata.normalize("NFKC", text).casefold()
    if unit == "characters":
        return [each for each in text if not each.isspace()]
    return _TOKEN.findall(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Numbers tokens. Saved with the model that has learned them: others do not understand it."""

    unit: str  # words or characters
    max_tokens: int  # what is behind them is cut off
    tokens: dict[str, int]  # ids from 2 on

    def __len__(self) -> int:
        """Return how many ids there are, with those for padding and unknown tokens."""
        return len(self.tokens) + 2

    @classmethod
    def build(cls, texts: Iterable[str], *, unit: str, size: int, max_tokens: int) -> "Vocabulary":
        """Return the most frequent tokens; of those that are equally frequent, by their order."""
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(tokenize(text, unit))
        ranked = sorted(counts, key=lambda token: (-counts[token], token))[: size - 2]
        return cls(
            unit=unit,
            max_tokens=max_tokens,
            tokens={token: number for number, token in enumerate(ranked, 2)},
        )

    def ids(self, text: str) -> np.ndarray:
        """Return the ids of a text, (L,) int64; at least one."""
        tokens = tokenize(text, self.unit)[: self.max_tokens]
        ids = [self.tokens.get(token, UNKNOWN) for token in tokens]
        return np.array(ids or [UNKNOWN], np.int64)

    def save(self, path: Path) -> None:
        told = {"unit": self.unit, "max_tokens": self.max_tokens, "tokens": list(self.tokens)}
        path.write_text(json.dumps(told, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Vocabulary":
        """Raises DataError: it is no vocabulary."""
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            tokens = {str(token): number for number, token in enumerate(told["tokens"], 2)}
            unit, max_tokens = told["unit"], int(told["max_tokens"])
            if unit not in UNITS or max_tokens < 1:
                raise ValueError(f"unit {unit!r}, max_tokens {max_tokens}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}: is no vocabulary ({error}); name the one that was saved with the model"
            ) from error
        return cls(unit=unit, max_tokens=max_tokens, tokens=tokens)


class TextSet(Dataset):
    """What a loop reads. Each item: the ids of its text by each vocabulary, and the label.

    With keys: before these, a number that stands for the text, the same in every training.
    """

    def __init__(
        self, texts: Texts, vocabularies: Sequence[Vocabulary], *, with_keys: bool = False
    ) -> None:
        self._labels = texts.labels
        self._keys = [key_of(text) for text in texts.texts] if with_keys else None
        # Once, here: a text is split in every epoch otherwise.
        self._ids = [[words.ids(text) for text in texts.texts] for words in vocabularies]

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        key = () if self._keys is None else (self._keys[index],)
        return (*key, *(ids[index] for ids in self._ids), self._labels[index])


def key_of(text: str) -> np.int64:
    """Return a number that two texts share by chance alone, once in some billions of billions."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.frombuffer(digest, np.int64)[0]


def collate(samples: Sequence[tuple[np.ndarray, ...]]) -> list[np.ndarray]:
    """Make a batch: ids (N, L) of each vocabulary, as long as its longest text; others (N,)."""
    return [
        pad(column) if np.ndim(column[0]) else np.array(column, np.int64)
        for column in zip(*samples, strict=True)
    ]


def padded_length(tokens: int) -> int:
    """Return how long a text of so many tokens is in a batch, if it is the longest."""
    return -(-tokens // LENGTH_STEP) * LENGTH_STEP


def pad(ids: Sequence[np.ndarray]) -> np.ndarray:
    """Return (N, L) int64, PAD behind each text; L is a multiple of LENGTH_STEP."""
    padded = np.full((len(ids), padded_length(max(map(len, ids)))), PAD, np.int64)
    for row, each in zip(padded, ids, strict=True):
        row[: len(each)] = each
    return padded


def choose(texts: Texts, labelled: int | None, seed: int) -> tuple[Texts, Texts]:
    """Return those that keep their label, as evenly over the classes as can be, and the others.

    Args:
        labelled: how many; None: all that have one. Texts without a label are among the others.
        seed: other texts for another seed.

    Raises:
        DataError: there are not as many.
    """
    with_label = np.flatnonzero(texts.labels != NO_LABEL)
    without = np.flatnonzero(texts.labels == NO_LABEL)
    count = len(with_label) if labelled is None else labelled
    if count > len(with_label):
        raise DataError(
            f"--labelled {count}: only {len(with_label)} texts have a label; ask for fewer"
        )
    random = np.random.RandomState(seed)
    shuffled = with_label[random.permutation(len(with_label))]
    turns = np.zeros(len(shuffled), np.int64)  # the how-manieth of its class each one is
    for label in np.unique(texts.labels[with_label]):
        mine = np.flatnonzero(texts.labels[shuffled] == label)
        turns[mine] = np.arange(len(mine))
    order = shuffled[np.argsort(turns, kind="stable")]
    others = np.concatenate([order[count:], without])
    return texts.take(order[:count]), Texts.without_label([texts.texts[i] for i in others])
