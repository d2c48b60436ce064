"""Read the YAML of users' files as people mean it.

YAML 1.1 reads 2:30 as 150, 010 as 8 and `on` as true, and takes the last of two equal keys.
"""

import math
import re
from collections.abc import Collection
from typing import Any

import yaml

from job_server.api.codec import WireError

_STR, _INT, _FLOAT, _BOOL, _TIME = (
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "timestamp")
)
_MISREAD = re.compile(r".*:|[-+]?0[0-9_]+\Z")  # base 60, and base 8


class _Loader(yaml.SafeLoader):
    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        is_misread = kind is yaml.ScalarNode and tag in (_INT, _FLOAT) and _MISREAD.match(value)
        return _STR if is_misread else tag

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse a key that comes twice. Not later: by then `<<` has added others' keys."""
        node = super().compose_mapping_node(anchor)
        found: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in found:
                    text = f"the key {key.value!r} comes twice; leave out one of them"
                    raise yaml.MarkedYAMLError(problem=text, problem_mark=key.start_mark)
                found.add(key.value)
        assert isinstance(node, yaml.MappingNode)
        return node


def load_yaml(text: str, lists: Collection[str] | None = ()) -> Any:
    """Return what a text holds.

    Args:
        lists: keys, at any depth, in whose lists a value that another text would stand for is a
            text, as it is written: 1.10, 0x1F, on. None: of all keys.

    Raises:
        WireError: it is not YAML; the text names the line.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            if lists is None or lists:
                _keep_texts(loader, node, lists)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise WireError(f"line {line}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise WireError(f"not YAML: {error}") from None


def _keep_texts(loader: _Loader, node: yaml.Node, lists: Collection[str] | None) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for number, (key, value) in enumerate(node.value):
        if isinstance(value, yaml.SequenceNode) and (lists is None or key.value in lists):
            # In place of what stands there, not into it: by an alias it may stand elsewhere, too.
            texts = [_as_written(loader, each) for each in value.value]
            kept = yaml.SequenceNode(value.tag, texts, value.start_mark, value.end_mark)
            node.value[number] = (key, kept)
        else:
            _keep_texts(loader, value, lists)


def _as_written(loader: _Loader, node: yaml.Node) -> yaml.Node:
    if not isinstance(node, yaml.ScalarNode) or _is_as_written(loader, node):
        return node
    return yaml.ScalarNode(_STR, node.value, node.start_mark, node.end_mark)


def _is_as_written(loader: _Loader, node: yaml.ScalarNode) -> bool:
    """Return whether the value, as an argument of a script, is the text that stands there."""
    if node.tag == _BOOL:
        return node.value.lower() in ("true", "false")
    if node.tag in (_INT, _FLOAT):
        number = loader.yaml_constructors[node.tag](loader, node)
        is_finite = isinstance(number, int) or math.isfinite(number)
        return not is_finite or str(number) == node.value  # no script reads .inf
    return bool(node.tag != _TIME)
