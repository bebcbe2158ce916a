from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "laws", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "laws"))
