"""What the networks make of padding, and what is kept in a teacher's folder."""

import numpy as np
import paddle
import pytest
from text_data import DataError, Vocabulary, pad
from text_models import (
    STUDENTS,
    Transformer,
    TransformerSize,
    load_weights,
    save_teacher,
    teachers_classes,
    teachers_size,
)

SIZE = TransformerSize(layers=1, width=8, heads=2)
IDS = np.array([[3, 4, 5, 0, 0, 0, 0, 0]])


def transformer(classes: int = 3) -> Transformer:
    paddle.seed(1)
    network = Transformer(9, 16, classes, SIZE)
    network.eval()
    return network


@pytest.mark.parametrize("kind", ["transformer", "bow"])
def test_padding_changes_no_score(kind):
    network = transformer() if kind == "transformer" else STUDENTS["bow"](9, 3)
    network.eval()
    alone = network(paddle.to_tensor(IDS[:, :3])).numpy()
    longer = np.pad(IDS, [(0, 0), (0, 8)])
    beside = np.concatenate([longer, np.full_like(longer, 6)])
    assert network(paddle.to_tensor(beside)).numpy()[0] == pytest.approx(alone[0], abs=1e-5)


@pytest.mark.parametrize(("kind", "counts"), [("transformer", True), ("bow", False)])
def test_order_counts_for_the_teacher_and_not_for_a_bag_of_words(kind, counts):
    network = transformer() if kind == "transformer" else STUDENTS["bow"](9, 3)
    network.eval()
    one, two = (
        network(paddle.to_tensor(ids)).numpy() for ids in (IDS, IDS[:, [2, 1, 0, *range(3, 8)]])
    )
    assert np.allclose(one, two, atol=1e-5) is not counts


def test_a_teacher_takes_texts_as_long_as_its_vocabulary_leaves_them():
    ids = pad([np.full(11, 3)])  # padded to more than that
    network = Transformer(9, 11, 3, SIZE)
    network.eval()
    assert network(paddle.to_tensor(ids)).shape == [1, 3]


def test_words_are_hidden_in_training_alone():
    network = transformer()
    ids = paddle.to_tensor(np.tile(IDS, (1, 1)))
    assert (network(ids) == network(ids)).all()
    network.train()
    assert not (network(ids) == network(ids)).all()


def test_every_student_takes_texts_of_any_length():
    for make in STUDENTS.values():
        network = make(9, 3)
        assert network(paddle.ones([2, 1], "int64")).shape == [2, 3]
        assert network(paddle.ones([2, 40], "int64")).shape == [2, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    words = Vocabulary.build(["a b c"], unit="words", size=9, max_tokens=16)
    save_teacher(transformer(), folder, vocabulary=words, classes=["x", "y", "z"], size=SIZE)
    return folder


def test_a_teachers_folder_says_what_it_is(folder):
    assert teachers_classes(folder) == ["x", "y", "z"]
    assert teachers_size(folder) == SIZE
    assert len(Vocabulary.load(folder / "vocabulary.json")) == 5


def test_a_teacher_for_other_classes_goes_on_with_all_but_the_classifier(folder):
    network = transformer(classes=2)
    fresh = network.classifier.bias.numpy()
    said = load_weights(network, folder)
    assert said.startswith(
        f"{len(network.state_dict()) - 2} of {len(network.state_dict())} weights"
    )
    assert (network.classifier.bias.numpy() == fresh).all()


def test_what_is_no_teacher_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"teacher\.json: describes no teacher .*train_teacher\.py"):
        teachers_classes(tmp_path)
    (tmp_path / "teacher.json").write_text('{"classes": ["a"], "size": {"depth": 3}}')
    with pytest.raises(DataError, match="depth"):
        teachers_size(tmp_path)
    with pytest.raises(DataError, match=r"weights\.pdparams cannot be read"):
        load_weights(transformer(), tmp_path)
