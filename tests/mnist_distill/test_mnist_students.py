"""The arithmetic of the benchmark."""

import pytest

from benchmarks.mnist_students import (
    ALL_IMAGES,
    ALONE,
    DISTILLED,
    Result,
    epochs_for,
    parse,
    summarize,
)


def results(**accuracies: list[float]) -> list[Result]:
    kinds = {"alone": ALONE, "distilled": DISTILLED, "all_images": ALL_IMAGES}
    return [
        Result(seed=seed, kind=kinds[name], accuracy=value)
        for name, values in accuracies.items()
        for seed, value in enumerate(values)
    ]


def test_gains_are_taken_within_seeds():
    alone, distilled, all_images = summarize(
        results(alone=[0.8, 0.9], distilled=[0.82, 0.92], all_images=[0.9, 0.9])
    )
    assert [alone.mean, alone.gain] == pytest.approx([85, 0])
    assert alone.spread == pytest.approx(7.0711, abs=1e-4)
    assert [distilled.gain, distilled.standard_error] == pytest.approx([2, 0])
    assert [all_images.gain, all_images.standard_error] == pytest.approx([5, 5])
    assert [distilled.is_better, all_images.is_better] == [True, False]


def test_one_seed_knows_no_spread():
    _, distilled, _ = summarize(results(alone=[0.8], distilled=[0.79], all_images=[0.9]))
    assert (distilled.spread, distilled.is_better) == (0, False)


@pytest.mark.parametrize(("images", "epochs"), [(500, 160), (8000, 10), (10**6, 1)])
def test_each_kind_has_about_as_many_steps(images, epochs):
    assert epochs_for(images, batch=50, steps=1600) == epochs


def test_a_seed_that_comes_twice_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["--seeds", "1", "1"])
    assert "--seeds: [1, 1] has one twice" in capsys.readouterr().err
