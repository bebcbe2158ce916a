"""Splits by label: the concentration is that of the Dirichlet distribution, whatever the number of labels."""

import numpy as np
import pytest

from partsong.core.streams import stream
from partsong.data.partition import by_label, by_size
from partsong.errors import ParameterError


class Listening:
    """A generator that remembers what it was asked for."""

    def __init__(self):
        self.generator, self.asked = stream(0, "split"), []

    def dirichlet(self, parameters):
        self.asked.append(np.asarray(parameters))
        return self.generator.dirichlet(parameters)

    def __getattr__(self, name):
        return getattr(self.generator, name)


@pytest.mark.parametrize("counts", [[50, 50], [10, 30, 60], [10] * 20])
@pytest.mark.parametrize("concentration", [0.1, 3.0])
def test_mixtures_are_drawn_from_alpha_times_frequencies(counts, concentration):
    generator = Listening()
    by_label(np.repeat(np.arange(len(counts)), counts), 4, generator, concentration)
    for asked in generator.asked:
        np.testing.assert_allclose(asked, concentration * np.array(counts) / sum(counts))
    assert len(generator.asked) == 4


@pytest.mark.parametrize("concentration", [np.inf, -np.inf, np.nan, 0, -1, 1e308, 5e-324])
def test_concentrations_of_no_distribution_are_refused(concentration):
    for split in (
        lambda: by_label(np.repeat([0, 1], 20), 4, stream(0, "split"), concentration),
        lambda: by_size(40, 20, stream(0, "split"), concentration),
    ):
        with pytest.raises(ParameterError, match=r"concentration must be from .*use iid"):
            split()


@pytest.mark.parametrize("concentration", [1e-300, 1e-3, 1.0, 1e300])
def test_all_other_concentrations_share_out_every_row_once(concentration):
    for shares in (
        by_label(np.repeat([0, 1, 2], [1, 3, 36]), 4, stream(0, "split"), concentration),
        by_size(40, 20, stream(0, "split"), concentration),
    ):
        assert sorted(np.concatenate(shares)) == list(range(40))
        assert min(map(len, shares)) >= 1
