"""Files of labelled text, tokens, vocabularies, batches, and what has a label."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from make_data import parts, speeches, split
from text_data import (
    NO_LABEL,
    PAD,
    UNKNOWN,
    DataError,
    Texts,
    TextSet,
    Vocabulary,
    choose,
    collate,
    find_classes,
    pad,
    read_lines,
    read_texts,
    tokenize,
)

PLAY = Path(os.environ.get("EDL_TEST_DATA", Path(__file__).parents[3] / "shared/data")) / (
    "text/tinyshakespeare.txt"
)


def made(folder: Path, text: str) -> Path:
    path = folder / "texts.txt"
    path.write_bytes(text.encode())
    return path


# --- files


def test_lines_are_label_tab_text_or_a_text_alone(tmp_path):
    path = made(
        tmp_path, "\ufeffgood\tA  fine day.\r\n\nno label here\n\talso none\nbad\tone\ttwo\n"
    )
    assert read_lines(path) == [
        ("good", "A  fine day."), (None, "no label here"), (None, "also none"), ("bad", "one\ttwo")
    ]  # fmt: skip


def test_signs_that_only_unicode_takes_for_ends_of_lines_end_none(tmp_path):
    path = made(tmp_path, "a\tone\u2028still one\x0band on\nb\ttwo\n")
    assert [label for label, _ in read_lines(path)] == ["a", "b"]


def test_labels_are_numbered_in_their_order_and_those_of_the_test_part_must_be_known(tmp_path):
    path = made(tmp_path, "b\tx\na\ty\nwithout\n")
    classes = find_classes(path)
    assert classes == ["a", "b"]
    texts = read_texts(path, classes)
    assert texts.labels.tolist() == [1, 0, NO_LABEL]
    with pytest.raises(DataError, match=r"label 'b' \(of 'x'\) is none of a, c; the classes are"):
        read_texts(path, ["a", "c"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("", "it is empty; lines are label<TAB>text", id="empty"),
        pytest.param("\n \n", "it is empty", id="blank"),
        pytest.param("a\tx\nb\t \n", "line 2: label 'b' has no text", id="no text"),
        pytest.param("a\tx\na\ty\n", "1 different labels; at least two", id="one class"),
        pytest.param("no\nlabels\n", "0 different labels; at least two", id="no class"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_what_is_wrong(tmp_path, text, said):
    with pytest.raises(DataError) as caught:
        find_classes(made(tmp_path, text))
    assert str(tmp_path) in str(caught.value)
    assert said in str(caught.value)


def test_other_encodings_and_missing_files_are_refused(tmp_path):
    (tmp_path / "latin").write_bytes("a\tné\n".encode("latin-1"))
    for name in ("latin", "missing"):
        with pytest.raises(DataError, match=rf"{name}: cannot be read as UTF-8 text: "):
            read_lines(tmp_path / name)


# --- tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Don't well-known, O'Neil!", ["don't", "well-known", ",", "o'neil", "!"]),
        ("  two\tblanks\n", ["two", "blanks"]),
        ("Straße ÉTÉ naïve", ["strasse", "été", "naïve"]),
        ("\uff21\uff22\u3000\uff43 \ufb01ne", ["ab", "c", "fine"]),  # full width, a ligature
        ("我很喜欢Paddle3这本书", ["我", "很", "喜", "欢", "paddle3", "这", "本", "书"]),
        ("ひらがなA", ["ひ", "ら", "が", "な", "a"]),
        ("x_1 = 3.5", ["x_1", "=", "3", ".", "5"]),
        ("👍🏽!", ["👍", "🏽", "!"]),
        ("", []),
    ],
)
def test_words_and_signs_are_told_apart_in_any_script(text, tokens):
    assert tokenize(text, "words") == tokens


def test_characters_are_tokens_where_asked():
    assert tokenize("Ab 我\t-", "characters") == ["a", "b", "我", "-"]


def test_a_vocabulary_keeps_the_most_frequent_tokens_in_one_order():
    words = Vocabulary.build(["b a a", "c b a"], unit="words", size=4, max_tokens=3)
    assert words.tokens == {"a": 2, "b": 3}
    assert len(words) == 4
    assert words.ids("C b A a a").tolist() == [UNKNOWN, 3, 2]
    tied = Vocabulary.build(["z y x"], unit="words", size=4, max_tokens=9)
    assert list(tied.tokens) == ["x", "y"]


def test_a_text_without_tokens_has_one_unknown():
    words = Vocabulary.build(["a b"], unit="words", size=9, max_tokens=3)
    assert words.ids(" ").tolist() == [UNKNOWN]


def test_a_vocabulary_that_was_saved_is_the_same(tmp_path):
    words = Vocabulary.build(['我 \u2028 " \\ é b b'], unit="characters", size=99, max_tokens=7)
    words.save(tmp_path / "v.json")
    assert Vocabulary.load(tmp_path / "v.json") == words


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"unit": "words"}', '{"unit": "bytes", "max_tokens": 3, "tokens": []}',
     '{"unit": "words", "max_tokens": 0, "tokens": []}'],
)  # fmt: skip
def test_what_is_no_vocabulary_is_refused(tmp_path, text):
    (tmp_path / "v.json").write_text(text)
    with pytest.raises(DataError, match=r"v\.json: is no vocabulary .* saved with the model"):
        Vocabulary.load(tmp_path / "v.json")


# --- batches


def test_a_batch_is_as_long_as_its_longest_text_and_a_multiple_of_eight():
    assert pad([np.array([5, 6]), np.array([7])]).tolist() == [[5, 6] + [PAD] * 6, [7] + [PAD] * 7]
    assert pad([np.arange(1, 10)]).shape == (1, 16)


def test_each_vocabulary_has_its_own_ids_and_length_in_a_batch():
    texts = Texts(texts=("abc", "a b c d e f g h i"), labels=np.array([1, NO_LABEL]))
    letters = Vocabulary.build(texts.texts, unit="characters", size=99, max_tokens=20)
    words = Vocabulary.build(texts.texts, unit="words", size=99, max_tokens=4)
    items = TextSet(texts, [letters, words])
    first, second, labels = collate([items[0], items[1]])
    assert (first.shape, second.shape) == ((2, 16), (2, 8))
    assert (second[1] != PAD).sum() == 4
    assert labels.tolist() == [1, NO_LABEL]
    assert first.dtype == second.dtype == labels.dtype == np.int64


def test_a_text_has_one_key_wherever_it_stands_and_others_have_others():
    texts = [Texts.without_label(["a b", "c é"]), Texts.without_label(["c é", "a  b"])]
    words = Vocabulary.build(["a b c"], unit="words", size=9, max_tokens=4)
    keys = [
        collate([each[0], each[1]])[0].tolist()
        for each in (TextSet(part, [words], with_keys=True) for part in texts)
    ]
    assert keys[0][1] == keys[1][0]
    assert len({*keys[0], *keys[1]}) == 3


# --- labels


def labelled(*counts: int, without: int = 0) -> Texts:
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    labels += [NO_LABEL] * without
    return Texts(texts=tuple(f"t{i}" for i in range(len(labels))), labels=np.array(labels))


def test_those_with_a_label_are_spread_over_the_classes_and_the_others_lose_theirs():
    texts = labelled(20, 20, 3, without=5)
    chosen, others = choose(texts, 9, seed=1)
    assert np.bincount(chosen.labels).tolist() == [3, 3, 3]
    assert len(others) == 39
    assert set(others.labels) == {NO_LABEL}
    assert {*chosen.texts, *others.texts} == set(texts.texts)
    assert choose(texts, 9, seed=1)[0].texts == chosen.texts
    assert choose(texts, 9, seed=2)[0].texts != chosen.texts


def test_without_a_number_all_that_have_a_label_keep_it():
    chosen, others = choose(labelled(2, 2, without=3), None, seed=1)
    assert (len(chosen), len(others)) == (4, 3)


def test_more_labels_than_there_are_cannot_be_asked_for():
    with pytest.raises(DataError, match="--labelled 5: only 4 texts have a label"):
        choose(labelled(2, 2, without=3), 5, seed=1)


# --- texts of this machine

LITTLE_PLAY = """ANNA:
One two three four five six.
Seven.

