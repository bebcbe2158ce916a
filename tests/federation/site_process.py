"""Sites as processes that can be killed: names come in by lines, and a process of its own answers for each.

It is forked from one that has everything imported, so that a killed site is back at once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from partsong.federation.experiment import Experiment
from partsong.federation.signing import public_key, signer, verifier
from partsong.federation.transports.files import SiteMailbox
from tests.federation.helpers import Federation, secret_of

SERVER_SECRET = 12345
SECONDS = 600.0


def mailbox_of(folder, name):
    return SiteMailbox(
        folder / "drop", name, signer(secret_of(name), name), verifier(public_key(SERVER_SECRET, "server"))
    )


def answer_for(root, name):
    site = Federation(root, Experiment("exact", 3, 1)).site(name)
    for _ in mailbox_of(root, name).serve(site.answer, SECONDS, 0.02):
        pass


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    children = []
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            answer_for(Path(sys.argv[1]), line.strip())
            os._exit(0)
        children.append(child)
        print(child, flush=True)
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
