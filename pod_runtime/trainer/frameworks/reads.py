"""See whether a script reads the tensors of a model: their values, a copy, a forward pass."""

import copy
import threading
from collections.abc import Callable, Iterable
from typing import Any

_PLACES = ("_parameters", "_buffers")  # of a layer, in both frameworks


class Reads:
    """Tells of the first read of a model's tensors while it watches.

    It stands in the layers' dicts of tensors, so it sees what goes through the model. A list of
    parameters that the script has made before is read unseen, and so is what another thread reads,
    which follows the training at its own time.
    """

    def __init__(self, layers: Callable[[], Iterable[Any]], tell: Callable[[], None]) -> None:
        """
        Args:
            layers: returns all layers of the model.
            tell: called before the tensors are read, once; nothing is watched any more.
        """
        self._layers, self._tell = layers, tell
        self._has_told = False
        self._thread = 0  # that has begun to watch
        self._watched: list[tuple[Any, str, dict[str, Any]]] = []

    def begin(self) -> None:
        """Watch until `end`."""
        if self._has_told or self._watched:
            return
        self._thread = threading.get_ident()
        for layer in self._layers():
            for place in _PLACES:
                own = vars(layer).get(place)
                if isinstance(own, dict) and own:
                    self._watched.append((layer, place, own))
                    vars(layer)[place] = _Watched(own, self._read)

    def end(self) -> None:
        """Leave the layers as they were."""
        for layer, place, own in self._watched:
            vars(layer)[place] = own
        self._watched = []

    def _read(self) -> None:
        if threading.get_ident() != self._thread:
            return
        watches = bool(self._watched)  # what was made meanwhile may have a dict of it still
        self.end()
        if watches and not self._has_told:
            self._has_told = True
            self._tell()


class _Watched(dict[str, Any]):
    """A dict that is told on before it is read or written to, and hands on to the real one."""

    def __init__(self, own: dict[str, Any], tell: Callable[[], None]) -> None:
        super().__init__(own)
        self._own, self._tell = own, tell

    def _told(self) -> dict[str, Any]:
        self._tell()
        return self._own

    def __getitem__(self, key: str) -> Any:
        return self._told()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._told()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._told()[key]

    def __iter__(self) -> Any:
        return iter(self._told())

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._told(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        own = self._told()
        return type(own), (list(own.items()),)

    def __or__(self, other: Any) -> Any:
        return self._told() | other

    def keys(self) -> Any:
        return self._told().keys()

    def values(self) -> Any:
        return self._told().values()

    def items(self) -> Any:
        return self._told().items()

    def get(self, key: str, default: Any = None) -> Any:
        return self._told().get(key, default)

    def pop(self, *args: Any) -> Any:
        return self._told().pop(*args)

    def update(self, *args: Any, **more: Any) -> None:
        self._told().update(*args, **more)

    def copy(self) -> Any:
        return self._told().copy()
