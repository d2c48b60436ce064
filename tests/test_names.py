"""Each public class has a name of its own, so that readers know which one is meant."""

import ast
from collections import defaultdict

from tests.support import ROOT

PRODUCT = (
    "job_server", "job_client", "pod_runtime", "distill_reader", "k8s_controller", "search", "edl",
)  # fmt: skip

# Names that several classes still share. Take out what you make unique; add none.
SHARED = {
    "BadRequest",
    "UsageError",
}


def _modules_by_class() -> dict[str, list[str]]:
    found = defaultdict(list)
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(str(path.relative_to(ROOT)))
    return found


def test_no_two_public_classes_share_a_name():
    modules = _modules_by_class()
    shared = {name: where for name, where in modules.items() if len(where) > 1}
    assert {name: shared[name] for name in shared.keys() - SHARED} == {}
    assert not SHARED - shared.keys(), "these names are unique now: take them out of SHARED"
