"""The student's framework, PyTorch or Paddle: found by its tensors, and imported only then."""

import importlib.util
import sys
from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np

from distill_reader.errors import UsageError
from distill_reader.model.tensors import rebuilt

Framework = Literal["paddle", "torch"]

# What both have. Paddle takes uint16 for bfloat16; texts and objects are no tensors.
_TYPES = frozenset(
    {
        "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
        "complex64", "complex128",
    }
)  # fmt: skip


class TensorFunctions(Protocol):
    """What the two frameworks call differently. Axes are the last one."""

    def from_array(self, array: Any) -> Any:
        """Return a numpy array as a tensor; it may share the memory."""
        ...

    def precise(self, logits: Any) -> Any:
        """Return logits in a precision in which exponentials neither overflow nor vanish."""
        ...

    def log_softmax(self, logits: Any) -> Any:
        """Return log(softmax), exact for small shares, too; -inf where the logit is."""
        ...

    def fixed(self, values: Any, like: Any) -> Any:
        """Return values in the type of `like`, without a gradient."""
        ...

    def places(self, indices: Any) -> Any:
        """Return indices in the type that `take` takes."""
        ...

    def is_eager(self, values: Any) -> bool:
        """Return whether it is a tensor whose values can be looked at now: nothing is traced."""
        ...

    def is_any_below(self, values: Any, bound: float) -> bool:
        """Return whether a value is below `bound`; False if that cannot be told."""
        ...

    def are_shares(self, values: Any, tolerance: float) -> bool:
        """Return whether all rows are probabilities; False if that cannot be told."""
        ...

    def take(self, values: Any, indices: Any) -> Any:
        """Return the values at these indices."""
        ...

    def where(self, condition: Any, values: Any) -> Any:
        """Return the values where the condition holds, else 0."""
        ...

    def cross_entropy(self, logits: Any, labels: Any) -> Any:
        """Return the mean cross entropy against class indices, (B, C) and (B,)."""
        ...


def functions_of(tensor: Any) -> TensorFunctions:
    """Return the functions of the framework of this tensor. Raises: TypeError."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        from distill_reader.student.labels import torch_functions

        return torch_functions
    check_tensor("student_logits", tensor)
    from distill_reader.student.labels import paddle_functions

    return paddle_functions


def check_tensor(name: str, value: Any) -> None:
    """Refuse what is no framework's tensor; also a variable of a static graph is one."""
    if not hasattr(value, "detach"):
        raise TypeError(
            f"{name}: expected a tensor of PyTorch or Paddle, got {type(value).__name__}; "
            "DistillReader.set_tensors makes them of what teachers say"
        )


def check_framework(framework: str) -> None:
    """Raises: UsageError, if there is no such framework, or none here."""
    if framework not in ("paddle", "torch"):
        raise UsageError(f"tensors: expected 'torch', 'paddle' or None, got {framework!r}")
    if importlib.util.find_spec(framework) is None:
        raise UsageError(
            f"tensors: {framework!r} is not installed here: pip install 'edl[{framework}]'"
        )


def tensor_maker(framework: Framework) -> Callable[[Any], Any]:
    """Return a function that makes tensors of the arrays and numpy numbers in an item.

    It goes into lists, tuples and dicts; all else stays as it is: tensors, texts, None.
    """
    from_array = _functions(framework).from_array

    def convert(value: Any) -> Any:
        if isinstance(value, np.ndarray | np.generic):
            return from_array(np.asarray(value)) if value.dtype.name in _TYPES else value
        return rebuilt(value, convert)

    return convert


def _functions(framework: Framework) -> TensorFunctions:
    if framework == "torch":
        from distill_reader.student.labels import torch_functions

        return torch_functions
    from distill_reader.student.labels import paddle_functions

    return paddle_functions
