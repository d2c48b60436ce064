"""The teacher and its students. All take ids of tokens (N, L), 0 behind each text's end."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import paddle
import paddle.nn.functional as F
from paddle import nn
from text_data import PAD, UNKNOWN, DataError, Vocabulary, padded_length

from distill_reader.convert import save_servable

# What the teacher's input and output are called by those who ask it.
INPUT, OUTPUT = "ids", "logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSize:
    """Of the teacher."""

    layers: int = 1
    width: int = 64
    heads: int = 4
    dropout: float = 0.3
    word_dropout: float = 0.15  # share of tokens that it cannot see in training


class Transformer(nn.Layer):
    """An encoder, its outputs' mean, and a linear layer: scores (N, classes).

    Layers normalise their input (Xiong et al. 2020, arXiv 2002.04745), so that it learns from the
    first weights on without a long warm-up.
    """

    def __init__(
        self, vocabulary: int, max_tokens: int, classes: int, size: TransformerSize
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, size.width, padding_idx=PAD)
        self.places = nn.Embedding(padded_length(max_tokens), size.width)
        layer = nn.TransformerEncoderLayer(
            size.width, size.heads, 4 * size.width, dropout=size.dropout, activation="gelu",
            normalize_before=True,
        )  # fmt: skip
        self.encoder = nn.TransformerEncoder(layer, size.layers, nn.LayerNorm(size.width))
        self.dropout = nn.Dropout(size.dropout)
        self.word_dropout = size.word_dropout
        self.classifier = nn.Linear(size.width, classes)

    def forward(self, ids):
        is_token = (ids != PAD).astype("float32")  # (N, L)
        if self.training and self.word_dropout:
            is_hidden = (paddle.rand(ids.shape) < self.word_dropout) & (ids != PAD)
            ids = paddle.where(is_hidden, paddle.full_like(ids, UNKNOWN), ids)
        places = paddle.arange(ids.shape[1])
        features = self.dropout(self.tokens(ids) + self.places(places))  # (N, L, width)
        # Added to the attention's scores before their softmax: (N, heads, from, to).
        mask = ((is_token - 1) * 1e9).unsqueeze([1, 2])
        features = self.encoder(features, src_mask=mask)
        return self.classifier(self.dropout(mean_of(features, is_token)))


class BagOfWords(nn.Layer):
    """The mean of the words' vectors, and two small layers: their order does not count."""

    def __init__(self, vocabulary: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.layers = nn.Sequential(
            nn.Dropout(0.2), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, classes)
        )

    def forward(self, ids):
        return self.layers(mean_of(self.tokens(ids), (ids != PAD).astype("float32")))


class ConvText(nn.Layer):
    """Filters over three and four words at a time; of each the strongest answer (Kim 2014,
    arXiv 1408.5882)."""

    def __init__(self, vocabulary: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.filters = nn.LayerList(
            [nn.Conv1D(width, width, size, padding="same") for size in (3, 4)]
        )
        self.layers = nn.Sequential(nn.Dropout(0.2), nn.Linear(2 * width, classes))

    def forward(self, ids):
        features = self.tokens(ids).transpose([0, 2, 1])  # (N, width, L)
        strongest = [F.relu(convolve(features)).max(axis=2) for convolve in self.filters]
        return self.layers(paddle.concat(strongest, axis=1))


def mean_of(features, is_token):
    """Return the mean over each text's tokens: (N, width) of (N, L, width) and (N, L)."""
    weights = is_token.unsqueeze(2)
    return (features * weights).sum(axis=1) / weights.sum(axis=1)


STUDENTS = {"bow": BagOfWords, "cnn": ConvText}


# --- a teacher's folder: servable, and enough to go on training it


def save_teacher(
    network: Transformer,
    folder: Path,
    *,
    vocabulary: Vocabulary,
    classes: list[str],
    size: TransformerSize,
) -> None:
    """Write `network` so that `python -m distill_reader.serve --model FOLDER` serves it."""
    network.eval()
    spec = paddle.static.InputSpec([None, None], "int64", INPUT)
    save_servable(network, [spec], folder, feed_alias=[INPUT], fetch_alias=[OUTPUT])
    paddle.save(network.state_dict(), str(folder / "weights.pdparams"))
    vocabulary.save(folder / "vocabulary.json")
    (folder / "teacher.json").write_text(json.dumps({"classes": classes, "size": asdict(size)}))


def teachers_classes(folder: Path) -> list[str]:
    """Return the classes of a teacher's outputs, in order.

    Raises:
        DataError: the folder holds no teacher.
    """
    return list(map(str, _description(folder)["classes"]))


def teachers_size(folder: Path) -> TransformerSize:
    """Raises DataError: the folder holds no teacher."""
    try:
        return TransformerSize(**_description(folder)["size"])
    except TypeError as error:
        raise DataError(f"{folder}/teacher.json: {error}; train the teacher again") from error


def load_weights(network: nn.Layer, folder: Path) -> str:
    """Take over the weights of a teacher that fit; return what was found, in one line.

    A classifier for other classes stays as it was made.

    Raises:
        DataError: there are none, or none fits.
    """
    path = folder / "weights.pdparams"
    try:
        found = paddle.load(str(path))
    except (OSError, ValueError, RuntimeError, EOFError) as error:
        raise DataError(f"--pretrained {folder}: {path.name} cannot be read: {error}") from error
    wanted = network.state_dict()
    fitting = {
        name: found[name]
        for name, tensor in wanted.items()
        if name in found and list(found[name].shape) == list(tensor.shape)
    }
    if not fitting:
        raise DataError(f"--pretrained {folder}: none of its weights fits; train without it")
    network.set_state_dict(wanted | fitting)
    return f"{len(fitting)} of {len(wanted)} weights from {path}"


def _description(folder: Path) -> dict:
    path = folder / "teacher.json"
    try:
        told = json.loads(path.read_text())
        if not told["classes"] or "size" not in told:
            raise ValueError("it names no classes or no size")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: describes no teacher ({error}); name a folder that train_teacher.py has made"
        ) from error
    return told