BEN:
Too short.

ANNA:
{long}

CLARA:
A speaker who says little enough.
"""


def test_a_play_becomes_speeches_of_those_who_say_most(tmp_path):
    play = made(tmp_path, LITTLE_PLAY.format(long="\n".join(["word " * 10] * 6)))
    groups = speeches(play, 2)
    assert sorted(groups) == ["ANNA", "CLARA"]
    assert [len(texts) for texts in groups["ANNA"]] == [1, 2]
    with pytest.raises(ValueError, match="3 speakers, 4 are wanted"):
        speeches(play, 4)


def test_what_is_too_short_to_tell_anything_is_left_out():
    assert list(parts("Too short.")) == []


def test_parts_of_one_speech_are_never_both_trained_on_and_tested():
    groups = {"a": [[f"{i} x", f"{i} y"] for i in range(50)], "b": [["z"]] * 50}
    train, dev = split(groups)
    assert len(train) + len(dev) == 150
    sides = [{text.split()[0] for label, text in part if label == "a"} for part in (train, dev)]
    assert sides[0] & sides[1] == set()
    assert len(sides[1]) == 10


def test_the_documents_of_this_machine_make_texts_that_can_be_read(tmp_path):
    """The play in place of them where it is there: reading all documentation takes seconds."""
    if not PLAY.exists():
        pytest.skip(f"no {PLAY}; set EDL_TEST_DATA")
    program = Path(__file__).parents[2] / "nlp_distill" / "make_data.py"
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "out"), "--play", str(PLAY)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    classes = find_classes(tmp_path / "out" / "train.txt")
    assert len(classes) == 8
    assert "ROMEO" in classes
    sizes = [
        len(read_texts(tmp_path / "out" / f"{name}.txt", classes)) for name in ("train", "dev")
    ]
    assert sizes[0] > 1000
    assert 0.15 < sizes[1] / sum(sizes) < 0.25
