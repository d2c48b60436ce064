"""The tutorial's n-grams are Paddle's own, its files are read again, and neighbours make sense."""

import io
import tarfile
from pathlib import Path

import numpy as np
import paddle
import pytest
from ngram import (
    NGramModel,
    build_dict,
    check_shards,
    load_dict_and_embedding,
    make_optimizer,
    neighbours,
    ngrams,
    save_dict,
    save_dict_and_embedding,
    sentences,
)

TEXT = """the cat sat on the mat
the dog sat on the log with N <unk>
no
the cat saw the dog and the dog saw the cat on the mat
"""


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """The Penn Treebank's form, as Paddle's imikolov has it."""
    path = tmp_path / "simple-examples.tgz"
    with tarfile.open(path, "w:gz") as out:
        for mode, text in (("train", TEXT), ("valid", TEXT[:50] + "\n"), ("test", TEXT)):
            member = tarfile.TarInfo(f"./simple-examples/data/ptb.{mode}.txt")
            member.size = len(text)
            out.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.mark.parametrize("rare", [1, 2])
def test_dictionary_and_ngrams_are_those_of_paddles_imikolov(rare, archive):
    theirs = paddle.text.Imikolov(
        data_file=str(archive), data_type="NGRAM", window_size=5, mode="train", min_word_freq=rare
    )
    both = [*sentences(archive), *sentences(archive, "valid")]
    word_dict = build_dict(both, rare)  # Paddle counts both parts
    assert word_dict == {
        word.decode() if isinstance(word, bytes) else word: number
        for word, number in theirs.word_idx.items()
    }
    found = list(ngrams(sentences(archive), word_dict))
    assert found == [tuple(int(each) for each in gram) for gram in theirs.data]


def test_a_text_as_people_write_it_is_parted_from_its_punctuation(tmp_path):
    path = tmp_path / "text"
    path.write_text("Speak, speak!\n\nI'll go.\n")
    assert list(sentences(path)) == [["Speak,", "speak!"], ["I'll", "go."]]
    assert list(sentences(path, plain=True)) == [["speak", "speak"], ["i'll", "go"]]


def test_the_files_of_words_and_vectors_are_read_again(tmp_path):
    words = {"the": 0, "cat": 1, "<unk>": 2}
    table = np.array([[1.0, 0.5], [0.9, 0.5], [-1.0, 2.0]])
    save_dict_and_embedding(words, table, tmp_path)
    assert (tmp_path / "word_dict").read_text() == "the 0\ncat 1\n<unk> 2\n"
    assert "," in (tmp_path / "embedding_table").read_text()
    again, vectors = load_dict_and_embedding(tmp_path)
    assert again == words
    np.testing.assert_array_equal(vectors, table)
    assert [name for name, _ in neighbours("the", words, table)] == ["cat", "<unk>"]


def test_ngrams_that_were_converted_with_another_dictionary_are_refused(tmp_path):
    files = [f"{tmp_path}/imikolov-train-*.npy"]
    check_shards(files, {"the": 0, "<unk>": 1})  # of the version before: nothing is known
    save_dict({"the": 0, "cat": 1, "<unk>": 2}, tmp_path)
    check_shards(files, {"the": 0, "cat": 1, "<unk>": 2})
    with pytest.raises(SystemExit, match="another dictionary; call convert"):
        check_shards(files, {"the": 0, "<unk>": 1})


def test_the_model_is_the_tutorials():
    model = NGramModel(100)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes == {
        "embedding.weight": (100, 32),
        "hidden.weight": (128, 256), "hidden.bias": (256,),
        "scores.weight": (256, 100), "scores.bias": (100,),
    }  # fmt: skip
    assert model.embedding.weight.name == "_proj"
    assert model.hidden.bias.optimize_attr["learning_rate"] == 2.0
    model.eval()
    assert abs(float(model.embedding.weight.std()) - 0.001) < 0.0002
    assert abs(float(model.hidden.weight.std()) - 1 / 16) < 0.01
    context = paddle.to_tensor([[1, 2, 3, 4], [4, 3, 2, 1]])
    first, second = model(context).numpy()
    assert not np.array_equal(first, second), "the order of words matters"
    optimizer = make_optimizer(model)
    assert type(optimizer).__name__ == "Adagrad"
    before = model.embedding.weight.numpy().copy()
    paddle.nn.functional.cross_entropy(model(context), paddle.to_tensor([7, 8])).backward()
    optimizer.step()
    changed = np.abs(model.embedding.weight.numpy() - before).sum(axis=1) > 0
    assert np.flatnonzero(changed).tolist() == [1, 2, 3, 4], "no decay of words that did not come"
