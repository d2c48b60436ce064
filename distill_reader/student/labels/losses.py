"""Losses of a student that learns from soft labels, after Hinton, Vinyals and Dean.

"Distilling the Knowledge in a Neural Network", 2015, arXiv 1503.02531. All losses are scalars:
means over samples, differentiable in the student's logits. The teacher's tensors have no gradient.
All tensors are of the student's framework, PyTorch or Paddle, and on one device.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from distill_reader.student.labels.frameworks import TensorFunctions, check_tensor, functions_of

Tensor = Any  # of PyTorch or of Paddle
# Values and indices of the top k, (..., k) each, as `set_top_k(dense=False)` yields them.
TopTensors = tuple[Tensor, Tensor]

_NO_SHARE = 1e-30  # Paddle's exp(-inf) is not 0 everywhere
_LEAST_SHARE = -0.01  # what is below it is no rounded probability
_SUM_TOLERANCE = 2e-3  # of probabilities that came in half precision
_LOOKS = 8  # so many tensors of teachers are looked at
_looked = itertools.count()  # how many were


def soft_cross_entropy(student_logits: Tensor, soft_labels: Tensor | TopTensors) -> Tensor:
    """Return the cross entropy of the student's softmax against the teacher's.

    Its gradient in the logits is (softmax(student_logits) - soft_labels) / samples: that of
    `kl_divergence` at temperature 1, from which it differs by the teacher's entropy.

    Args:
        student_logits: (..., C) float, before softmax; C > 1.
        soft_labels: (..., C) float, each row sums to 1. Or (values, indices) of the largest: the
            rest of the sum of 1 is spread evenly over the other classes.

    Raises:
        ValueError: shapes disagree, or `soft_labels` are logits.
        TypeError: something is no tensor, as numpy's arrays are not.
    """
    f = functions_of(student_logits)
    _check_classes(student_logits)
    log_shares = f.log_softmax(f.precise(student_logits))
    if isinstance(soft_labels, tuple | list):
        top, indices = _checked_top(f, student_logits, soft_labels)
        _check_no_logits(f, top)
        return _top_cross_entropy(f, log_shares, top, indices)
    _check_same_shape(student_logits, "soft_labels", soft_labels)
    _check_no_logits(f, soft_labels)
    return -_expected(f, f.fixed(soft_labels, log_shares), log_shares).mean()


def kl_divergence(
    student_logits: Tensor, teacher_logits: Tensor | TopTensors, *, temperature: float = 1.0
) -> Tensor:
    """Return the divergence of the student's softmax from the teacher's, both at `temperature`.

    Hinton et al., section 2: times temperature**2, so that the gradient does not shrink as the
    temperature grows, and keeps its weight compared with a loss against labels.

    Args:
        student_logits: (..., C) float, before softmax; C > 1.
        teacher_logits: (..., C) float, before softmax. Or (values, indices) of the largest: the
            teacher's probabilities of the other classes count as 0.
        temperature: > 0; above 1 the small shares count more.

    Raises:
        ValueError: shapes disagree, `temperature` <= 0, or `teacher_logits` are probabilities.
        TypeError: something is no tensor, as numpy's arrays are not.
    """
    _check_temperature(temperature)
    f = functions_of(student_logits)
    _check_classes(student_logits)
    log_shares = f.log_softmax(f.precise(student_logits) / temperature)
    if isinstance(teacher_logits, tuple | list):
        teacher_logits, indices = _checked_top(f, student_logits, teacher_logits)
        log_shares = f.take(log_shares, indices)
    else:
        _check_same_shape(student_logits, "teacher_logits", teacher_logits)
        _check_no_shares(f, teacher_logits)
    wanted = f.log_softmax(f.fixed(teacher_logits, log_shares) / temperature)
    return _expected(f, wanted.exp(), wanted - log_shares).mean() * temperature**2


def distillation_loss(
    student_logits: Tensor,
    soft_labels: Tensor | TopTensors,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    alpha: float = 0.5,
) -> Tensor:
    """Mix the loss against the teacher with the loss against the true labels.

    Args:
        student_logits: (B, C) float, before softmax.
        soft_labels: (B, C) float, each row sums to 1; the teacher's softmax at `temperature`.
            Or (values, indices), see `soft_cross_entropy`.
            Of a teacher that serves logits: `softmax(logits / temperature)`.
        labels: (B,) or (B, 1) int64 class indices in [0, C).
        temperature: > 0; the value the teacher used. Scales the soft term by temperature**2,
            so that its gradient does not shrink as the temperature grows.
        alpha: weight of the soft term, in [0, 1]; 0 ignores the teacher, 1 the labels.

    Returns:
        Scalar mean over the batch, on the device of `student_logits`.

    Raises:
        ValueError: shapes disagree, `temperature` <= 0, `alpha` is not in [0, 1], or `soft_labels`
            are logits.
        TypeError: something is no tensor, as numpy's arrays are not.
    """
    _check_temperature(temperature)
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha: expected a weight in [0, 1], got {alpha}")
    f = functions_of(student_logits)
    check_tensor("labels", labels)
    batch = list(student_logits.shape[:1])
    if student_logits.ndim != 2 or list(labels.shape) not in (batch, [*batch, 1]):
        raise ValueError(
            f"labels: expected shape [B] or [B, 1] for student_logits [B, C], got "
            f"{list(labels.shape)} for {list(student_logits.shape)}"
        )
    logits = f.precise(student_logits)
    if alpha == 1:  # a term without weight may be infinite, or NaN, which 0 times it would be, too
        return temperature**2 * soft_cross_entropy(logits / temperature, soft_labels)
    hard = f.cross_entropy(logits, labels.reshape(batch))
    if alpha == 0:
        _check_soft_labels(f, student_logits, soft_labels)
        return hard
    soft = soft_cross_entropy(logits / temperature, soft_labels)
    return alpha * temperature**2 * soft + (1 - alpha) * hard


def _top_cross_entropy(
    f: TensorFunctions, log_shares: Tensor, values: Tensor, indices: Tensor
) -> Tensor:
    values = f.fixed(values, log_shares)
    own = f.take(log_shares, indices)
    entropy = _expected(f, values, own)
    if log_shares.shape[-1] > indices.shape[-1]:
        rest = (1 - values.sum(axis=-1)).clip(min=0)
        # The rest is not spread over classes that the student rules out by logits of -inf.
        total, classes = _finite_sum(f, log_shares)
        own_total, own_classes = _finite_sum(f, own)
        entropy = entropy + rest * (total - own_total) / (classes - own_classes).clip(min=1)
    return -entropy.mean()


def _expected(f: TensorFunctions, shares: Tensor, values: Tensor) -> Tensor:
    """Return the sum of shares * values over the last axis.

    A class without a share adds nothing, even if its value is infinite (by a logit of -inf).
    """
    return (shares * f.where(shares > _NO_SHARE, values)).sum(axis=-1)


def _finite_sum(f: TensorFunctions, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the finite values over the last axis, and their number."""
    is_finite = values.isfinite()
    return f.where(is_finite, values).sum(axis=-1), f.fixed(is_finite, values).sum(axis=-1)


