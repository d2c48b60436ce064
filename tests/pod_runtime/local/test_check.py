"""`edl check`: what a rehearsal finds in scripts, of both frameworks."""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest

from pod_runtime.local.check import main
from tests import warm
from tests.support import ROOT

SCRIPT = {
    "torch": """
import torch
import torch.nn.functional as F
from torch import nn
from edl import elastic

torch.manual_seed(1)
relu, bce = nn.ReLU, F.binary_cross_entropy_with_logits
LAYERS
model = nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
draw = torch.rand
""",
    "paddle": """
import paddle
import paddle.nn.functional as F
from paddle import nn
from edl import elastic

paddle.seed(1)
relu, bce = nn.ReLU, F.binary_cross_entropy_with_logits
LAYERS
model = nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 2))
optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
draw = lambda *shape: paddle.rand(shape)
""",
}
LOOP = """
import numpy as np

data = [(np.random.RandomState(i).randn(4).astype("float32"), np.int64(i % 2)) for i in range(100)]
loop = elastic.Loop(model, optimizer, data, epochs=9, batch_size=15, checkpoint="ckpt", ARGUMENTS)
for epoch in loop.epochs():
    for step in epoch:
        for inputs, labels in step:
            BODY
            step.backward(loss)
        step.update()
        AFTER
    sums = loop.evaluate(data, lambda inputs, labels: {"n": len(inputs)}, batch_size=4)
    print("evaluated", sums["n"])
    loop.log(n=sums["n"])
    loop.save_best("n", sums["n"])
print("never reached")
"""
MEAN = "loss = F.cross_entropy(model(inputs), labels)"
SUM = "loss = F.cross_entropy(model(inputs), labels, reduction='sum')"
TWO_OPTIMIZERS = {  # which take turns, over the same batch
    "optimizer = torch.optim.SGD(model.parameters(), 0.1)":
        "optimizer = [torch.optim.SGD(model[each].parameters(), 0.1) for each in (0, -1)]",
    "step.backward(loss)": "step.backward(loss, optimizer[0])",
    "step.update()": "step.update(optimizer[0])\n"
        "        for inputs, labels in step:\n"
        "            step.backward(F.cross_entropy(model(inputs), labels), optimizer[1])\n"
        "        step.update(optimizer[1])",
}  # fmt: skip
# By name: what is put into the script, what the check says, and whether that is a finding.
CASES: dict[str, tuple[dict[str, str], str, bool]] = {
    "clean": ({}, "ok: the batch of 15, cut into 3 shards\nok: a short batch of 11", False),
    "fixed batch size": (
        {"BODY": f"model(inputs + draw(15, 4)); {MEAN}"},
        r"script\.py:\d+: \w+: .*\n    in the batch of 15, cut into 3 shards\n"
        r"    the batch of 15 is cut into shards, and the loop's body has one of 5 here: .*size\n",
        True,
    ),
    "squeeze": (
        {"BODY": "loss = bce(model(inputs)[:, :1].squeeze(), labels.reshape([-1]).to(inputs.dtype)"
                 ".reshape([len(labels)]) * 1.0 if len(labels) > 1 else draw(2))"},
        r"in a short batch of 11, whose last shard has one\n    the batch of 11 is cut into shards"
        r".* of 1 here: .*; and name the dimension that squeeze\(\) takes out, squeeze\((AXIS)\)",
        True,
    ),
    "sum": (
        {"BODY": SUM},
        r"script\.py:\d+: loss: in 3 shards it is 0\.3\d times.*multiply a learning rate",
        True,
    ),
    "sum that is said": ({"BODY": SUM, "ARGUMENTS": "loss='sum'"}, "no findings", False),
    "mean for a sum": (
        {"ARGUMENTS": "loss='sum'"}, "it is 3.00 times.*leave out Loop.loss='sum'", True,
    ),
    "product over the batch": (
        {"BODY": "loss = model(inputs).sum() ** 2"},
        r"gradients: those of 3 shards differ from those of the whole batch by \d+ %",
        True,
    ),
    "class weights": (
        {"BODY": "w = 1.0 + 0.5 * labels; l = F.cross_entropy(model(inputs), labels, "
                 "reduction='none').reshape([-1]); loss = (w * l).sum() / w.sum()"},
        "note: gradients: those of 3 shards differ",
        False,
    ),
    "no short batch": (
        {"range(100)": "range(90)"},
        r"ok: the batch of 15, cut into 3 shards\n(?!ok: a short batch)", False,
    ),
    "less data than a short batch": (
        {"range(100)": "range(4)"},
        r"ok: the batch of 4, cut into 3 shards\n(?!ok: a short batch)", False,
    ),
    "dropout": ({"LAYERS": "layers = [nn.Dropout(0.5)]"}, "note: .*random numbers", False),
    "refused": ({"ARGUMENTS": "loss='median'"}, r"script\.py:\d+: UsageError: loss: exp", True),
    "run log": (
        {"for epoch in loop.epochs():":
            "from edl import RunLog\nlog = RunLog(loop, 'runs')\nfor epoch in loop.epochs():",
         "AFTER": "log.add_scalar('loss', 1.0)"},
        "no findings", False,
    ),
    "drop_last": (
        {"ARGUMENTS": "drop_last=True"},
        "cut into 3 shards\nnote: drop_last leaves 10 of 100 samples out",
        False,
    ),
    "left by break": ({"AFTER": "break"}, r"UsageError: epoch 0 was left after", True),
    "too small": (
        {"ARGUMENTS": "shards=20"}, "batch_size: 15 samples are fewer than 20 shards", True,
    ),
    "no update": ({"AFTER": "pass", "step.update()": "pass"}, r"step\.update\(\) is miss", True),
    "reader": (
        {"ARGUMENTS": "reader=lambda where: loop.shards(data)"},
        "note: data that come by reader= or as a stream are rehearsed by one step",
        False,
    ),
    "never trains": ({"loop = elastic.Loop": "exit(0)"}, "it ended without elastic.Loop", True),
}  # fmt: skip
ONLY_TORCH: dict[str, tuple[dict[str, str], str, bool]] = {
    "batch norm": (
        {"LAYERS": "layers = [nn.BatchNorm1d(8)]", "ARGUMENTS": "drop_last=True"},
        "note: batch norm sees a shard, here of 5 samples.*\nnote: the gradients.*\n|batch norm\n",
        False,
    ),
    "batch norm of one": (
        {"LAYERS": "layers = [nn.BatchNorm1d(8)]"},
        "Expected more than 1 value per channel.*\n    in a short batch of 11",
        True,
    ),
    "batch sampler": (
        {"data, epochs=9, batch_size=15": "torch.utils.data.DataLoader(data, batch_sampler="
         "[range(k, k + 15) for k in range(0, 60, 15)] + [[7, 8, 9]]), epochs=9",
         "AFTER": "print('trained', step.samples)"},
        r"\ntrained 3\n",  # the last batch, as the sampler made it
        False,
    ),
    "buckets": (
        {"data, epochs": "DataLoader(data, batch_sampler=[list(range(i, min(i + 7 + i % 3, 100))) "
         "for i in range(0, 100, 9)]), epochs", ", batch_size=15": "",
         "import numpy": "from torch.utils.data import DataLoader\nimport numpy"},
        r"ok: the batch of 7, cut into 3 shards\nok: a short batch of 7",
        False,
    ),
    "stream": (
        {"data, epochs": "Stream(), steps_per_epoch=4, epochs",
         "loop =": "class Stream(torch.utils.data.IterableDataset):\n"
         "    def __iter__(self): return iter(data)\nloop ="},
        "note: data that come by reader= or as a stream are rehearsed by one step",
        False,
    ),
    "unowned": (
        {"LAYERS": "layers = [nn.Linear(8, 8)]", "optimizer = ": "optimizer = torch.optim.SGD("
         "[*model[0].parameters(), *model[2].parameters()], 0.1)  # "},
        r"script\.py:\d+: no optimizer has 1.weight, 1.bias: not trained",
        True,
    ),
    "set in each shard": (
        {"BODY": f"{MEAN}; optimizer.param_groups[0]['lr'] *= 0.9"},
        r"UsageError: optimizer: its learning rate .*: set inside of `for batch in step:`.*\n"
        r"    in the batch of 15, cut into 3 shards",
        True,
    ),
    "two optimizers, fixed batch size": (
        {**TWO_OPTIMIZERS, "BODY": f"model(inputs + draw(15, 4)); {MEAN}"},
        r"in the batch of 15, cut into 3 shards\n    the batch of 15 is cut into shards, and the",
        True,
    ),
    "two optimizers, a sum": (
        TWO_OPTIMIZERS | {"BODY": SUM}, r"loss: in 3 shards it is 0\.3\d times", True,
    ),
    "hook": (
        {"AFTER": "model[0].register_forward_hook(lambda *_: None)"},
        "changed since the first step, and no state can carry it: ",
        True,
    ),
}  # fmt: skip
RUNNER = """
import io
import json
import os
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

sys.stderr = sys.stdout
from pod_runtime.local.check import main

top, found = Path.cwd(), {}
for folder in sorted(each for each in top.iterdir() if each.is_dir()):
    os.chdir(folder)
    with redirect_stdout(io.StringIO()) as said:
        code = main(["script.py", "--its", "own"])
    found[folder.name] = (code, said.getvalue(), sorted(each.name for each in folder.iterdir()))
(top / "found.json").write_text(json.dumps(found))
os.chdir(top / "clean")
runpy.run_path("script.py", run_name="__main__")  # after the rehearsals this process trains
"""


