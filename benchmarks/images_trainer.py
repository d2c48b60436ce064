"""Time resnet50/train_with_fleet.py from inside, for benchmarks/images.py.

Each trainer writes a line per step to `EDL_BENCHMARK_OUT/steps.STAGE.RANK.jsonl`: when it was
committed, and how long the trainer waited for its data. Each process that decodes writes how many
images, and what they cost, to `decoded.PID.json`.
"""

import importlib
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pod_runtime.env import TrainerEnv
from pod_runtime.trainer.data.readers import InlineReader, ThreadReader
from pod_runtime.trainer.loop.stage_steps import StageSteps, TrainingStep

EXAMPLE = Path(__file__).resolve().parents[1] / "resnet50"
OUT = Path(os.environ["EDL_BENCHMARK_OUT"])
ENV = TrainerEnv.read(os.environ)
WRITE_EVERY = 8  # images

waited_s = 0.0  # of the step that is open
decoded = {"images": 0, "cpu_s": 0.0}  # by this process


def timed_take(take: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        global waited_s
        begun = time.monotonic()
        try:
            return take(*args, **kwargs)
        finally:
            waited_s += time.monotonic() - begun

    return run


def noted_commit(
    commit: Callable[[StageSteps, TrainingStep], None],
) -> Callable[[StageSteps, TrainingStep], None]:
    path = OUT / f"steps.{ENV.stage or 0}.{ENV.rank}.jsonl"

    def run(steps: StageSteps, step: TrainingStep) -> None:
        global waited_s
        row = {"stage": ENV.stage or 0, "rank": ENV.rank, "world": steps.stage.member.world_size}
        row |= {"step": step.number + 1, "at": time.time(), "cpu_s": time.process_time()}  # type: ignore[dict-item]
        with path.open("a") as file:
            file.write(json.dumps({**row, "waited_s": waited_s}) + "\n")
        waited_s = 0.0
        commit(steps, step)  # may park, and never return

    return run


def counted_read(read: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        begun = time.thread_time()
        item = read(*args)
        decoded["cpu_s"] += time.thread_time() - begun
        decoded["images"] += 1
        if decoded["images"] % WRITE_EVERY == 0:
            (OUT / f"decoded.{os.getpid()}.json").write_text(json.dumps(decoded))
        return item

    return run


ThreadReader.take = timed_take(ThreadReader.take)  # type: ignore[method-assign]
InlineReader.take = timed_take(InlineReader.take)  # type: ignore[method-assign]
StageSteps.commit = noted_commit(StageSteps.commit)  # type: ignore[assignment, method-assign]
sys.path.insert(0, str(EXAMPLE))
dataset = importlib.import_module("images").Images
dataset.__getitem__ = counted_read(dataset.__getitem__)
sys.argv[0] = str(EXAMPLE / "train_with_fleet.py")
runpy.run_path(sys.argv[0], run_name="__main__")
