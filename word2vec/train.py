"""Train the word2vec tutorial's model with as many trainers as there are.

edl run --min 1 --max 4 word2vec/train.py --data TEXT
"""

import argparse
from pathlib import Path

import paddle
from ngram import (
    NGramModel,
    check_shards,
    cost_and_errors,
    embeddings_of,
    make_optimizer,
    neighbour_lines,
    save_dict_and_embedding,
    tested,
)
from paddle.nn import functional
from word2vec_options import add_options, read_data

from edl import cloud_reader, elastic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, passes=30)
    parser.add_argument(
        "--shards",
        nargs="+",
        help="files of n-grams (convert.py) that the trainers share out as tasks",
    )
    args = parser.parse_args()
    paddle.seed(args.seed)
    word_dict, train_set, test_set = read_data(args)
    model = NGramModel(len(word_dict))
    optimizer = make_optimizer(model, args.lr)
    output = Path(args.output)
    common = {"epochs": args.passes, "checkpoint": str(output / "checkpoint")}
    if args.shards:  # each record at least once in each pass
        check_shards(args.shards, word_dict)
        steps = len(train_set) // args.batch_size
        loop = elastic.Loop(
            model,
            optimizer,
            batch_size=args.batch_size,
            steps_per_epoch=steps,
            reader=cloud_reader(args.shards).batches(steps_per_epoch=steps, collate=columns),
            **common,
        )
    else:  # each n-gram once
        loader = paddle.io.DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
        loop = elastic.Loop(model, optimizer, loader, **common)

    def judge(context: paddle.Tensor, words: paddle.Tensor) -> dict[str, paddle.Tensor]:
        scores = model(context)
        return {
            "test_cost": functional.cross_entropy(scores, words, reduction="sum"),
            "test_error": (scores.argmax(axis=1) != words).sum(),
        }

    for epoch in loop.epochs():
        model.train()
        for step in epoch:
            for context, words in step:
                cost, _ = cost_and_errors(model(context), words)
                step.backward(cost)
            step.update()
        model.eval()
        sums = loop.evaluate(test_set, judge, batch_size=1024)
        means = {name: total / len(test_set) for name, total in sums.items()}
        loop.log(**means)
        if loop.rank == 0:
            print(tested(epoch.number, means["test_cost"], means["test_error"]), flush=True)
    if loop.rank == 0:
        save_dict_and_embedding(word_dict, embeddings_of(model), output)
        print(neighbour_lines(word_dict, embeddings_of(model), args.words.split(",")))


def columns(records: list) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the first four ids of each n-gram, and the fifth."""
    rows = paddle.to_tensor(records)
    return rows[:, :-1], rows[:, -1]


if __name__ == "__main__":
    main()
