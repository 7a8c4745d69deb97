"""The configuration of the results page refuses what cannot be paired."""

import pytest

from carryover.errors import ConfigError
from carryover.results.config import RegimeArms, ResultsConfig


def section(**values):
    return {"sections": [{"name": "Laboratory", **values}]}


def test_seeds_are_paired_by_their_order():
    arms = RegimeArms(baseline=["b"], control=["k1", "k2"], carryover=["c1", "c2"])
    assert arms.num_seeds == 2
    assert arms.of_seed(1) == {"baseline": "b", "control": "k2", "carryover": "c2"}
    assert RegimeArms(baseline=["b1"]).of_seed(0) == {"baseline": "b1"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (section(regimes={"dflash": {"control": ["k"], "carryover": ["c1", "c2"]}}),
         "1 arms are control and 2 another role"),
        (section(regimes={"dflash": {"baseline": ["a", "b"], "carryover": ["1", "2", "3"]}}),
         "2 arms are baseline"),
        (section(regimes={"eagle": {}}), "dflash"),
        (section(offlin=[]), "did you mean 'offline'"),
        ({"sections": []}, "at least 1"),
        ({"sections": [{"name": "A b"}, {"name": "a B"}]}, "need different names, got A b, a B"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(values, said):
    with pytest.raises(ConfigError, match=said):
        ResultsConfig.parse(values)
