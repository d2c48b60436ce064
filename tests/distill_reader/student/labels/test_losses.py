from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from distill_reader import distillation_loss, kl_divergence, soft_cross_entropy  # noqa: E402

RANDOM = np.random.default_rng(7)
LOGITS = RANDOM.normal(size=(5, 4)) * 3
TEACHER_LOGITS = RANDOM.normal(size=(5, 4)) * 3
LABELS = np.array([0, 3, 1, 1, 2])


def softmax(values: np.ndarray) -> Any:
    shares = np.exp(values - values.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


def tensor(values: np.ndarray, *, learns: bool = False):
    return paddle.to_tensor(values, stop_gradient=not learns)


def loss_by_name(name: str, temperature: float) -> Callable[[Any], Any]:
    soft = tensor(softmax(TEACHER_LOGITS / temperature))
    return {
        "soft_cross_entropy": lambda logits: soft_cross_entropy(logits, soft),
        "kl_divergence": lambda logits: kl_divergence(
            logits, tensor(TEACHER_LOGITS), temperature=temperature
        ),
        "distillation_loss": lambda logits: distillation_loss(
            logits, soft, tensor(LABELS), temperature=temperature, alpha=0.3
        ),
    }[name]


@pytest.mark.parametrize("name", ["soft_cross_entropy", "kl_divergence", "distillation_loss"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_the_gradient_is_that_of_finite_differences(name: str, temperature: float):
    loss = loss_by_name(name, temperature)
    logits = tensor(LOGITS, learns=True)
    loss(logits).backward()

    step = 1e-6
    expected = np.zeros_like(LOGITS)
    for place in np.ndindex(*LOGITS.shape):
        higher, lower = LOGITS.copy(), LOGITS.copy()
        higher[place] += step
        lower[place] -= step
        difference = loss(tensor(higher)).item() - loss(tensor(lower)).item()
        expected[place] = difference / (2 * step)
    np.testing.assert_allclose(logits.grad.numpy(), expected, atol=1e-8)


def test_soft_cross_entropy_is_the_mean_over_samples_of_its_definition():
    soft = softmax(TEACHER_LOGITS)
    expected = -(soft * np.log(softmax(LOGITS))).sum(axis=1).mean()
    assert soft_cross_entropy(tensor(LOGITS), tensor(soft)).item() == pytest.approx(expected)


def test_with_one_hot_labels_it_is_the_usual_cross_entropy():
    hard = paddle.nn.functional.cross_entropy(tensor(LOGITS), tensor(LABELS)).item()
    one_hot = tensor(np.eye(4)[LABELS])
    assert soft_cross_entropy(tensor(LOGITS), one_hot).item() == pytest.approx(hard)


def test_the_divergence_is_that_of_its_definition_times_the_square_of_the_temperature():
    mine, theirs = softmax(LOGITS / 3), softmax(TEACHER_LOGITS / 3)
    expected = 9 * (theirs * np.log(theirs / mine)).sum(axis=1).mean()
    found = kl_divergence(tensor(LOGITS), tensor(TEACHER_LOGITS), temperature=3.0)
    assert found.item() == pytest.approx(expected)


def test_a_student_that_agrees_with_its_teacher_diverges_by_nothing():
    assert kl_divergence(tensor(LOGITS), tensor(LOGITS + 5.0)).item() == pytest.approx(0, abs=1e-12)


def test_at_a_high_temperature_the_gradient_is_that_of_matching_logits():
    """Hinton et al., equation 4: (z - v) / (N T^2) for logits of mean 0; ours is times T^2."""
    mine = LOGITS - LOGITS.mean(axis=1, keepdims=True)
    theirs = TEACHER_LOGITS - TEACHER_LOGITS.mean(axis=1, keepdims=True)
    logits = tensor(mine, learns=True)
    kl_divergence(logits, tensor(theirs), temperature=1e4).backward()
    samples, classes = mine.shape
    expected = (mine - theirs) / (samples * classes)
    np.testing.assert_allclose(logits.grad.numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("labels", [LABELS, LABELS[:, None]], ids=["(B,)", "(B, 1)"])
def test_alpha_mixes_the_teacher_with_the_labels(labels: np.ndarray):
    soft = tensor(softmax(TEACHER_LOGITS / 2))
    hard = paddle.nn.functional.cross_entropy(tensor(LOGITS), tensor(LABELS)).item()
    taught = 4 * soft_cross_entropy(tensor(LOGITS / 2), soft).item()

    def mixed(alpha: float) -> float:
        value = distillation_loss(
            tensor(LOGITS), soft, tensor(labels), temperature=2.0, alpha=alpha
        ).item()
        assert isinstance(value, float)
        return value

    assert mixed(0) == pytest.approx(hard)
    assert mixed(1) == pytest.approx(taught)
    assert mixed(0.25) == pytest.approx(0.25 * taught + 0.75 * hard)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_huge_logits_give_finite_losses_and_gradients(dtype: str):
    logits = paddle.to_tensor([[300.0, -300.0, 0.0]]).astype(dtype)
    logits.stop_gradient = False
    teacher = paddle.to_tensor([[-300.0, 300.0, 0.0]]).astype(dtype)
    soft = paddle.to_tensor([[0.0, 1.0, 0.0]]).astype(dtype)
    loss = kl_divergence(logits, teacher) + soft_cross_entropy(logits, soft)
    loss.backward()
    assert loss.item() == pytest.approx(1200.0)
    assert np.isfinite(logits.grad.astype("float32").numpy()).all()


def test_nothing_flows_back_to_the_teacher():
    teacher = tensor(TEACHER_LOGITS, learns=True)
    logits = tensor(LOGITS, learns=True)
    (kl_divergence(logits, teacher) + soft_cross_entropy(logits, teacher)).backward()
    assert teacher.grad is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda a, b: soft_cross_entropy(a, b[:, :3]), r"soft_labels: .*\[5, 4\], got \[5, 3\]"),
        (lambda a, b: kl_divergence(a, b[:1]), r"teacher_logits: .*got \[1, 4\]"),
        (lambda a, b: kl_divergence(a, b, temperature=0), "temperature: expected > 0, got 0"),
        (lambda a, b: distillation_loss(a, b, tensor(LABELS), alpha=1.5), "alpha: .*1.5"),
        (lambda a, b: distillation_loss(a, b, tensor(LABELS[:3])), r"labels: .*got \[3\]"),
        (lambda a, b: distillation_loss(a, b, tensor(LABELS), temperature=-1), "temperature"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call: Callable[[Any, Any], Any], words: str):
    with pytest.raises(ValueError, match=words):
        call(tensor(LOGITS), tensor(TEACHER_LOGITS))


# --- the largest values alone


def top(values: np.ndarray, k: int) -> tuple[Any, Any]:
    indices = np.argsort(-values, axis=-1, kind="stable")[..., :k]
    return tensor(np.take_along_axis(values, indices, -1)), tensor(indices)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_top_of_soft_labels_counts_as_rows_with_the_rest_spread_evenly(k: int):
    soft = softmax(TEACHER_LOGITS)
    values, indices = top(soft, k)
    dense = np.repeat((1 - values.numpy().sum(1, keepdims=True)) / max(4 - k, 1), 4, axis=1)
    np.put_along_axis(dense, indices.numpy(), values.numpy(), -1)
    losses: tuple[Callable[[Any, Any], Any], ...] = (
        soft_cross_entropy,
        lambda logits, given: distillation_loss(logits, given, tensor(LABELS), temperature=2.0),
    )
    for loss in losses:
        sparse_logits, dense_logits = tensor(LOGITS, learns=True), tensor(LOGITS, learns=True)
        sparse, whole = loss(sparse_logits, (values, indices)), loss(dense_logits, tensor(dense))
        assert sparse.item() == pytest.approx(whole.item())
        sparse.backward()
        whole.backward()
        np.testing.assert_allclose(sparse_logits.grad.numpy(), dense_logits.grad.numpy(), atol=1e-9)


def test_the_top_of_logits_counts_as_if_the_others_had_no_share():
    values, indices = top(TEACHER_LOGITS, 2)
    dense = np.full_like(TEACHER_LOGITS, -1e4)
    np.put_along_axis(dense, indices.numpy(), values.numpy(), -1)
    for temperature in (1.0, 3.0):
        found = kl_divergence(tensor(LOGITS), (values, indices), temperature=temperature)
        wanted = kl_divergence(tensor(LOGITS), tensor(dense), temperature=temperature)
        assert found.item() == pytest.approx(wanted.item())


@pytest.mark.parametrize("loss", [soft_cross_entropy, kl_divergence])
@pytest.mark.parametrize(
    ("values", "indices"), [((5, 2), (5, 3)), ((4, 2), (4, 2)), ((5, 9), (5, 9)), ((5, 0), (5, 0))]
)
def test_a_top_of_another_shape_is_refused(loss, values, indices):
    pair = tensor(np.zeros(values)), tensor(np.zeros(indices, np.int64))
    with pytest.raises(ValueError, match="soft labels: expected values and indices"):
        loss(tensor(LOGITS), pair)


INF = float("inf")
MASKED = np.where(np.arange(4) == 3, -INF, TEACHER_LOGITS)
STUDENT_MASKED = np.where(np.arange(4) == 3, -INF, LOGITS)


def places(*classes: int):
    return tensor(np.tile(classes, (5, 1)))


@pytest.mark.parametrize("student", [LOGITS, STUDENT_MASKED], ids=["whole", "masked student"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(
            lambda logits, of: kl_divergence(logits, of(MASKED), temperature=3.0), id="kl"
        ),
        pytest.param(
            lambda logits, of: kl_divergence(logits, (of(MASKED[:, 2:]), places(2, 3))),
            id="kl, top 2, one of them masked",
        ),
        pytest.param(lambda logits, of: soft_cross_entropy(logits, of(softmax(MASKED))), id="soft"),
        pytest.param(
            lambda logits, of: soft_cross_entropy(
                logits, (of(softmax(MASKED)[:, :3]), places(0, 1, 2))
            ),
            id="soft, top 3, the other one masked",
        ),
        pytest.param(
            lambda logits, of: soft_cross_entropy(
                logits, (of(softmax(MASKED)[:, [0, 3]]), places(0, 3))
            ),
            id="soft, top 2, one of them masked",
        ),
        pytest.param(
            lambda logits, of: distillation_loss(
                logits, of(softmax(MASKED)), tensor(np.zeros(5, int)), temperature=2.0
            ),
            id="mixed",
        ),
    ],
)  # fmt: skip
def test_losses_are_finite_where_the_teacher_rules_a_class_out(loss, dtype, student):
    logits = tensor(student.astype("float32" if dtype == "float16" else dtype), learns=True)
    found = loss(logits, lambda values: tensor(values.astype(dtype)))
    found.backward()
    assert np.isfinite(found.item())
    assert np.isfinite(logits.grad.numpy()).all()


def test_a_class_that_the_teacher_rules_out_adds_nothing():
    shares = softmax(MASKED)
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = shares * (np.log(shares) - np.log(softmax(LOGITS)))
    expected = np.where(shares > 0, parts, 0).sum(axis=1).mean()
    assert kl_divergence(tensor(LOGITS), tensor(MASKED)).item() == pytest.approx(expected)
