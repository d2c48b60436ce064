"""Make a training and a test file of labelled text from what this machine has.

python make_data.py OUT                 which library is a sentence of documentation from?
python make_data.py OUT --play FILE     who says it? FILE: a play; lines of speakers end in `:`

Writes OUT/train.txt and OUT/dev.txt, lines of label<TAB>text: the same ones whenever it is run on
the same files.
"""

import argparse
import ast
import importlib.util
import random
import re
import sys
import sysconfig
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

LIBRARIES = ("python", "numpy", "paddle", "sklearn")
MOST_FILES = 300  # of a library: enough, and done in seconds
LEAST_WORDS = 4
DEV_SHARE = 0.2
SPEAKERS = 8
PART_WORDS = 24  # long speeches are cut into parts of about so many words


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the two files")
    parser.add_argument(
        "--play", type=Path, metavar="FILE", help="a play, instead of documentation"
    )
    parser.add_argument(
        "--speakers", type=int, default=SPEAKERS, help=f"those who say most ({SPEAKERS})"
    )
    args = parser.parse_args()
    try:
        groups = speeches(args.play, args.speakers) if args.play else documentation()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        print(f"make_data.py: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    for name, lines in zip(("train", "dev"), split(groups), strict=True):
        path = args.out / f"{name}.txt"
        path.write_text("".join(f"{label}\t{text}\n" for label, text in lines), encoding="utf-8")
        print(f"{path}: {len(lines)} texts")
    return 0


Groups = dict[str, list[list[str]]]  # label -> groups of texts that must stay together


def split(groups: Groups) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return what to train on and what to test on; of each label about the same share."""
    random_order = random.Random(0)
    train: list[tuple[str, str]] = []
    dev: list[tuple[str, str]] = []
    for label, members in sorted(groups.items()):
        random_order.shuffle(members)
        most = DEV_SHARE * sum(map(len, members))
        taken = 0
        for texts in members:
            part = dev if taken < most else train
            taken += len(texts)
            part.extend((label, text) for text in texts)
    random_order.shuffle(train)
    random_order.shuffle(dev)
    return train, dev


def speeches(play: Path, speakers: int) -> Groups:
    """Return what those who say most say, in parts of a few lines; a speech is a group.

    Raises:
        ValueError: it is no play, or has fewer speakers.
    """
    spoken: Groups = defaultdict(list)
    for block in play.read_text(encoding="utf-8").split("\n\n"):
        name, _, speech = block.strip("\n").partition("\n")
        if name.endswith(":") and speech:
            spoken[name[:-1]].append(list(parts(speech)))
    if len(spoken) < max(2, speakers) or speakers < 2:
        raise ValueError(
            f"--play {play}: {len(spoken)} speakers, {speakers} are wanted (at least 2); names "
            f"stand on lines of their own that end with `:`, behind an empty line"
        )
    words = {name: sum(len(" ".join(texts)) for texts in said) for name, said in spoken.items()}
    most = sorted(spoken, key=lambda name: (-words[name], name))[:speakers]
    return {name: spoken[name] for name in most}


def parts(speech: str) -> Iterator[str]:
    """Yield the lines of a speech, as many at once as have PART_WORDS words."""
    held: list[str] = []
    for line in speech.split("\n"):
        held += line.split()
        if len(held) >= PART_WORDS:
            yield " ".join(held)
            held = []
    if len(held) >= LEAST_WORDS:
        yield " ".join(held)


def documentation() -> Groups:
    """Return the first sentences of docstrings, by the library that they are from."""
    folders = {"python": Path(sysconfig.get_path("stdlib"))}
    for name in LIBRARIES[1:]:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            folders[name] = Path(next(iter(spec.submodule_search_locations)))
    found = {name: set(sentences(folder)) for name, folder in folders.items()}
    # What two libraries say in the same words tells nothing.
    several = {
        text for name, texts in found.items()
        for other, more in found.items() if name < other
        for text in texts & more
    }  # fmt: skip
    groups = {name: [[text] for text in sorted(texts - several)] for name, texts in found.items()}
    if len(groups) < 2:
        raise ValueError("no library beside Python's own is installed: pip install numpy")
    return groups


def sentences(folder: Path) -> Iterator[str]:
    """Yield the first paragraph of each docstring in the Python files of a library."""
    files = (
        path for path in sorted(folder.rglob("*.py"))
        if not {"site-packages", "dist-packages"} & set(path.relative_to(folder).parts)
        and "test" not in path.relative_to(folder).as_posix()
    )  # fmt: skip
    for path, _ in zip(files, range(MOST_FILES), strict=False):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of others' escape sequences
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue  # a template, or of another Python
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = (ast.get_docstring(node) or "").split("\n\n")[0]
                text = re.sub(r"\s+", " ", text).strip()
                if len(text.split()) >= LEAST_WORDS:
                    yield text


if __name__ == "__main__":
    sys.exit(main())
