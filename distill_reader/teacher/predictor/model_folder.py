"""Find the model in a folder, and read its inputs and outputs.

The folder may be of Paddle 3 (`x.json` and `x.pdiparams`), Paddle 2 (`x.pdmodel` and `x.pdiparams`)
or Paddle 1.x (`__model__` with `__params__`, or with a file per parameter). A config file of Paddle
Serving beside them gives the tensors aliases.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distill_reader.errors import ModelError, UsageError
from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.protocols.prototxt import SERVER_FILES, ModelConfig, ServedVariable, read_config
from distill_reader.teacher.predictor.model_program import (
    ModelProgram,
    ProgramVariable,
    missing_bytes,
    read_program,
)

_PROGRAM_NAMES = ("__model__",)
_PROGRAM_SUFFIXES = (".json", ".pdmodel")
_PARAMS_NAMES = ("__params__", "params")
_PARAMS_SUFFIXES = (".pdiparams",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The files of a model."""

    folder: Path
    program: Path
    params: Path | None  # None: one file per parameter, beside the program
    config: ModelConfig | None  # None: no Paddle Serving config, so tensors have no aliases

    @property
    def paths(self) -> list[Path]:
        """The files of program and parameters."""
        if self.params is not None:
            return [self.program, self.params]
        # One file per parameter, with names that only the program knows: take all files.
        return sorted(path for path in self.folder.iterdir() if path.is_file())

    @property
    def is_pir(self) -> bool:
        """Whether Paddle 3 exported it."""
        return self.program.suffix == ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The inputs and outputs of a model, and its batch size."""

    spec: ModelSpec
    batch: int | None  # the fixed length of axis 0; None: any number of samples


def find_model(
    folder: str | Path, *, model_filename: str | None = None, params_filename: str | None = None
) -> ModelFiles:
    """Find the one model in `folder`.

    Args:
        model_filename: the program file, where several could be meant; None: find it.
        params_filename: its parameters; None: find them.

    Raises:
        ModelError: there is none, or several could be meant; lists them.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder}: is no folder; name the folder that has the model's files")
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if (folder / "key").exists() and (folder / "encrypt_model").exists():
        raise ModelError(f"{folder}: the model is encrypted; encrypted models cannot be served")
    program = _find_program(folder, files, model_filename)
    params = _find_params(folder, files, program, params_filename)
    config_file = folder / SERVER_FILES[0]
    if not config_file.exists() and (folder / SERVER_FILES[1]).exists():
        config_file = folder / SERVER_FILES[1]
    try:
        config = read_config(config_file) if config_file.exists() else None
    except UsageError as error:
        raise ModelError(str(error)) from error
    return ModelFiles(folder=folder, program=program, params=params, config=config)


def check_room(folder: str | Path, names: Iterable[str], *, besides: Collection[str] = ()) -> None:
    """See that with files of these names a folder holds one model; there may be no folder yet.

    Args:
        besides: files that will be gone.

    Raises:
        ModelError: several could be meant then; lists them.
    """
    folder = Path(folder)
    found = folder.iterdir() if folder.is_dir() else ()
    there = [each for each in found if each.is_file() and each.name not in besides]
    files = sorted({*there, *(folder / name for name in names)})
    _find_params(folder, files, _find_program(folder, files, None), None)


def check_whole(files: ModelFiles) -> None:
    """See that no file of parameters ends in its last tensor, as one does that is copied in part.

    Paddle would load it, and compute with whatever the memory holds there.

    Raises:
        ModelError: one does, or cannot be read; names it.
    """
    for path in files.paths:
        if path == files.program:
            continue
        try:
            missing = missing_bytes(path)
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror}") from error
        if missing:
            raise ModelError(
                f"{path}: is cut off: its last tensor lacks {missing} bytes; copy the model into "
                "its folder again"
            )


def read_signature(files: ModelFiles, name: str) -> Signature:
    """Return the signature of the model, under the name `name`.

    Raises:
        ModelError: a tensor cannot be served; names it, the reason and the remedy.
    """
    return make_signature(read_program(files.program), files.config, name, str(files.program))


