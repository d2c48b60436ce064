"""word2vec by the task queue: a trainer is killed, and all n-grams are read all the same."""

import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from job_server.api.wire import JobSpec, JobState
from tests.e2e.cluster import Cluster
from tests.support import ROOT, wait_until

PASSES = 6


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_killed_trainer_loses_no_ngram(tmp_path: Path) -> None:
    draw, text, shards = random.Random(5), tmp_path / "text", tmp_path / "shards"
    lines = (" ".join(draw.choices("abcdefghij", k=8)) for _ in range(600))
    text.write_text("\n".join(lines))
    data = ["--data", str(text), "--min_word_freq", "1"]
    convert = [sys.executable, str(ROOT / "word2vec" / "convert.py"), *data]
    convert += ["--shards", str(shards), "--per_file", "100"]
    subprocess.run(convert, check=True, timeout=120)
    files = sorted(map(str, shards.glob("*.npy")))
    train = [str(ROOT / "word2vec" / "train.py"), *data, "--batch_size", "16"]
    train += [
        "--passes",
        str(PASSES),
    ]  # the kill falls into any of them
    train += ["--output", str(tmp_path / "out"), "--shards", *files]
    script = f"{{python}} -m pod_runtime.launch --log_dir {{out}}/log {shlex.join(train)}"
    cluster = Cluster(tmp_path / "c", slots=2, script=script)
    try:
        cluster.start_server()
        cluster.start_client()
        _train(cluster, len(files))
    finally:
        cluster.stop()
    assert (tmp_path / "out" / "embedding_table").is_file()


def _train(cluster: Cluster, files: int) -> None:
    cluster.submit(JobSpec(job_id="words", min_pods=2, max_pods=2, spares=1))
    cluster.wait_steps(10)
    cluster.kill(cluster.trainers()[0])
    wait_until(lambda: cluster.status().state.ended, 300, "the job ends")
    status = cluster.status()
    assert status.state is JobState.SUCCEEDED
    with cluster.api() as api:
        (queue,) = api.queues()
    assert [(each.done, each.dropped) for each in queue.passes] == [(files, 0)] * (PASSES - 1)
    for each in queue.passes:
        assert each.records_once + each.records_again == 540 * 6, "words, and a sentence's two ends"
    # In the pass in which it was killed.
    again = sum(each.records_again for each in (*queue.passes, queue.now))
    assert again > 0, "what the dead one had was read again"
    assert status.metrics["test_error"] < 1.0
