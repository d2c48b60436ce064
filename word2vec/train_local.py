"""Train the word2vec tutorial's model in one process: python train_local.py --data TEXT"""

import argparse
from pathlib import Path

import paddle
from ngram import (
    EVALUATOR,
    NGramModel,
    cost_and_errors,
    embeddings_of,
    make_optimizer,
    neighbour_lines,
    save_dict_and_embedding,
    test,
    tested,
)
from word2vec_options import add_options, read_data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, passes=100)
    args = parser.parse_args()
    paddle.seed(args.seed)
    word_dict, train_set, test_set = read_data(args)
    model = NGramModel(len(word_dict))
    optimizer = make_optimizer(model, args.lr)
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    loader = paddle.io.DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    for number in range(args.passes):
        for batch_id, (context, words) in enumerate(loader):
            cost, errors = cost_and_errors(model(context), words)
            cost.backward()
            optimizer.step()
            optimizer.clear_grad()
            if batch_id % 100 == 0:
                metrics = {EVALUATOR: float(errors) / len(words)}
                print(
                    f"Pass {number}, Batch {batch_id}, Cost {float(cost):f}, {metrics}", flush=True
                )
        cost_now, error_rate = test(model, test_set)
        print(tested(number, cost_now, error_rate), flush=True)
        paddle.save(model.state_dict(), str(output / f"model_{number}.pdparams"))
    save_dict_and_embedding(word_dict, embeddings_of(model), output)
    print(neighbour_lines(word_dict, embeddings_of(model), args.words.split(",")))


if __name__ == "__main__":
    main()
