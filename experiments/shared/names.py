"""Current names of the methods and starts in the committed logs (docs/results/*.jsonl)."""

from __future__ import annotations

METHODS = {
    "pooled": "NMF, pooled",
    "exact, as many rounds": "exact",
    "exact, as many rounds as the mixture": "exact, 20 rounds",
    "exact, to the end": "exact, to convergence",
    "iPALM once": "one-shot-ipalm",
    "MUR once": "one-shot-mu",
    "FedAvg": "fedavg",
    "FedProx": "fedprox",
    "FNMF-LAP (paper)": "fnmf-local LAP, as printed",
    "FNMF-LAP": "fnmf-local LAP",
    "FNMF-LAP_ρ": "fnmf-local LAP_ρ",
    "FNMF-SK": "fnmf-local SK",
    "FNMF-SK_ρ": "fnmf-local SK_ρ",
    "FNMF-LAP, then 10 exact rounds": "fnmf-local LAP, then 10 × exact",
    "FNMF-SK, then 10 exact rounds": "fnmf-local SK, then 10 × exact",
    "FNMF-LAP once, exact in all other rounds": "fnmf",
    "FNMF-SK once, exact in all other rounds": "fnmf, with SK",
    "FNMF-SK twice, exact in all other rounds": "fnmf, with SK twice",
    "FNMF": "fnmf",
    "Syn-SD": "syn-sd",
    "Syn-SSD-U": "syn-ssd-u",
    "Syn-SSD-V": "syn-ssd-v",
    "Syn-SSD-UV": "syn-ssd-uv",
    "Asyn-SD": "asyn-sd",
    "Asyn-SSD-V": "asyn-ssd-v",
}
"""Name in a log -> the method as users type it, with what distinguishes the run."""

INIT_MODES = {"independent": "local", "common": "shared"}
"""`start` in a log -> `init_mode`."""


def shown(method: str, start: str = "") -> str:
    """Current name of a method in a log, with its `init_mode` if a start is given."""
    name = METHODS.get(method, method)
    return f"{name}, {INIT_MODES.get(start, start)}" if start else name
