"""Models shared by the tests of this folder: made once a session, read only."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from radixserve.models import resolve_model
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    """tiny_model(family, tie) -> directory; see tests/support/tiny_models.py for the families."""
    made: dict[tuple[str, bool], Path] = {}

    def get(family: str, tie: bool) -> Path:
        if (family, tie) not in made:
            made[family, tie] = make_tiny_model(tmp_path_factory.mktemp(f"{family}-{'tied' if tie else 'untied'}"), family, tie)
        return made[family, tie]

    return get


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model in this user's cache; fetched when it is not there yet."""
    return resolve_model(None).path


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from a second thread, and threads that wait for each other on a busy machine cost tenfold."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
