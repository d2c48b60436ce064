"""The names that scripts import: `from edl import ...`, beside the packages they live in."""

import ast
import importlib
import json
import subprocess
import sys
from typing import assert_type

import pytest

from edl import DistillReader, elastic
from pod_runtime.trainer.loop import loop
from tests.support import ROOT

PACKAGES = ("edl", "pod_runtime", "distill_reader")


def tables(package: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return where the names of a package come from: for type checkers, and when it runs."""
    path = ROOT / package / "__init__.py"
    (branch,) = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If))
    typed = {
        alias.asname or "": f"{node.module}.{alias.name}"
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    (table,) = (node for node in branch.orelse if isinstance(node, ast.Assign))
    used = {}
    for name, home in ast.literal_eval(table.value).items():
        module, attribute = home if isinstance(home, tuple) else (home, name)
        used[name] = module if attribute is None else f"{module}.{attribute}"
    return typed, used


@pytest.mark.parametrize(
    ("verb", "missing", "says"),
    [
        ("serve", "aiohttp", "edl serve: aiohttp is not here; pip install 'edl[distill]'"),
        ("check", "numpy", "edl check: numpy is not here; pip install 'edl[torch]', or 'edl[padd"),
        ("verify", "numpy", "edl verify: numpy is not here; pip install 'edl[torch]', or 'edl[pad"),
    ],
)
def test_a_verb_whose_packages_are_not_installed_names_the_extra(verb, missing, says):
    code = f"import sys; sys.modules[{missing!r}] = None\n"  # as if it were not installed
    code += f"from edl.__main__ import main\nsys.exit(main([{verb!r}]))"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith(says)


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_are_told_of_the_names_that_are_there(package: str):
    typed, used = tables(package)
    assert typed == used
    assert set(used) <= set(dir(importlib.import_module(package)))


def test_edl_has_all_names_of_the_packages_for_scripts():
    both = tables("pod_runtime")[1] | tables("distill_reader")[1]
    assert tables("edl")[1].keys() == both.keys()


def test_a_name_from_edl_is_that_of_its_package_with_its_type():
    assert elastic.Loop is loop.Loop
    reader = importlib.import_module("distill_reader.student.reader")
    assert DistillReader is reader.DistillReader
    assert_type(DistillReader(ins=["image"], predicts=["score"]).set_timeout(1.0), DistillReader)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_name_that_is_not_there_is_an_attribute_error(package: str):
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Lop'"):
        importlib.import_module(package).Lop  # noqa: B018  reading it is the test


def test_importing_edl_loads_nothing_else():
    code = "import sys, json; old = set(sys.modules); import edl; "
    code += "print(json.dumps(sorted(set(sys.modules) - old)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert loaded & {"numpy", "paddle", "torch", "flask", "pod_runtime", "distill_reader"} == set()


def test_the_programs_of_the_command_start_where_there_is_no_framework():
    code = "import sys, importlib; sys.modules |= {'paddle': None, 'torch': None}\n"
    code += "from edl.__main__ import VERBS\n"
    code += "for module, _ in VERBS.values(): importlib.import_module(module)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
