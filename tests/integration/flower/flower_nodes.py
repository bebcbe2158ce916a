"""Nodes of sites that are not as ours: python flower_nodes.py KIND FOLDER.

lying: answers as FOLDER/lie says, and honestly without that file. seeded: draws its noise from a seed, so that one
process can draw it again.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from partsong.core.interfaces import Message
from partsong.federation.flower import site_process
from partsong.federation.setup.site_folder import SiteFolder
from partsong.federation.site.service import Site
from partsong.federation.wire import Kind, Reply

CHANGES = {
    "NaN": lambda array: np.full_like(array, np.nan),
    "shape": lambda array: array[:, :-1].copy(),
    "large": lambda array: np.ones((3, 1 << 20)),
}


def lying(place):
    """It answers as it should, and then changes its reply; it signs what it sends."""
    lies = Lies(place.path / "lie", Site.answer, site_process.reply_message)
    Site.answer = lambda site, data: lies.answer(site, data)
    site_process.reply_message = lies.send


def seeded(place):
    """Its policy has to allow that (insecure_noise)."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from tests.federation.helpers import noisy_plan

    opened = SiteFolder.opened
    SiteFolder.opened = lambda found: replace(opened(found), build=noisy_plan)


@dataclass
class Lies:
    """What a hostile process does to uploads: `answer` changes what is signed then, `send` what was signed."""

    place: Path
    honest: object
    sender: object
    kept: bytes = b""
    is_upload: bool = False

    @property
    def how(self):
        return self.place.read_text() if self.place.exists() else ""

    def answer(self, site, data):
        payload = self.honest(site, data)
        reply = Reply.from_bytes(payload)
        self.is_upload = reply.nonce.kind == Kind.WORK and isinstance(reply.answer, Message)
        if not self.is_upload or self.how not in CHANGES:
            return os.urandom(len(payload)) if self.is_upload and self.how == "garbage" else payload
        arrays = dict(reply.answer.arrays)
        name = sorted(arrays)[0]
        arrays[name] = CHANGES[self.how](arrays[name])
        return replace(reply, answer=Message(arrays, reply.answer.weight)).to_bytes()

    def send(self, message, data):
        if not self.is_upload:
            return self.sender(message, data)
        self.kept = self.kept or data
        sent = self.sender(message, self.kept if self.how == "replayed" else data)
        if self.how == "oversized":
            sent.content["about"]["bytes"] = 1 << 40
        return sent


if __name__ == "__main__":
    found = SiteFolder.at(Path(sys.argv[2]))
    {"lying": lying, "seeded": seeded}[sys.argv[1]](found)
    site_process.join(found)
