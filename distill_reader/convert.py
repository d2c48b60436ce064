"""Make a servable folder from an inference model: the model and its Paddle Serving config files.

As a command, for any inference model that Paddle exported:

    python -m distill_reader.convert --dirname D [--serving_server DIR] [--serving_client DIR]

In Python, for a layer: `save_servable`.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from distill_reader.command_line import report_error
from distill_reader.errors import DistillError, UsageError
from distill_reader.model.normalization import (
    Normalization,
    check_inputs,
    parse_option,
    read_folder,
    write_folder,
)
from distill_reader.protocols.prototxt import (
    CLIENT_FILES,
    SERVER_FILES,
    ModelConfig,
    ServedVariable,
    config_of,
    to_text,
    write_config,
)
from distill_reader.teacher.predictor.model_folder import (
    check_room,
    find_model,
    make_signature,
    read_signature,
)
from distill_reader.teacher.predictor.model_program import read_program

_MODEL_NAME = "model"  # base name of the files that save_servable writes
_MODEL_SUFFIXES = (".json", ".pdmodel", ".pdiparams", ".pdiparams.info")  # of any version of Paddle


def convert(
    dirname: str | Path,
    serving_server: str | Path,
    serving_client: str | Path,
    *,
    model_filename: str | None = None,
    params_filename: str | None = None,
    feed_alias_names: Sequence[str] = (),
    fetch_alias_names: Sequence[str] = (),
    normalizations: Mapping[str, Normalization] | None = None,
) -> ModelConfig:
    """Copy the model in `dirname` to `serving_server` and write the config files for both sides.

    Args:
        serving_server: new or existing folder; files of the same names are replaced. It must not
            hold another model.
        serving_client: folder for the two config files that Paddle Serving's clients read.
        model_filename, params_filename: the model's files, if there are several.
        feed_alias_names: what clients call the inputs, in the order of the exported model; empty:
            the model's own names.
        fetch_alias_names: what clients call the outputs.
        normalizations: how the teacher converts raw uint8 pixels to floats, by alias of the input;
            None: as in the folder `dirname`, if it says.

    Returns:
        The content of the config files.

    Raises:
        ModelError: there is no model, or it cannot be served.
        UsageError: there are too many, too few or equal aliases, or Paddle Serving lacks a type.
    """
    files = find_model(dirname, model_filename=model_filename, params_filename=params_filename)
    before = {} if files.config is None else {each.alias: each.name for each in files.config.feeds}
    files = replace(files, config=None)  # ignore a config that is there already
    config = config_of(read_signature(files, files.folder.name).spec)
    config = ModelConfig(
        feeds=_with_aliases(config.feeds, feed_alias_names, "feed_alias_names"),
        fetches=_with_aliases(config.fetches, fetch_alias_names, "fetch_alias_names"),
    )
    served = make_signature(read_program(files.program), config, "", str(files.program)).spec
    used = normalizations
    if used is None:  # what the folder says calls inputs as its own config does
        aliases = {each.name: each.alias for each in config.feeds}
        kept = {before.get(name, name): each for name, each in read_folder(files.folder).items()}
        used = {aliases.get(name, name): each for name, each in kept.items()}
    used = check_inputs(used, served.inputs)
    server, client = Path(serving_server), Path(serving_client)
    check_room(server, [path.name for path in files.paths])  # before a model there is spoiled
    server.mkdir(parents=True, exist_ok=True)
    client.mkdir(parents=True, exist_ok=True)
    for path in files.paths:
        if path.parent.resolve() != server.resolve():
            shutil.copyfile(path, server / path.name)
    write_config(config, server, SERVER_FILES)
    write_config(config, client, CLIENT_FILES)
    write_folder(server, used)
    return config


def save_servable(
    layer: Any,
    input_spec: Sequence[Any],
    folder: str | Path,
    *,
    client_folder: str | Path | None = None,
    feed_alias: Sequence[str] = (),
    fetch_alias: Sequence[str] = (),
    normalizations: Mapping[str, Normalization] | None = None,
) -> ModelConfig:
    """Export a layer with `paddle.jit.save`, and write the config files that make it servable.

    To serve probabilities, the layer must end with a softmax; wrap it if it does not.

    Args:
        layer: in evaluation mode (`layer.eval()`).
        input_spec: an `InputSpec` per argument of `forward`. Axis 0 is None: it counts samples.
        folder: created if needed. Paddle's version decides: `model.json` or `model.pdmodel`.
        client_folder: folder for the clients' config files; None: `folder`.
        feed_alias: what clients call the inputs; empty: the names of `input_spec`.
        fetch_alias: what clients call the outputs, in the order in which `forward` returns them
            (Paddle sorts a dict by key); empty: Paddle's names.
        normalizations: how the teacher converts raw uint8 pixels to floats, by input; None: it
            accepts floats only.

    Raises:
        ModelError, UsageError: as `convert`; UsageError if `layer` is in training mode, or has
            no parameters.
    """
    import paddle

    if any(getattr(part, "training", False) for part in layer.sublayers(include_self=True)):
        raise UsageError("the layer is in training mode; call layer.eval() before saving it")
    if not layer.state_dict():
        raise UsageError("the layer has no parameters: Paddle writes none, and teachers want some")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    own = [f"{_MODEL_NAME}{suffix}" for suffix in _MODEL_SUFFIXES]
    check_room(folder, (f"{_MODEL_NAME}.json", f"{_MODEL_NAME}.pdiparams"), besides=own)
    # The model that is there stays until the new one is whole and all arguments fit it.
    with tempfile.TemporaryDirectory(prefix="saving-", dir=folder) as draft:
        paddle.jit.save(layer, str(Path(draft, _MODEL_NAME)), input_spec=list(input_spec))
        place = partial(
            convert,
            draft,
            feed_alias_names=feed_alias,
            fetch_alias_names=fetch_alias,
            normalizations=normalizations or {},
        )
        place(draft, draft)
        for name in own:
            (folder / name).unlink(missing_ok=True)
        return place(folder, folder if client_folder is None else client_folder)


def _with_aliases(
    variables: Sequence[ServedVariable], aliases: Sequence[str], what: str
) -> tuple[ServedVariable, ...]:
    if not aliases:
        return tuple(variables)
    names = ", ".join(variable.name for variable in variables)
    if len(aliases) != len(variables):
        raise UsageError(
            f"{what}: got {len(aliases)} ({', '.join(aliases)}), the model has "
            f"{len(variables)} ({names}); name each, in this order"
        )
    twice = {alias for alias in aliases if aliases.count(alias) > 1}
    if twice or not all(aliases):
        raise UsageError(f"{what}: {min(twice, default='')!r} must be unique and not empty")
    return tuple(
        replace(variable, alias=alias) for variable, alias in zip(variables, aliases, strict=True)
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m distill_reader.convert",
        description="Make a servable folder from an inference model that Paddle exported.",
    )
    parser.add_argument("--dirname", required=True, help="folder of the model")
    parser.add_argument("--model_filename", help="its program file, if there are several")
    parser.add_argument("--params_filename", help="its parameter file, if there are several")
    parser.add_argument(
        "--serving_server", default="serving_server", help="servable folder to write [%(default)s]"
    )
    parser.add_argument(
        "--serving_client",
        default="serving_client",
        help="folder for the clients' config files [%(default)s]",
    )
    parser.add_argument(
        "--feed_alias_names", default="", help="what clients call the inputs: A,B in their order"
    )
    parser.add_argument(
        "--fetch_alias_names", default="", help="what clients call the outputs: A,B in their order"
    )
    parser.add_argument(
        "--normalize",
        nargs="+",
        default=None,
        metavar="INPUT:KEY=VALUE:...",
        help="make the teacher accept raw uint8 pixels for this input, too: (pixel * scale - mean) "
        "/ std; keys as in `edl serve --normalize`",
    )
    parser.add_argument("--show_proto", action="store_true", help="print the config")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 2 if an argument or the model is wrong."""
    args = _parser().parse_args(arguments)
    try:
        config = convert(
            args.dirname,
            args.serving_server,
            args.serving_client,
            model_filename=args.model_filename,
            params_filename=args.params_filename,
            feed_alias_names=_split(args.feed_alias_names),
            fetch_alias_names=_split(args.fetch_alias_names),
            normalizations=_normalizations(args.normalize),
        )
    except (DistillError, OSError) as error:
        return report_error("convert", error)
    if args.show_proto:
        sys.stdout.write(to_text(config))
    sys.stdout.write(f"servable: {args.serving_server}; for its clients: {args.serving_client}\n")
    return 0


def _normalizations(options: Sequence[str] | None) -> dict[str, Normalization] | None:
    if options is None:
        return None
    found = {}
    for option in options:
        model, name, normalization = parse_option(option)
        if model or name in found:
            raise UsageError(f"--normalize {option}: name each input once, without a model")
        found[name] = normalization
    return found


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",")) if names.strip() else ()


if __name__ == "__main__":
    sys.exit(main())
