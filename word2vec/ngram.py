"""The n-gram language model of the word2vec tutorial: four words predict the fifth.

As in the original's tutorial (chapter 4 of Paddle's book; after Bengio et al., "A Neural
Probabilistic Language Model", 2003). The table of word vectors is called `_proj`, and shared.
"""

import math
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional

N = 5
EMBEDDING = 32
HIDDEN = 256
LEARNING_RATE = 3e-3
L2 = 8e-4
EVALUATOR = "classification_error_evaluator"  # the error rate's name in the tutorial
UNKNOWN, BEGIN, END = "<unk>", "<s>", "<e>"
_PTB = "./simple-examples/data/ptb.{}.txt"  # in the archive of Paddle's imikolov


def sentences(
    source: str | Path, mode: str = "train", *, plain: bool = False
) -> Iterator[list[str]]:
    """Yield the words of each line.

    Args:
        source: a text of one sentence a line; or the archive of Paddle's imikolov,
            `simple-examples.tgz`, of which `mode` ("train" or "valid") says which part.
        plain: the text is as people write it: its words are made lower case and parted from
            punctuation. Else they are what stands between blanks, as in the Penn Treebank.
    """
    if not tarfile.is_tarfile(source):
        with open(source, "rb") as lines:
            yield from _words(lines, plain)
        return
    with tarfile.open(source) as archive:
        member = archive.extractfile(_PTB.format(mode))
        assert member is not None, f"{source}: {_PTB.format(mode)} is no file"
        yield from _words(member, plain)


def _words(lines: IO[bytes], plain: bool) -> Iterator[list[str]]:
    for line in lines:
        text = line.decode("utf-8", "replace")
        if words := re.findall(r"[\w']+", text.lower()) if plain else text.split():
            yield words


def build_dict(found: Iterable[Sequence[str]], min_word_freq: int = 50) -> dict[str, int]:
    """Return word -> id, the most frequent first, as `paddle.dataset.imikolov.build_dict`.

    Words that come no more than `min_word_freq` times are `<unk>`, which has the last id.
    """
    counts: Counter[str] = Counter()
    for words in found:
        counts.update(words)
        counts.update((BEGIN, END))
    counts.pop(UNKNOWN, None)  # of a text that has been cleaned before
    frequent = sorted((-count, word) for word, count in counts.items() if count > min_word_freq)
    ids = {word: number for number, (_, word) in enumerate(frequent)}
    ids[UNKNOWN] = len(ids)
    return ids


def ngrams(
    found: Iterable[Sequence[str]], word_dict: dict[str, int], n: int = N
) -> Iterator[tuple[int, ...]]:
    """Yield all runs of n words within a sentence, as ids."""
    unknown = word_dict[UNKNOWN]
    for words in found:
        ids = [word_dict.get(word, unknown) for word in (BEGIN, *words, END)]
        for end in range(n, len(ids) + 1):
            yield tuple(ids[end - n : end])


class NGrams(paddle.io.Dataset):
    """The n-grams of a text, as (four ids, the fifth)."""

    def __init__(self, grams: Iterable[tuple[int, ...]]) -> None:
        super().__init__()
        self.grams = np.array(list(grams), dtype="int64")

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.grams[index, :-1], self.grams[index, -1]

    def __len__(self) -> int:
        return len(self.grams)


class NGramModel(nn.Layer):
    """Four words in, scores of the fifth out."""

    def __init__(self, words: int) -> None:
        super().__init__()
        table = paddle.ParamAttr(
            name="_proj",
            initializer=nn.initializer.Normal(std=0.001),
            regularizer=paddle.regularizer.L2Decay(0.0),
        )
        self.embedding = nn.Embedding(words, EMBEDDING, weight_attr=table)
        hidden = paddle.ParamAttr(
            initializer=nn.initializer.Normal(std=1 / math.sqrt(EMBEDDING * 8))
        )
        twice = paddle.ParamAttr(learning_rate=2.0, initializer=nn.initializer.Constant(0.0))
        self.hidden = nn.Linear((N - 1) * EMBEDDING, HIDDEN, hidden, bias_attr=twice)
        self.dropout = nn.Dropout(0.5)
        self.scores = nn.Linear(HIDDEN, words, bias_attr=twice)

    def forward(self, words: paddle.Tensor) -> paddle.Tensor:
        """Return scores [batch, words in the dictionary] of ids [batch, 4]."""
        context = self.embedding(words).flatten(1)
        return self.scores(self.dropout(functional.sigmoid(self.hidden(context))))


