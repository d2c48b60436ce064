"""Writes the same small models in each format; run as a program, since a process has one format.

python -m tests.distill_reader.teacher.paddle_models FOLDER KIND ...
"""

import os
import subprocess
import sys
from pathlib import Path

KINDS = ("paddle3", "paddle2", "fixed", "open", "one_x", "one_x_params")


def write(folder: Path, kinds: tuple[str, ...] = KINDS) -> None:
    """Write each model to a folder of its kind's name; a process for each version's format."""
    old = tuple(kind for kind in kinds if kind == "paddle2")
    for some, flag in ((old, "0"), (tuple(kind for kind in kinds if kind not in old), "1")):
        if some:
            subprocess.run(
                [sys.executable, "-m", __name__, str(folder), *some],
                env={
                    **os.environ,
                    "FLAGS_enable_pir_api": flag,
                    "PYTHONWARNINGS": "ignore",
                    "GLOG_minloglevel": "2",
                    "OMP_NUM_THREADS": "1",
                },
                check=True,
                timeout=100,
            )


def main(folder: Path, kinds: list[str]) -> None:
    import paddle
    from paddle.static import InputSpec

    class Image(paddle.nn.Layer):
        """image (N, 1, 8, 8) -> logits (N, 5), probabilities (N, 5)"""

        def __init__(self) -> None:
            super().__init__()
            self.conv = paddle.nn.Conv2D(1, 3, 3)
            self.last = paddle.nn.Linear(3 * 6 * 6, 5)

        def forward(self, image):
            hidden = paddle.nn.functional.relu(self.conv(image)).flatten(1)
            logits = self.last(hidden)
            return logits, paddle.nn.functional.softmax(logits)

    class Words(paddle.nn.Layer):
        """ids (N, ?) int64, mask (N, ?) bool -> scores (N, 3), count (N, 1) int64"""

        def __init__(self) -> None:
            super().__init__()
            self.table = paddle.nn.Embedding(100, 8)
            self.last = paddle.nn.Linear(8, 3)

        def forward(self, ids, mask):
            hidden = self.table(ids) * mask.astype("float32").unsqueeze(-1)
            return self.last(hidden.sum(1)), mask.astype("int64").sum(1, keepdim=True)

    for kind in kinds:
        path = folder / kind
        path.mkdir(parents=True, exist_ok=True)
        paddle.seed(3)
        if kind in ("paddle3", "paddle2", "fixed"):
            layer = Image()
            layer.eval()
            batch = 4 if kind == "fixed" else None
            paddle.jit.save(
                layer, str(path / "m"), input_spec=[InputSpec([batch, 1, 8, 8], "float32", "image")]
            )
            np_save(path, layer)
        elif kind == "open":
            layer = Words()
            layer.eval()
            specs = [
                InputSpec([None, None], "int64", "ids"),
                InputSpec([None, None], "bool", "mask"),
            ]
            paddle.jit.save(layer, str(path / "m"), input_spec=specs)
        else:
            write_1x(path, has_params_file=kind == "one_x_params")


def np_save(path: Path, layer) -> None:
    """Keep one input and what the layer itself makes of it."""
    import numpy as np
    import paddle

    image = np.random.default_rng(0).normal(size=(10, 1, 8, 8)).astype(np.float32)
    logits, probabilities = layer(paddle.to_tensor(image))
    target = path.parent / f"{path.name}.npz"
    np.savez(target, image=image, logits=logits.numpy(), probabilities=probabilities.numpy())


def write_1x(path: Path, *, has_params_file: bool) -> None:
    """Write x (N, 13) -> price (N, 1) as Paddle 1.x did: a `__model__` file and parameters."""
    import numpy as np
    import paddle
    from paddle import static
    from paddle.pir_utils import OldIrGuard

    paddle.enable_static()
    with OldIrGuard():
        main_program, startup = static.Program(), static.Program()
        with static.program_guard(main_program, startup):
            x = static.data("x", [None, 13], "float32")
            price = static.nn.fc(x, 1)
        executor = static.Executor(paddle.CPUPlace())
        executor.run(startup)
        rows = np.random.default_rng(1).normal(size=(10, 13)).astype(np.float32)
        (expected,) = executor.run(main_program, feed={"x": rows}, fetch_list=[price])
        np.savez(path.parent / f"{path.name}.npz", x=rows, price=expected)
        program = static.normalize_program(main_program, [x], [price])
        (path / "__model__").write_bytes(static.serialize_program([x], [price], program=program))
        if has_params_file:
            content = static.serialize_persistables([x], [price], executor, program=program)
            (path / "__params__").write_bytes(content)
        else:
            variables = [
                variable
                for variable in program.list_vars()
                if variable.persistable and variable.name not in ("feed", "fetch")
            ]
            static.io.save_vars(executor, str(path), main_program=program, vars=variables)
    paddle.disable_static()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