def make_signature(
    program: ModelProgram, config: ModelConfig | None, name: str, where: str
) -> Signature:
    """Combine the program's tensors with the aliases of the config. Pure.

    Raises:
        ModelError: see `read_signature`.
    """
    feeds = _choose(program.inputs, config.feeds if config else None, "input", where)
    fetches = _choose(program.outputs, config.fetches if config else None, "output", where)
    if len(feeds) < len(program.inputs):
        left = {variable.name for variable in program.inputs} - {feed.name for feed, _ in feeds}
        raise ModelError(f"{where}: the config feeds nothing to input {min(left)!r}; add it")
    for _, served in feeds:
        if served is not None and served.is_lod:
            raise ModelError(
                f"{where}: input {served.name!r} is a LoD tensor (rows of different lengths); "
                "export the model with a padded input instead"
            )
    return Signature(
        spec=ModelSpec(
            name=name,
            inputs=tuple(_tensor(*pair, "input", where) for pair in feeds),
            outputs=tuple(_tensor(*pair, "output", where) for pair in fetches),
        ),
        batch=_fixed_batch([feed for feed, _ in feeds], [fetch for fetch, _ in fetches], where),
    )


def _find_program(folder: Path, files: Sequence[Path], name: str | None) -> Path:
    if name is not None:
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name}: no such file; it should hold the model's program")
        return folder / name
    found = [
        path for path in files if path.suffix in _PROGRAM_SUFFIXES or path.name in _PROGRAM_NAMES
    ]
    # There may be other .json files, such as a tokenizer's. The model's has parameters.
    if len(found) > 1:
        with_params = [path for path in found if path.with_suffix(".pdiparams") in files]
        found = with_params or found
    if not found:
        raise ModelError(
            f"{folder}: holds no model; expected a .json or .pdmodel file with its .pdiparams, "
            "or a __model__ file"
        )
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ModelError(f"{folder}: holds several models ({names}); give each a folder of its own")
    return found[0]


def _find_params(
    folder: Path, files: Sequence[Path], program: Path, name: str | None
) -> Path | None:
    if name is not None:
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name}: no such file; it should hold the parameters")
        return folder / name
    if program.suffix and (own := program.with_suffix(".pdiparams")) in files:
        return own
    found = [
        path for path in files if path.suffix in _PARAMS_SUFFIXES or path.name in _PARAMS_NAMES
    ]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ModelError(f"{folder}: several files could hold the parameters ({names}); keep one")
    if not found and program.suffix:
        raise ModelError(f"{folder}: {program.name} has no parameters beside it (.pdiparams)")
    return found[0] if found else None


def _choose(
    variables: Sequence[ProgramVariable],
    served: Sequence[ServedVariable] | None,
    kind: str,
    where: str,
) -> list[tuple[ProgramVariable, ServedVariable | None]]:
    if served is None:
        return [(variable, None) for variable in variables]
    by_name = {variable.name: variable for variable in variables}
    for item in served:
        if item.name not in by_name:
            raise ModelError(
                f"{where}: the config names {kind} {item.name!r}, the model has "
                f"{', '.join(by_name)}; write the config again (python -m distill_reader.convert)"
            )
    return [(by_name[item.name], item) for item in served]


def _tensor(
    variable: ProgramVariable, served: ServedVariable | None, kind: str, where: str
) -> TensorSpec:
    try:
        kind_of = np.dtype(variable.dtype).kind
    except TypeError:
        kind_of = "V"
    # Other packages add names such as bfloat16 to numpy; no protocol here has them.
    if kind_of not in "biufc":
        raise ModelError(
            f"{where}: {kind} {variable.name!r} is {variable.dtype}, which cannot be sent; "
            "cast it in the model (to float32)"
        )
    if not variable.shape:
        raise ModelError(
            f"{where}: {kind} {variable.name!r} is a scalar; every tensor needs an axis 0 "
            "that counts samples"
        )
    return TensorSpec(
        name=served.alias if served is not None else variable.name,
        dtype=variable.dtype,
        shape=tuple(-1 if length < 0 else length for length in variable.shape[1:]),
        variable=variable.name,
    )


def _fixed_batch(
    inputs: Sequence[ProgramVariable], outputs: Sequence[ProgramVariable], where: str
) -> int | None:
    fixed = {variable.shape[0] for variable in inputs if variable.shape[0] >= 0}
    if not fixed:
        return None
    batch = min(fixed)
    for variable in (*inputs, *outputs):
        if variable.shape[0] not in (-1, batch) or batch == 0:
            raise ModelError(
                f"{where}: {variable.name!r} has {variable.shape[0]} rows where another tensor "
                f"has {batch}; export the model with axis 0 left open "
                "(InputSpec([None, ...])), as the axis that counts samples"
            )
    return batch
