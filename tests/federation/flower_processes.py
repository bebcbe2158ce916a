"""What tests of faults over Flower share: real processes, a site that lies on demand, kills, and who is left behind.

python flower_processes.py FOLDER: the node of a site that answers as FOLDER/lie says, and honestly without that file.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from partsong import federation_demo as demo

PLAIN = 'method = "exact"\nrank = 3\nseed = 5\n'
PATIENCE = 300.0


@dataclass
class Federation:
    """A server and sites as processes; any of them can be killed, stopped and started again."""

    folder: Path
    names: tuple[str, ...]
    liar: str | None = None
    server: object = None
    sites: dict = field(default_factory=dict)
    running: demo.Processes = None

    def set_up(self):
        self.server, self.sites = demo.set_up(self.folder, self.names)
        for site in self.sites.values():
            (site.path / "site.toml").write_text("minimum_parties = 3\n")
        np.save(self.sites["east"].data, demo.rows_of("east", 4000))

    def start(self):
        demo.start_server(self.running, self.server)
        with self.controlling() as control:
            demo.register(control, self.server)
            for name in self.names:
                self.start_node(name)
            demo.wait_for(self.running, control, self.server, self.names)

    def controlling(self):
        from partsong.flower_app.control import controlling

        return controlling(self.server)

    def start_node(self, name):
        if name != self.liar:
            demo.start_node(self.running, self.sites[name])
            return
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running.running[name] = subprocess.Popen(
                [sys.executable, __file__, str(self.sites[name].path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def lie(self, how):
        place = self.sites[self.liar].path / "lie"
        place.write_text(how) if how else place.unlink(missing_ok=True)

    def begin(self, run, text, *words):
        """A run, in the background."""
        (self.folder / f"{run}.toml").write_text(text)
        self.running.start(
            f"run {run}",
            *("run", self.folder / f"{run}.toml", "--folder", self.server.path, "--name", run, "--json", *words),
        )

    def ended(self, run):
        """Exit code, and what was said last."""
        code = self.running.running.pop(f"run {run}").wait(PATIENCE)
        return code, json.loads((self.folder / f"run {run}.log").read_text().splitlines()[-1])

    def run(self, run, text, *words):
        self.begin(run, text, *words)
        return self.ended(run)

    def is_running(self, run):
        return self.running.running[f"run {run}"].poll() is None

    def done(self, run):
        """Rounds that were done."""
        place = self.server.run(run).progress
        return place.read_text().count("\n") if place.exists() else 0

    def wait(self, is_so, seconds=PATIENCE):
        until = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < until, "waited for too long"
            time.sleep(0.05)

    def app(self, run):
        """The process of our app at the server; None while there is none."""
        from partsong.consortium.locking import holder_of

        return holder_of(self.server.run(run).lock)

    def is_same(self, run):
        """Whether the model is, bit for bit, that of one process with the participation that was recorded."""
        return demo.compare(self.server, self.sites, run)

    def charged(self, run):
        """Rounds and attempts of a run in the ledger of each site."""
        lines = {name: site.opened().ledger.chain.lines() for name, site in self.sites.items()}
        own = {name: [line["attempt"] for line in found] for name, found in lines.items()}
        return {name: [(index, attempt) for of, index, attempt in found if of == run] for name, found in own.items()}


@contextlib.contextmanager
def federation(folder, names, liar=None):
    """Made and started; in the end nobody is left."""
    made = Federation(folder, names, liar)
    made.set_up()
    with demo.processes(folder) as running:
        made.running = running
        made.start()
        yield made
    assert left_behind(folder) == {}


def left_behind(folder, seconds=20.0):
    """Processes, other than this one, that name the folder in their words, variables or place; some need a moment."""
    until = time.monotonic() + seconds
    while (found := naming(folder)) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def naming(folder):
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "cmdline").read_bytes()
            if int(place.name) != os.getpid() and (
                str(folder).encode() in words + (place / "environ").read_bytes()
                or str(folder) in os.readlink(place / "cwd")
            ):
                found[int(place.name)] = words.replace(b"\0", b" ").decode()
    return found


def kill(process):
    """As a power cut does, one process alone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


