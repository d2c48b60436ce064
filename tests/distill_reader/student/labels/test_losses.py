"""The losses in both frameworks, compared with their definitions in numpy."""

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

from distill_reader import distillation_loss, kl_divergence, soft_cross_entropy
from distill_reader.student.labels import losses

RANDOM = np.random.default_rng(7)
LOGITS = RANDOM.normal(size=(5, 4)) * 3
TEACHER_LOGITS = RANDOM.normal(size=(5, 4)) * 3
LABELS = np.array([0, 3, 1, 1, 2])
INF = float("inf")
MASKED = np.where(np.arange(4) == 3, -INF, TEACHER_LOGITS)
STUDENT_MASKED = np.where(np.arange(4) == 3, -INF, LOGITS)


class PaddleSide:
    """How tests make and read the tensors of one framework."""

    def __init__(self) -> None:
        import paddle

        self.paddle = paddle
        self.cross_entropy = paddle.nn.functional.cross_entropy

    def tensor(self, values: Any, dtype: str | None = None, *, learns: bool = False) -> Any:
        made = self.paddle.to_tensor(np.asarray(values))
        made = made if dtype is None else made.astype(dtype)
        made.stop_gradient = not learns
        return made

    def gradient(self, tensor: Any) -> Any:
        return tensor.grad.astype("float64").numpy()


