"""What the word2vec scripts are told, and the data that it names."""

import argparse
from pathlib import Path

from ngram import N, NGrams, build_dict, ngrams, sentences

WORDS = "king,queen,father,love,good,day,is"


def add_options(parser: argparse.ArgumentParser, passes: int) -> None:
    add = parser.add_argument
    add("--data", required=True, help="a text, one sentence a line; or simple-examples.tgz")
    add("--test_data", help="another one to test on (else every tenth sentence of --data)")
    add("--plain", action="store_true", help="the text has punctuation and capitals: part them off")
    add("--min_word_freq", type=int, default=50, help="rarer words are <unk>")
    add("--passes", type=int, default=passes)
    add("--batch_size", type=int, default=32)
    add("--lr", type=float, default=3e-3)
    add("--seed", type=int, default=1)
    add("--output", default="output", help="folder of the models, word_dict and embedding_table")
    add("--words", default=WORDS, help="whose neighbours are printed in the end")


def read_data(args: argparse.Namespace) -> tuple[dict[str, int], NGrams, NGrams]:
    """Return the dictionary, and the n-grams to train and to test on."""
    found = list(sentences(args.data, plain=args.plain))
    if args.test_data or Path(args.data).suffix in (".tgz", ".gz", ".tar"):
        train, test = found, list(sentences(args.test_data or args.data, "valid", plain=args.plain))
    else:
        train = [words for number, words in enumerate(found) if number % 10]
        test = found[::10]
    word_dict = build_dict(train, args.min_word_freq)
    sets = NGrams(ngrams(train, word_dict)), NGrams(ngrams(test, word_dict))
    if not all(len(grams) for grams in sets):
        raise SystemExit(f"--data: {args.data} has no sentence of {N - 2} words or more")
    print(f"{len(word_dict)} words, {len(sets[0])} n-grams to train, {len(sets[1])} to test")
    return word_dict, *sets
