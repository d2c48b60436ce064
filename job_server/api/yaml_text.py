"""Read the YAML of users' files as people mean it.

YAML 1.1 reads 2:30 as 150, 010 as 8 and `on` as true, and takes the last of two equal keys.
"""

import math
import re
from collections.abc import Collection
from typing import Any

import yaml

from job_server.api.codec import WireError

_STR, _INT, _FLOAT, _BOOL, _TIME, _MERGE, _VALUE = (
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "int", "float", "bool", "timestamp", "merge", "value")
)
_MISREAD = re.compile(r".*:|[-+]?0[0-9_]+\Z")  # base 60, and base 8


class Written(str):
    """A value that is kept as the text that stands there."""

    read: Any  # what YAML 1.1 takes it for


class _WrittenNode(yaml.ScalarNode):
    read: Any


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

    def construct_text(self, node: yaml.ScalarNode) -> str:
        text: str = self.construct_scalar(node)
        if isinstance(node, _WrittenNode):
            text = Written(text)
            text.read = node.read
        return text


_Loader.add_constructor(_STR, _Loader.construct_text)


def load_yaml(text: str, lists: Collection[str] | None = ()) -> Any:
    """Return what a text holds.

    Args:
        lists: keys, at any depth, in whose lists a value that another text would stand for is a
            text (Written), as it is written: 1.10, 0x1F, on. None: of all keys.

    Raises:
        WireError: it is not YAML; the text names the line.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
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
    if not isinstance(node, yaml.ScalarNode) or isinstance(node, _WrittenNode):
        return node
    tag = node.tag
    if tag == _STR and node.style is None and _MISREAD.match(node.value):
        tag = yaml.SafeLoader.resolve(loader, yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
    read: Any = node.value
    if tag in (_BOOL, _INT, _FLOAT):
        read = loader.yaml_constructors[tag](loader, node)
    if not _differs(tag, read, node.value):
        return node
    kept = _WrittenNode(_STR, node.value, node.start_mark, node.end_mark)
    kept.read = read
    return kept


def _differs(tag: str, read: Any, text: str) -> bool:
    """Return whether a value, as an argument of a script, is another text than stands there."""
    if tag == _BOOL:
        return text.lower() not in ("true", "false")
    if tag in (_INT, _FLOAT):
        is_finite = isinstance(read, int) or math.isfinite(read)
        return is_finite and str(read) != text  # no script reads .inf
    return tag in (_TIME, _MERGE, _VALUE)  # the last two, << and =, mean something as keys only
