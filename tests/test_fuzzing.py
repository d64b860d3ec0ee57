"""Everything that reads files, on files that are nearly right: see `tests/fuzzing.py`; more of it by `make fuzz`."""

import pytest

from tests.fuzzing import Reader, readers

NAMES = (
    *("assignment", "weights", "rotations", "scores", "state", "safety net", "record"),
    *("tool config", "weight file", "json lines", "parquet"),
)


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    return readers(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_nearly_right_is_refused_or_read(every, name):
    every[name].check(40)
    assert every[name].count >= 40 and set(every) == set(NAMES)


def test_the_check_sees_another_error(every):
    def read(content):
        raise KeyError("not for a user")

    with pytest.raises(KeyError):
        Reader(every["state"].inputs, read).check(1)