def write(folder: Path, framework: str, changes: dict[str, str]) -> None:
    text = SCRIPT[framework] + LOOP
    usual = {"LAYERS": "layers = []", "ARGUMENTS": "", "BODY": MEAN, "AFTER": "pass"}
    for old, new in (
        changes | {name: usual[name] for name in usual if name not in changes}
    ).items():
        assert old in text, old
        text = text.replace(old, new)
    folder.mkdir(parents=True)
    (folder / "script.py").write_text(text)


@pytest.fixture(scope="module", params=["paddle", "torch"])
def checked(request, tmp_path_factory) -> tuple[str, dict[str, tuple[int, str, list[str]]]]:
    """Return the framework, and by case the exit code, what was said, and the files there."""
    framework = request.param
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    top = tmp_path_factory.mktemp(framework)
    for name, (changes, _text, _is_finding) in cases(framework).items():
        write(top / name, framework, changes)
    runner = top / "runner.py"
    runner.write_text(f"import {framework}\n{RUNNER}")
    done = warm.run([str(runner)], {**os.environ, "PYTHONPATH": str(ROOT)}, top)
    assert done.returncode == 0, done.stdout + done.stderr
    return framework, json.loads((top / "found.json").read_text())


def cases(framework: str) -> dict[str, tuple[dict[str, str], str, bool]]:
    return CASES | (ONLY_TORCH if framework == "torch" else {})