def make_optimizer(model: NGramModel, lr: float = LEARNING_RATE) -> paddle.optimizer.Optimizer:
    return paddle.optimizer.Adagrad(lr, parameters=model.parameters(), weight_decay=L2)


def cost_and_errors(
    scores: paddle.Tensor, words: paddle.Tensor
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the mean cross-entropy, and how many of the words were not the likeliest."""
    return functional.cross_entropy(scores, words), (scores.argmax(axis=1) != words).sum()


def test(model: NGramModel, grams: NGrams) -> tuple[float, float]:
    """Return mean cost and error rate over all n-grams."""
    model.eval()
    cost = errors = 0.0
    with paddle.no_grad():
        for start in range(0, len(grams), 1024):
            part = paddle.to_tensor(grams.grams[start : start + 1024])
            found, wrong = cost_and_errors(model(part[:, :-1]), part[:, -1])
            cost, errors = cost + float(found) * len(part), errors + float(wrong)
    model.train()
    return cost / len(grams), errors / len(grams)


def tested(number: int, cost: float, error_rate: float) -> str:
    """Return the tutorial's line on a pass that is over."""
    metrics = {EVALUATOR: round(error_rate, 6)}
    return f"Pass {number}, Testing metrics {metrics}, cost {cost:f}"


def embeddings_of(model: NGramModel) -> np.ndarray:
    return model.embedding.weight.numpy()


def save_dict_and_embedding(
    word_dict: dict[str, int], embeddings: np.ndarray, folder: str | Path = "."
) -> None:
    """Write `word_dict`, lines `word id`, and `embedding_table`, comma separated."""
    save_dict(word_dict, folder)
    np.savetxt(Path(folder, "embedding_table"), embeddings, delimiter=",", newline="\n")


def save_dict(word_dict: dict[str, int], folder: str | Path) -> None:
    lines = [f"{word} {number}\n" for word, number in word_dict.items()]
    Path(folder, "word_dict").write_text("".join(lines), encoding="utf-8")


def load_dict(folder: str | Path) -> dict[str, int]:
    word_dict = {}
    for line in Path(folder, "word_dict").read_text(encoding="utf-8").splitlines():
        word, number = line.rsplit(" ", 1)
        word_dict[word] = int(number)
    return word_dict


def check_shards(paths: Iterable[str], word_dict: dict[str, int]) -> None:
    """End the program where the n-grams' ids are those of another dictionary."""
    for folder in {Path(path).parent for path in paths}:
        if Path(folder, "word_dict").is_file() and load_dict(folder) != word_dict:
            raise SystemExit(
                f"--shards: {folder} was made with another dictionary; call convert.py again with "
                f"the --data, --plain and --min_word_freq of this training"
            )


def load_dict_and_embedding(folder: str | Path = ".") -> tuple[dict[str, int], np.ndarray]:
    """Return what `save_dict_and_embedding` wrote."""
    return load_dict(folder), np.loadtxt(Path(folder, "embedding_table"), delimiter=",", ndmin=2)


def neighbours(
    word: str, word_dict: dict[str, int], embeddings: np.ndarray, count: int = 5
) -> list[tuple[str, float]]:
    """Return the words whose vectors point most nearly where this one's does, with the cosines."""
    lengths = np.maximum(np.linalg.norm(embeddings, axis=1), 1e-12)
    vectors = embeddings / lengths[:, None]
    cosines = vectors @ vectors[word_dict[word]]
    names = {number: name for name, number in word_dict.items()}
    best = [int(i) for i in np.argsort(-cosines) if i != word_dict[word]][:count]
    return [(names[i], float(cosines[i])) for i in best]


def neighbour_lines(word_dict: dict[str, int], embeddings: np.ndarray, words: Iterable[str]) -> str:
    """Return a line of neighbours for each word."""
    lines = []
    for word in words:
        if word in word_dict:
            near = neighbours(word, word_dict, embeddings)
            lines.append(f"{word}: {', '.join(f'{name} {cosine:.2f}' for name, cosine in near)}")
        else:
            lines.append(f"{word}: not in the dictionary")
    return "\n".join(lines)
