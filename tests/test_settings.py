"""Settings from tables."""

import pytest

from separator.datasets import MixingConfig
from separator.errors import SeparatorError
from separator.network import NetworkConfig
from separator.settings import check_known, settings_from


def test_lists_become_tuples_and_the_rest_keeps_its_default():
    config = settings_from(MixingConfig, {"counts": [0.5, 0.5], "seconds": 2.0}, "mixing")
    assert config == MixingConfig(counts=(0.5, 0.5), seconds=2.0)
    assert settings_from(NetworkConfig, {}, "network") == NetworkConfig()


def test_an_unknown_key_is_named_with_those_that_are_known():
    with pytest.raises(SeparatorError, match=r"unknown mixing setting \['second'\]; known are \['counts', "):
        settings_from(MixingConfig, {"second": 1.0}, "mixing")
    check_known(["a"], ["a", "b"], "thing")