@pytest.mark.parametrize("name", CASES | ONLY_TORCH)
def test_a_rehearsal_names_what_would_fail(checked, name: str):
    framework, found = checked
    if name not in found:
        pytest.skip(f"not for {framework}")
    changes, text, is_finding = cases(framework)[name]
    code, said, files = found[name]
    text = text.replace("AXIS", {"paddle": "axis", "torch": "dim"}[framework])
    assert re.search(text, said), said
    assert code == int(is_finding), said
    assert "never reached" not in said
    assert files == ["script.py"], "no checkpoint is written"
    if not is_finding and name not in ("reader", "stream"):
        samples = 4 if "range(4)" in changes.values() else 64
        assert f"evaluated {samples}" in said, "also what comes after an epoch"


@pytest.mark.parametrize(
    ("name", "line"),
    [("lib_a", "from lib_a.training import train"), ("lib_b", "import lib_b.training")],
)
def test_a_loop_is_found_in_packages_wherever_they_are_but_not_in_installed_ones(
    tmp_path, capsys, monkeypatch, name, line
):
    for where in ("src", "site-packages"):
        package = tmp_path / where / name
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "training.py").write_text(
            "from . import steps\nfrom .deep.of import it as train\n"
        )
        (package / "steps.py").touch()
        (package / "deep").mkdir()
        (package / "deep" / "of.py").write_text("from ..loops import it\n")
        (package / "loops.py").write_text("from edl import elastic\nit = None\n")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(f"{line}\nraise RuntimeError('it was run')\n")
    own = [
        sys.path[0],
        str(tmp_path / "site-packages"),
        *sys.path[1:],
    ]  # of which one is the script's
    monkeypatch.setattr(sys, "path", own)
    monkeypatch.setattr(sys, "argv", [])  # it becomes the script's
    assert main(["train.py"]) == 1
    assert "does not use the elastic loop" in capsys.readouterr().out
    own.insert(1, str(tmp_path / "src"))
    assert main(["train.py"]) == 1
    assert "it was run" in capsys.readouterr().out


def test_a_script_that_runs_as_a_module_is_told_how_and_found_then(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lib").mkdir()
    Path("lib", "sizes.py").touch()
    Path("lib", "train.py").write_text(
        "from . import sizes\nimport edl\nraise OSError('it was run')\n"
    )
    assert main(["lib/train.py"]) == 1
    assert "lines `import runpy; runpy.run_module('PACKAGE.SCRIPT', r" in capsys.readouterr().out
    Path("train.py").write_text(
        "import runpy\nrunpy.run_module('lib.train', run_name='__main__', alter_sys=True)\n"
    )
    assert main(["train.py"]) == 1
    assert "it was run" in capsys.readouterr().out


def test_a_script_keeps_all_variables_but_those_of_a_launcher(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ours = ["EDL_CHANNEL", "EDL_STAGE", "PADDLE_JOBSERVER", "PADDLE_TRAINER_ID", "RANK"]
    # A trainer has these, too: what a student needs, and what is the script's own.
    others = [
        "EDL_CHECKPOINTS", "EDL_TEACHER_TOKEN", "PADDLE_DISTILL_BALANCE_SERVER", "RANK_LOSS_WEIGHT"
    ]  # fmt: skip
    for name in ours + others:
        monkeypatch.setenv(name, "1")
    Path("train.py").write_text(
        f"import os\nimport edl\n"
        f"raise OSError([name for name in {ours + others} if name in os.environ])\n"
    )
    monkeypatch.setattr(sys, "argv", [])  # it becomes the script's
    assert main(["train.py"]) == 1
    assert f"OSError: {others}" in capsys.readouterr().out


def test_a_script_without_the_loop_is_not_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import helper\nraise RuntimeError('it was run')\n")
    Path("helper.py").write_text("import json\n")
    assert main(["train.py"]) == 1
    assert "train.py: it does not use the elastic loop: a change" in capsys.readouterr().out
    for wrong, text in (
        (["--shards", "1", "train.py"], "--shards: expected 2 or more, got 1"),
        (["gone.py"], "gone.py: there is no such file"),
        ([300 * "x"], "xxx: File name too long"),
    ):
        with pytest.raises(SystemExit) as left:
            main(wrong)
        assert left.value.code == 2
        assert text in capsys.readouterr().err