def _checked_top(f: TensorFunctions, student_logits: Tensor, top: Sequence[Tensor]) -> TopTensors:
    """Return values and indices if they fit the logits. Raises: ValueError, TypeError."""
    if len(top) != 2:
        raise ValueError(f"soft labels: expected (values, indices), got {len(top)} tensors")
    values, indices = top
    check_tensor("soft labels: values", values)
    check_tensor("soft labels: indices", indices)
    classes = student_logits.shape[-1]
    shape = list(indices.shape)
    if (
        list(values.shape) != shape
        or shape[:-1] != list(student_logits.shape[:-1])
        or not 1 <= shape[-1] <= classes
    ):
        raise ValueError(
            f"soft labels: expected values and indices of shape [..., k], k up to {classes}, "
            f"for student_logits {list(student_logits.shape)}, got {list(values.shape)} and "
            f"{shape}"
        )
    return values, f.places(indices)


def _check_soft_labels(
    f: TensorFunctions, student_logits: Tensor, soft_labels: Tensor | TopTensors
) -> None:
    if isinstance(soft_labels, tuple | list):
        _checked_top(f, student_logits, soft_labels)
    else:
        _check_same_shape(student_logits, "soft_labels", soft_labels)


def _check_no_logits(f: TensorFunctions, soft_labels: Tensor) -> None:
    """Refuse a teacher's logits as its probabilities, or as the largest of them."""
    if _is_looked_at(f, soft_labels) and f.is_any_below(soft_labels, _LEAST_SHARE):
        raise ValueError(
            "soft_labels: expected probabilities, got values below 0: of a teacher that serves "
            "logits take kl_divergence, or softmax(logits / temperature) as soft_labels"
        )


def _check_no_shares(f: TensorFunctions, teacher_logits: Tensor) -> None:
    """Refuse a teacher's probabilities as its logits, whose softmax is nearly even."""
    if _is_looked_at(f, teacher_logits) and f.are_shares(teacher_logits, _SUM_TOLERANCE):
        raise ValueError(
            "teacher_logits: expected logits, got probabilities (each row sums to 1): of a teacher "
            "that serves these take soft_cross_entropy, or distillation_loss"
        )


def _is_looked_at(f: TensorFunctions, values: Tensor) -> bool:
    """Return whether to look at what a teacher serves, which nothing else would show.

    It is in the first calls alone, for on a GPU that waits for the device.
    """
    return f.is_eager(values) and 0 not in values.shape and next(_looked) < _LOOKS


def _check_same_shape(student_logits: Tensor, name: str, other: Tensor) -> None:
    check_tensor(name, other)
    if list(student_logits.shape) != list(other.shape):
        raise ValueError(
            f"{name}: expected the shape of student_logits {list(student_logits.shape)}, got "
            f"{list(other.shape)}"
        )


def _check_classes(student_logits: Tensor) -> None:
    """Refuse a single class: its softmax is always 1, so that nothing would be learned."""
    if list(student_logits.shape[-1:]) == [1]:
        raise ValueError(
            f"student_logits: expected [..., C] with two classes or more, got "
            f"{list(student_logits.shape)}: for one output take the framework's "
            "binary_cross_entropy_with_logits"
        )


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature: expected > 0, got {temperature}")