class TorchSide:
    """See PaddleSide."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.cross_entropy = torch.nn.functional.cross_entropy

    def tensor(self, values: Any, dtype: str | None = None, *, learns: bool = False) -> Any:
        made = self.torch.from_numpy(np.array(values))
        made = made if dtype is None else made.to(getattr(self.torch, dtype))
        return made.requires_grad_(learns)

    def gradient(self, tensor: Any) -> Any:
        return tensor.grad.double().numpy()


@pytest.fixture(params=["paddle", "torch"], scope="module")
def side(request: pytest.FixtureRequest) -> Any:
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return {"paddle": PaddleSide, "torch": TorchSide}[request.param]()


# --- the definitions, in numpy


def log_softmax(values: np.ndarray) -> Any:
    shifted = values - values.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def softmax(values: np.ndarray) -> Any:
    return np.exp(log_softmax(values))


def expected(shares: np.ndarray, values: np.ndarray) -> Any:
    """The mean over samples of sum(shares * values); a class without a share adds nothing."""
    return np.where(shares > 0, shares * np.where(shares > 0, values, 0), 0).sum(axis=-1).mean()


def soft_reference(logits: np.ndarray, soft: np.ndarray) -> Any:
    return -expected(soft, log_softmax(logits))


def kl_reference(logits: np.ndarray, teacher: np.ndarray, temperature: float) -> Any:
    theirs, mine = log_softmax(teacher / temperature), log_softmax(logits / temperature)
    shares = np.exp(theirs)
    with np.errstate(invalid="ignore"):
        return temperature**2 * expected(shares, theirs - mine)


def hard_reference(logits: np.ndarray, labels: np.ndarray) -> Any:
    return -log_softmax(logits)[np.arange(len(labels)), labels].mean()


def top(values: np.ndarray, k: int) -> tuple[Any, Any]:
    indices = np.argsort(-values, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(values, indices, -1), indices


def spread(values: np.ndarray, indices: np.ndarray, allowed: np.ndarray) -> Any:
    """Whole rows of the top: what is left of 1 goes evenly to the other classes that may be."""
    is_other = allowed.copy()
    np.put_along_axis(is_other, indices, False, -1)
    rest = np.maximum(1 - values.sum(axis=-1, keepdims=True), 0)
    dense = rest * is_other / np.maximum(is_other.sum(axis=-1, keepdims=True), 1)
    np.put_along_axis(dense, indices, values, -1)
    return dense


@dataclass(frozen=True, slots=True)
class Case:
    """A call of a loss, with the function that makes tensors, and its definition."""

    name: str
    call: Callable[[Any, Callable[[Any], Any]], Any]
    reference: Callable[[Any], Any]


def soft(temperature: float = 1.0, teacher: np.ndarray = TEACHER_LOGITS) -> Any:
    return softmax(teacher / temperature)


def kl_case(teacher: np.ndarray, temperature: float, name: str) -> Case:
    return Case(
        f"kl at {temperature}{name}",
        lambda z, t: kl_divergence(z, t(teacher), temperature=temperature),
        lambda z: kl_reference(z, teacher, temperature),
    )


def kl_top_case(teacher: np.ndarray, k: int, temperature: float, name: str) -> Case:
    values, indices = top(teacher, k)
    others_out = np.full_like(teacher, -INF)
    np.put_along_axis(others_out, indices, values, -1)
    return Case(
        f"kl of top {k} at {temperature}{name}",
        lambda z, t: kl_divergence(z, (t(values), t(indices)), temperature=temperature),
        lambda z: kl_reference(z, others_out, temperature),
    )


def soft_case(teacher: np.ndarray, name: str) -> Case:
    return Case(
        f"soft{name}",
        lambda z, t: soft_cross_entropy(z, t(soft(1.0, teacher))),
        lambda z: soft_reference(z, soft(1.0, teacher)),
    )


def soft_top_case(teacher: np.ndarray, k: int, name: str) -> Case:
    values, indices = top(soft(1.0, teacher), k)
    return Case(
        f"soft of top {k}{name}",
        lambda z, t: soft_cross_entropy(z, (t(values), t(indices))),
        lambda z: soft_reference(z, spread(values, indices, np.isfinite(z))),
    )


def mixed_case(teacher: np.ndarray, temperature: float, alpha: float, name: str) -> Case:
    shares = soft(temperature, teacher)
    labels = np.where(LABELS == 3, 0, LABELS)  # none that a masked student rules out
    return Case(
        f"mixed by {alpha} at {temperature}{name}",
        lambda z, t: distillation_loss(
            z, t(shares), t(labels), temperature=temperature, alpha=alpha
        ),
        lambda z: (
            alpha * temperature**2 * soft_reference(z / temperature, shares)
            + (1 - alpha) * hard_reference(z, labels)
        ),
    )


PLAIN = [
    *(kl_case(TEACHER_LOGITS, temperature, "") for temperature in (0.5, 1.0, 4.0)),
    *(kl_top_case(TEACHER_LOGITS, 2, temperature, "") for temperature in (1.0, 3.0)),
    soft_case(TEACHER_LOGITS, ""),
    *(soft_top_case(TEACHER_LOGITS, k, "") for k in (1, 2, 4)),
    *(mixed_case(TEACHER_LOGITS, *how, "") for how in ((1.0, 0.5), (2.0, 0.0), (2.0, 1.0))),
    mixed_case(TEACHER_LOGITS, 3.0, 0.25, ""),
]
RULED_OUT = [  # classes, by the teacher's logits of -inf
    kl_case(MASKED, 1.0, ", masked"),
    kl_case(MASKED, 3.0, ", masked"),
    kl_top_case(MASKED, 4, 2.0, ", one of them masked"),
    soft_case(MASKED, ", masked"),
    soft_top_case(MASKED, 2, ", masked"),
    soft_top_case(MASKED, 3, ", the other one masked"),
    soft_top_case(MASKED, 4, ", one of them masked"),
    mixed_case(MASKED, 2.0, 0.5, ", masked"),
]
by_name = attrgetter("name")


@pytest.mark.parametrize("case", PLAIN + RULED_OUT, ids=by_name)
def test_a_loss_and_its_gradient_are_those_of_the_definition(side: Any, case: Case):
    logits = side.tensor(LOGITS, learns=True)
    loss = case.call(logits, side.tensor)
    assert loss.item() == pytest.approx(case.reference(LOGITS), rel=1e-10, abs=1e-12)
    loss.backward()

    step = 1e-6
    gradient = np.zeros_like(LOGITS)
    for place in np.ndindex(*LOGITS.shape):
        higher, lower = LOGITS.copy(), LOGITS.copy()
        higher[place] += step
        lower[place] -= step
        gradient[place] = (case.reference(higher) - case.reference(lower)) / (2 * step)
    np.testing.assert_allclose(side.gradient(logits), gradient, atol=1e-8)


@pytest.mark.parametrize("student", [LOGITS, STUDENT_MASKED], ids=["whole", "masked student"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", RULED_OUT, ids=by_name)
def test_losses_are_finite_where_the_teacher_rules_a_class_out(
    side: Any, case: Case, dtype: str, student: np.ndarray
):
    def tensor(values: Any) -> Any:
        return side.tensor(values, dtype if values.dtype.kind == "f" else None)

    logits = side.tensor(student, "float32" if "16" in dtype else dtype, learns=True)
    loss = case.call(logits, tensor)
    loss.backward()
    near = {"float64": 1e-10, "float32": 1e-5}.get(dtype, 0.02)
    assert loss.item() == pytest.approx(case.reference(student), rel=near)
    assert np.isfinite(side.gradient(logits)).all()


def test_with_one_hot_labels_it_is_the_usual_cross_entropy(side: Any):
    hard = side.cross_entropy(side.tensor(LOGITS), side.tensor(LABELS)).item()
    one_hot = side.tensor(np.eye(4)[LABELS])
    assert soft_cross_entropy(side.tensor(LOGITS), one_hot).item() == pytest.approx(hard)


def test_a_student_that_agrees_with_its_teacher_diverges_by_nothing(side: Any):
    loss = kl_divergence(side.tensor(LOGITS), side.tensor(LOGITS + 5.0))
    assert loss.item() == pytest.approx(0, abs=1e-12)


def test_at_a_high_temperature_the_gradient_is_that_of_matching_logits(side: Any):
    """Hinton et al., equation 4: (z - v) / (N T^2) for logits of mean 0; ours is times T^2."""
    mine = LOGITS - LOGITS.mean(axis=1, keepdims=True)
    theirs = TEACHER_LOGITS - TEACHER_LOGITS.mean(axis=1, keepdims=True)
    logits = side.tensor(mine, learns=True)
    kl_divergence(logits, side.tensor(theirs), temperature=1e4).backward()
    samples, classes = mine.shape
    matching = (mine - theirs) / (samples * classes)
    np.testing.assert_allclose(side.gradient(logits), matching, atol=1e-4)


def test_a_term_without_weight_is_left_out(side: Any):
    """The labels' term is infinite by a class that is ruled out, the teacher's is NaN."""
    ruled_out = side.tensor(np.full(5, 3))
    student, teacher = side.tensor(STUDENT_MASKED, learns=True), side.tensor(np.eye(4)[LABELS - 1])
    soft = distillation_loss(student, teacher, ruled_out, alpha=1)
    expected = soft_cross_entropy(student, teacher)
    assert float(soft.detach()) == pytest.approx(float(expected.detach()))
    soft.backward()
    assert np.isfinite(side.gradient(student)).all()
    nan = side.tensor(np.full((5, 4), np.nan))
    student, labels = side.tensor(LOGITS, learns=True), side.tensor(LABELS)
    hard = distillation_loss(student, nan, labels, alpha=0)
    usual = side.cross_entropy(student, labels)
    assert float(hard.detach()) == pytest.approx(float(usual.detach()))
    with pytest.raises(ValueError, match="soft_labels"):
        distillation_loss(student, nan[:, :3], labels, alpha=0)


def test_labels_may_have_an_axis_of_one(side: Any):
    given = side.tensor(LOGITS), side.tensor(soft())
    flat = distillation_loss(*given, side.tensor(LABELS))
    assert distillation_loss(*given, side.tensor(LABELS[:, None])).item() == flat.item()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_huge_logits_give_finite_losses_and_gradients(side: Any, dtype: str):
    logits = side.tensor([[300.0, -300.0, 0.0]], dtype, learns=True)
    teacher = side.tensor([[-300.0, 300.0, 0.0]], dtype)
    shares = side.tensor([[0.0, 1.0, 0.0]], dtype)
    loss = kl_divergence(logits, teacher) + soft_cross_entropy(logits, shares)
    loss.backward()
    assert loss.item() == pytest.approx(1200.0)
    assert np.isfinite(side.gradient(logits)).all()


def test_a_loss_against_labels_is_as_large_as_it_is(side: Any):
    logits = side.tensor([[0.0, 200.0, -200.0], [0.0, 0.0, 300.0]], "float32", learns=True)
    labels = side.tensor([0, 1])
    loss = distillation_loss(logits, side.tensor(np.full((2, 3), 1 / 3)), labels, alpha=0)
    assert loss.item() == pytest.approx(250)
    loss.backward()
    expected = [[-0.5, 0.5, 0], [0, -0.5, 0.5]]
    np.testing.assert_allclose(side.gradient(logits), expected, atol=1e-6)


def test_samples_may_have_several_axes(side: Any):
    wide, taught = LOGITS.reshape(5, 2, 2), soft().reshape(5, 2, 2)
    taught = taught / taught.sum(axis=-1, keepdims=True)
    loss = soft_cross_entropy(side.tensor(wide), side.tensor(taught))
    assert loss.item() == pytest.approx(soft_reference(wide, taught))


def test_nothing_flows_back_to_the_teacher(side: Any):
    teacher = side.tensor(TEACHER_LOGITS, learns=True)
    logits = side.tensor(LOGITS, learns=True)
    (kl_divergence(logits, teacher) + soft_cross_entropy(logits, teacher)).backward()
    assert teacher.grad is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda a, b, y: soft_cross_entropy(a, b[:, :3]), r"soft_labels: .*\[5, 4\], got \[5, 3\]"),
        (lambda a, b, y: kl_divergence(a, b[:1]), r"teacher_logits: .*got \[1, 4\]"),
        (lambda a, b, y: kl_divergence(a, b, temperature=0), "temperature: expected > 0, got 0"),
        (lambda a, b, y: distillation_loss(a, b, y, alpha=1.5), "alpha: .*1.5"),
        (lambda a, b, y: distillation_loss(a, b, y[:3]), r"labels: .*got \[3\]"),
        (lambda a, b, y: distillation_loss(a, b, y, temperature=-1), "temperature"),
        (lambda a, b, y: kl_divergence(a, b, temperature=float("inf")), "temperature: .* got inf"),
        (lambda a, b, y: soft_cross_entropy(a, (b,)), r"expected \(values, indices\), got 1"),
        (lambda a, b, y: kl_divergence(a[:, :1], b[:, :1]), r"two classes or more, got \[5, 1\]"),
        (lambda a, b, y: soft_cross_entropy(a[:, :1], b[:, :1]), "two classes or more"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(side: Any, call: Callable[..., Any], words: str):
    with pytest.raises(ValueError, match=words):
        call(side.tensor(LOGITS), side.tensor(TEACHER_LOGITS), side.tensor(LABELS))


@pytest.mark.parametrize("is_top", [False, True])
def test_logits_are_no_soft_labels_which_the_first_calls_see(side: Any, is_top: bool, monkeypatch):
    monkeypatch.setattr(losses, "_looked", itertools.count(losses._LOOKS - 3))
    logits, labels = side.tensor(LOGITS), side.tensor(LABELS)
    places = side.tensor(np.argsort(-TEACHER_LOGITS))

    def loss(values: np.ndarray) -> Any:
        found = side.tensor(values)
        return distillation_loss(logits, (found, places) if is_top else found, labels)

    for _ in range(2):
        with pytest.raises(ValueError, match=r"got values below 0: .* take kl_divergence, or soft"):
            loss(-np.abs(TEACHER_LOGITS))
    loss(np.full_like(TEACHER_LOGITS, -1e-9))  # rounding
    loss(-np.abs(TEACHER_LOGITS))  # is not looked at


def test_probabilities_are_no_logits(side: Any, monkeypatch):
    monkeypatch.setattr(losses, "_looked", itertools.count(losses._LOOKS - 3))
    logits, shares = side.tensor(LOGITS), soft()
    for one in (shares, shares.astype(np.float16).astype(np.float32)):
        with pytest.raises(ValueError, match=r"got probabilities .* take soft_cross_entropy, or"):
            kl_divergence(logits, side.tensor(one.astype(LOGITS.dtype)))
    kl_divergence(logits, side.tensor(np.concatenate([shares[:-1], shares[-1:] * 2])))


def test_no_samples_are_neither_logits_nor_probabilities(side: Any):
    nothing = side.tensor(LOGITS[:0])
    assert np.isnan(float(kl_divergence(nothing, nothing)))


def test_nothing_is_looked_at_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    from distill_reader.student.labels import torch_functions

    class OnGpu(torch.Tensor):  # type: ignore[name-defined]
        is_cuda = True

    values = torch.ones(2, 2).as_subclass(OnGpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert torch_functions.is_eager(values)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not torch_functions.is_eager(values)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda a, b, y: soft_cross_entropy(LOGITS, b), "student_logits"),
        (lambda a, b, y: soft_cross_entropy(a, soft()), "soft_labels"),
        (lambda a, b, y: kl_divergence(a, TEACHER_LOGITS), "teacher_logits"),
        (lambda a, b, y: kl_divergence(a, (b, LABELS[:, None])), "soft labels: indices"),
        (lambda a, b, y: distillation_loss(a, b, LABELS), "labels"),
    ],
)
def test_an_array_is_refused_with_the_remedy(side: Any, call: Callable[..., Any], name: str):
    with pytest.raises(TypeError, match=rf"{name}: expected a tensor .*, got ndarray; .*set_tens"):
        call(side.tensor(LOGITS), side.tensor(TEACHER_LOGITS), side.tensor(LABELS))


@pytest.mark.parametrize("loss", [soft_cross_entropy, kl_divergence])
@pytest.mark.parametrize(
    ("values", "indices"), [((5, 2), (5, 3)), ((4, 2), (4, 2)), ((5, 9), (5, 9)), ((5, 0), (5, 0))]
)
def test_a_top_of_another_shape_is_refused(side: Any, loss: Any, values: Any, indices: Any):
    pair = side.tensor(np.zeros(values)), side.tensor(np.zeros(indices, np.int64))
    with pytest.raises(ValueError, match="soft labels: expected values and indices"):
        loss(side.tensor(LOGITS), pair)


@pytest.mark.parametrize("loss", [soft_cross_entropy, kl_divergence])
@pytest.mark.parametrize("index", [3, 999])
def test_a_class_that_the_student_does_not_have_is_refused(side: Any, loss: Any, index: int):
    logits = side.tensor(np.zeros((1, 3), np.float32))
    values = side.tensor(np.ones((1, 2), np.float32))
    indices = side.tensor(np.array([[0, index]]))
    with pytest.raises(
        (IndexError, RuntimeError, ValueError), match=r"out of (bounds|range)|index"
    ):
        loss(logits, (values, indices))
