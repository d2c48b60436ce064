"""Write the n-grams of a text into files for the task queue: python convert.py --data TEXT"""

import argparse

from ngram import save_dict
from word2vec_options import add_options, read_data

from edl import write_shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, passes=1)
    parser.add_argument("--shards", default="shards", help="folder of the files")
    parser.add_argument("--per_file", type=int, default=5000, help="n-grams")
    args = parser.parse_args()
    word_dict, train_set, _ = read_data(args)
    files = write_shards(train_set.grams, args.shards, "imikolov-train", args.per_file)
    save_dict(word_dict, args.shards)  # train.py looks whether its own is the same
    print(f"{len(files)} files: {files[0]} to {files[-1].name}")


if __name__ == "__main__":
    main()
