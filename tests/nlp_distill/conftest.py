"""Put the example's flat modules on the path, and make a few texts."""

import random
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "nlp_distill"
sys.path.insert(0, str(FOLDER))

WORDS = {
    "sea": ["ship", "wave", "harbour", "sail", "anchor", "tide", "captain", "gull", "deck", "mast"],
    "kitchen": [
        "oven",
        "flour",
        "butter",
        "pan",
        "salt",
        "knife",
        "bread",
        "soup",
        "onion",
        "spoon",
    ],
    "yard": ["rake", "fence", "hedge", "spade", "moss", "apple", "gate", "shed", "barrow", "lawn"],
}


def sentence(label: str, chance: random.Random) -> str:
    others = [word for name, words in WORDS.items() if name != label for word in words]
    words = chance.choices(WORDS[label], k=chance.randint(2, 9)) + chance.choices(others, k=1)
    chance.shuffle(words)
    return " ".join(words)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 120 sentences to train on and 60 to test on, of three easy classes."""
    folder = tmp_path_factory.mktemp("texts")
    chance = random.Random(0)
    for name, count in (("train", 40), ("dev", 20)):
        lines = [
            f"{label}\t{sentence(label, chance)}\n" for _ in range(count) for label in sorted(WORDS)
        ]
        (folder / f"{name}.txt").write_text("".join(lines))
    return folder
