"""The bus runtime against a real server. `toys` is a stage to play with, `faults` what may happen to its workers."""

import pytest

pytest.register_assert_rewrite("tests.contract.bus.toys")
