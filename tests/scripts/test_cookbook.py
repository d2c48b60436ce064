"""Every snippet of the cookbook runs as it stands on the page, with each framework it is for."""

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.model.tensors import Array
from tests import warm
from tests.distill_reader.student.local_teacher import LocalService, LocalTeacher
from tests.pod_runtime.trainer.fake_launcher import FakeLauncher
from tests.support import ROOT

FRAMEWORKS = ("paddle", "torch")
# What the page says is the reader's own.
BEFORE = {
    "torch": """
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
""",
    "paddle": """
import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader

paddle.seed(1)
model = paddle.nn.Sequential(paddle.nn.Linear(8, 16), paddle.nn.Tanh(), paddle.nn.Linear(16, 4))
optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
""",
}
DATA = """
import numpy as np
from edl import elastic

draw = np.random.RandomState(1)
teachers = "TEACHERS"
train_set = [(draw.randn(8).astype("float32"), np.int64(i % 4)) for i in range(42)]
test_set = train_set[:10]
"""
# All snippets of a framework run in one process, each in a folder and names of its own.
RUNNER = """
import os
import sys
import traceback
from pathlib import Path

os.dup2(1, 2)
sys.stdout.reconfigure(line_buffering=True)
for script in sorted(Path.cwd().glob("*.py")):
    folder = script.with_suffix("")
    folder.mkdir()
    os.chdir(folder)
    print(f"\\n--- {script.stem}", flush=True)
    names = {"__name__": "__main__"}
    try:
        exec(compile(script.read_text(), str(script), "exec"), names)
        assert names["loop"].step_count > 0
        print("the snippet is done", flush=True)
    except BaseException:
        traceback.print_exc()
    os.chdir("..")
"""
# What a snippet has to say, by its heading.
SAYS = {
    "Training loss": r"step 0: loss \d\.\d{3}\n(.*\n)*step 10: loss",
    "Evaluation": r"epoch 1, step 12: train_loss \d.*, accuracy 0\.\d+, loss \d",
}


def sections() -> dict[str, list[tuple[str, str]]]:
    """Return the page's snippets by heading: the framework that each is for ("": any), and text."""
    found: dict[str, list[tuple[str, str]]] = {}
    page = (ROOT / "docs" / "cookbook.md").read_text()
    for section in page.split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        blocks = re.findall(r"^```python *(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        assert len(blocks) == text.count("\n```python"), heading
        found[heading] = blocks
    return found


SECTIONS = sections()


def snippet(heading: str, framework: str) -> str:
    """Return a section's code for a framework; "": it has none."""
    return "".join(code for only, code in SECTIONS[heading] if only in ("", framework))


def judge(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """What the teacher says of images: probabilities of four classes."""
    return {"score": np.full((len(inputs["image"]), 4), 0.25, np.float32)}


@pytest.fixture(scope="module")
def teacher() -> Iterator[str]:
    """Return where a teacher listens."""
    spec = ModelSpec(
        name="teacher",
        inputs=(TensorSpec(name="image", dtype="float32", shape=(8,)),),
        outputs=(TensorSpec(name="score", dtype="float32", shape=(4,)),),
    )
    made = LocalTeacher(LocalService(spec, judge))
    yield made.endpoint
    made.close()


@pytest.fixture(scope="module", params=FRAMEWORKS)
def output(request, tmp_path_factory, teacher: str) -> tuple[str, dict[str, str]]:
    """Return the framework, and what each section's snippet has said, by heading."""
    framework = request.param
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    folder = tmp_path_factory.mktemp(framework)
    data = DATA.replace("TEACHERS", teacher)
    for number, heading in enumerate(SECTIONS):
        if code := snippet(heading, framework):
            (folder / f"{number:02}.py").write_text(BEFORE[framework] + data + code)
    runner = folder / "all"
    runner.write_text(f"import {framework}\n{RUNNER}")
    env = {key: value for key, value in os.environ.items() if not key.startswith("EDL_")}
    done = warm.run([str(runner)], {**env, "PYTHONPATH": str(ROOT)}, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [part.partition("\n") for part in done.stdout.split("\n--- ")[1:]]
    headings = list(SECTIONS)
    return framework, {headings[int(number)]: text for number, _, text in said}


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_snippet_of_the_cookbook_runs(output: tuple[str, dict[str, str]], heading: str):
    framework, said = output
    if not snippet(heading, framework):
        pytest.skip(f"not for {framework}")
    assert "the snippet is done" in said[heading], said[heading]
    assert re.search(SAYS.get(heading, ""), said[heading]), said[heading]


def test_every_section_of_the_cookbook_has_a_snippet():
    assert all(SECTIONS.values())
    assert set(SAYS) <= set(SECTIONS)


@pytest.mark.parametrize("framework", ["torch", pytest.param("paddle", marks=pytest.mark.slow)])
def test_two_trainers_keep_one_best_checkpoint_and_stop_together(tmp_path, framework: str):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    script = tmp_path / "script.py"
    code = snippet("Early stopping", framework).replace('"checkpoint"', f'"{tmp_path}/checkpoint"')
    # The third epoch is the best one, whatever is trained.
    value = "loss = abs(epoch.number - 2.0)"
    code = re.sub(r"(?m)^(    loss = loop\.evaluate.*)$", rf"\1\n    {value}", code)
    assert value in code
    end = "\nprint('ended in', epoch.number, 'with', best.epoch, best.value, loop.step_count)\n"
    script.write_text(BEFORE[framework] + DATA + code + end)
    launcher = FakeLauncher(tmp_path / "job", str(script), 2)
    try:
        stage = launcher.start(2)
        stage.go()
        assert stage.codes() == [0, 0], stage.logs()
        assert stage.logs().count("ended in 5 with 2 0.0 36") == 2, stage.logs()
    finally:
        launcher.close()
    kept = [path.parent.name for path in (tmp_path / "checkpoint/best").rglob("manifest.json")]
    assert kept == ["step_0000000018"]
