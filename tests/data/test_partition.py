"""Splits by label: the concentration is that of the Dirichlet distribution, whatever the number of labels."""

import numpy as np
import pytest

from partsong.data.partition import by_label
from partsong.streams import stream


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
