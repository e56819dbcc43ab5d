import pytest

from jaxllm.config.errors import InputError
from jaxllm.config.writable import check_writable


def test_a_file_that_could_not_be_written_is_refused_with_the_cause(tmp_path):
    check_writable("json", None)
    check_writable("json", str(tmp_path / "new.json"))
    with pytest.raises(InputError, match=f"json='{tmp_path}' cannot be written: it is a folder"):
        check_writable("json", str(tmp_path))
    with pytest.raises(InputError, match=f"cannot be written: there is no folder {tmp_path}/no"):
        check_writable("json", str(tmp_path / "no" / "x.json"))
