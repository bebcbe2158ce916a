"""Messages of the library in the words of the command line: arguments of functions become options."""

from __future__ import annotations

import re
from functools import partial

ARGUMENTS = {
    "n_components": "--components",
    "max_iter": "--max-iter",
    "time_budget": "--time-budget",
    "local_steps": "--local-steps",
    "l1_ratio": "--l1-ratio",
    "alpha_W": "--alpha-w",
    "alpha_H": "--alpha-h",
    "random_state": "--seed",
    "n_jobs": "--threads",
    "n_threads": "--threads",
    "kernel_threads": "--threads",
    "drop_extra": "--drop-extra",
    "n_topics": "--topics",
    "min_documents": "--min-documents",
    "min_parties": "--min-parties",
    "max_words": "--max-words",
    "longest_word": "--longest-word",
    "server_rate": "--server-rate",
}
"""Names that are no words of English: they are replaced wherever they stand alone."""

WORDS = (
    "label",
    "key",
    "header",
    "dtype",
    "tol",
    "rounds",
    "transpose",
    "concentration",
    "seed",
    "init",
    "solver",
    "method",
    "participation",
    "server",
    "vocabulary",
    "weighting",
    "encoding",
)
"""Names that are words as well: replaced before an equals sign, and where a message says what they must be."""

PHRASES = {
    " (or None)": "",
    ", or None": "",
    "The l1 penalty ": "The L1 part of --alpha-w and --alpha-h (see --l1-ratio) ",
    "The l2 penalty ": "The L2 part of --alpha-w and --alpha-h (see --l1-ratio) ",
    'faulty="leave out"': "--faulty leave-out",
    "(column=…)": "(--text-column)",
    " (longest of VocabularyAgreement)": "",
    "a smaller min_documents, or a larger max_share": "a smaller --min-documents",
    "Unknown init ": "Unknown --init ",
    "Unknown solver ": "Unknown --solver ",
    "Unknown method ": "Unknown --method ",
    "SafeStep() needs none to be given": "--step safe needs no number",
}

_ALONE = r"(?<![\w/\\.'\"-])"  # neither part of a path nor of a quoted name
_ANY = rf"{_ALONE}({'|'.join((*ARGUMENTS, *WORDS))})"
_RULES = (
    (re.compile(rf"{_ALONE}(header)=False\b"), None),
    (re.compile(rf"{_ANY}=True\b"), ""),
    (re.compile(rf"{_ANY}=(?=[\w'\"-])"), " "),
    (re.compile(rf"{_ANY}=(?=[\s).,;]|$)"), ""),
    (re.compile(rf"{_ALONE}({'|'.join(ARGUMENTS)})\b(?!['\"=/\\]|\.\w)"), ""),
    (re.compile(rf"(?:^|(?<=: ))({'|'.join(WORDS)})(?= must\b)"), ""),
)


_OF_A_FILE = re.compile(r"[^\n:]*\.toml: ")
"""How a message begins that is about the settings of a file, whose keys are not options."""

_GIVEN_STEP = re.compile(r"The step of \w+Step\(eta=([^,)]+)(?:, decay=[^)]+)?\)")


def as_options(message: str) -> str:
    """The same message with --label for label=, --components for n_components, and so on; keys of a file stay."""
    if _OF_A_FILE.match(message):
        return message
    message = _GIVEN_STEP.sub(r"--step \1", message)
    for phrase, said in PHRASES.items():
        message = message.replace(phrase, said)
    for pattern, after in _RULES:
        message = pattern.sub(partial(_option, after), message)
    return message


def option(name: str) -> str:
    """What an argument or a setting is called on the command line."""
    return ARGUMENTS.get(name, f"--{name.replace('_', '-')}")


def _option(after: str | None, found: re.Match[str]) -> str:
    return f"--no-{found[1]}" if after is None else option(found[1]) + after