class Killer:
    """Kills one process after another, starts again what somebody would start again, and resumes the run."""

    def __init__(self, made, seed):
        self.made, self.random, self.killed = made, random.Random(seed), []

    def strike(self, run):
        """One of all processes that there are, at a moment of its choice; then the server or node is started again.

        Now and then a round may end first: kills of what is only being started could go on for ever.
        """
        made, until = self.made, time.monotonic() + 60.0
        enough = made.done(run) + self.random.choice((0, 0, 1))
        while made.done(run) < enough and made.is_running(run) and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(self.random.uniform(0.0, 6.0))
        names = ["server", "app", "executor", *self.made.names]
        victim = self.random.choice(names)
        process = self.process(victim, run)
        if process is None:
            return
        kill(process)
        self.killed.append(victim)
        with (self.made.folder / "kills.log").open("a") as log:
            log.write(f"{time.strftime('%H:%M:%S')} {run}, {self.made.done(run)} rounds done: {victim}\n")
        if victim in ("server", *self.made.names):
            self.made.running.running.pop(victim).wait(30)
            if victim == "server":
                demo.start_server(self.made.running, self.made.server)
            else:
                self.made.start_node(victim)

    def process(self, victim, run):
        if victim == "app":
            return self.made.app(run)
        if victim == "executor":
            found = [one for one, words in naming(self.made.server.path).items() if "flower-superexec" in words]
            return found[0] if found else None
        return self.made.running.running[victim].pid

    def haunt(self, run, text, kills):
        """Until the run is done, however often it has to be resumed; at most so many kills in all."""
        made, is_begun = self.made, False
        until = time.monotonic() + 2 * PATIENCE
        while time.monotonic() < until:
            made.begin(run, text, *(["--resume"] if is_begun else []))
            is_begun = True
            while made.is_running(run) and len(self.killed) < kills:
                self.strike(run)
            code, told = made.ended(run)
            if code == 0:
                return told
        raise AssertionError(f"The run did not end; killed: {self.killed}")


def limit_files(process, size):
    """The longest file that a process can write, as if the disk were full; None: as before."""
    most = resource.RLIM_INFINITY
    resource.prlimit(process, resource.RLIMIT_FSIZE, (most if size is None else size, most))


def lying_node(folder):
    """A node of ours whose site answers as it should, and then changes its reply; it signs what it sends."""
    from partsong.consortium.site_folder import SiteFolder
    from partsong.federation.site import Site
    from partsong.flower_app import client, supernode
    from partsong.flower_app.environment import set_quiet

    place = SiteFolder.at(Path(folder))
    set_quiet(place.path / "flower")
    lies = Lies(place.path / "lie", Site.answer, client.answer_to)
    Site.answer = lambda site, data: lies.answer(site, data)
    client.answer_to = lies.send
    supernode.join(place)


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
        from dataclasses import replace

        from partsong.core import Message
        from partsong.federation.wire import Kind, Reply

        payload = self.honest(site, data)
        reply = Reply.read(payload)
        self.is_upload = reply.nonce.kind == Kind.WORK and isinstance(reply.answer, Message)
        if not self.is_upload or self.how not in CHANGES:
            return os.urandom(len(payload)) if self.is_upload and self.how == "garbage" else payload
        arrays = dict(reply.answer.arrays)
        name = sorted(arrays)[0]
        arrays[name] = CHANGES[self.how](arrays[name])
        return replace(reply, answer=Message(arrays, reply.answer.weight)).written()

    def send(self, message, data):
        if not self.is_upload:
            return self.sender(message, data)
        self.kept = self.kept or data
        sent = self.sender(message, self.kept if self.how == "replayed" else data)
        if self.how == "oversized":
            sent.content["about"]["bytes"] = 1 << 40
        return sent


CHANGES = {
    "NaN": lambda array: np.full_like(array, np.nan),
    "shape": lambda array: array[:, :-1].copy(),
    "large": lambda array: np.ones((3, 1 << 20)),
}


if __name__ == "__main__":
    lying_node(sys.argv[1])
