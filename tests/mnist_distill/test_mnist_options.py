"""The command line: the original's spelling, defaults that belong together, refusals."""

import pytest
from mnist_options import parse


def test_the_original_command_lines_are_understood():
    teacher = parse(["--num_epochs", "3", "--save_serving_model"])
    assert (teacher.num_epochs, teacher.save_serving_model, teacher.model) == (3, True, "cnn")
    student = parse(
        ["--use_distill_service", "True", "--distill_teachers", "a:1,b:2", "--use_gpu", "False"]
    )
    assert student.distill_teachers == "a:1,b:2"
    assert (student.use_distill_service, student.use_gpu, student.model) == (True, False, "mlp")


def test_without_options_a_student_is_trained_alone_on_all_images():
    options = parse([])
    assert (options.use_distill_service, options.save_serving_model) == (False, False)
    assert (options.labelled, options.unlabelled, options.data_dir) == (None, 0, None)


def test_all_stands_for_all_images():
    options = parse(["--labelled=500", "--unlabelled=all"])
    assert (options.labelled, options.unlabelled) == (500, None)


def test_the_network_can_be_chosen_also_for_a_teacher():
    assert parse(["--save_serving_model=True", "--model=mlp"]).model == "mlp"


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--use_gpu=maybe", "argument --use_gpu: expected True or False, got 'maybe'"),
        ("--num_epochs=0", "--num_epochs: expected a whole number of at least 1, got '0'"),
        ("--batch_size=x", "--batch_size: expected a whole number of at least 1, got 'x'"),
        ("--labelled=some", "--labelled: expected a whole number of at least 1, got 'some'"),
        ("--lr=nan", "--lr: expected a number above 0, got 'nan'"),
        ("--temperature=inf", "--temperature: expected a number above 0, got 'inf'"),
        ("--alpha=1.5", "--alpha: expected a number of at least 0 and at most 1, got '1.5'"),
        ("--model=lstm", "argument --model: invalid choice: 'lstm'"),
        ("--epochs=3", "unrecognized arguments: --epochs=3"),
    ],
)
def test_wrong_values_end_with_2_and_are_named(capsys, argument, said):
    with pytest.raises(SystemExit) as ended:
        parse([argument])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_service_without_a_teacher_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["--use_distill_service=True", "--distill_teachers= ,"])
    assert "--distill_teachers: it is empty; name one: 127.0.0.1:9292" in capsys.readouterr().err


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_student_may_listen_to_one_side_alone(alpha):
    assert parse([f"--alpha={alpha}"]).alpha == alpha
