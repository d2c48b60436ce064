from pathlib import Path

import pytest

from tests.distill_reader.teacher import paddle_models


@pytest.fixture(scope="session")
def paddle_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each kind that Paddle exports: see paddle_models."""
    pytest.importorskip("paddle")
    folder = tmp_path_factory.mktemp("paddle_models")
    paddle_models.write(folder)
    return folder
