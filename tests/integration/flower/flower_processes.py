"""What tests over real processes of Flower share: a server, sites, runs, and who is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from partsong.core.interfaces import Schedule, Shard
from partsong.engines.local import Sequential
from partsong.engines.virtual_clock import Asynchronous
from partsong.federation.commands import demo
from partsong.federation.experiment import Experiment
from partsong.federation.server.launch import load_run_state
from partsong.federation.server.state import AsyncRunState
from partsong.federation.site.plan import build_plan
from partsong.io.model_file import load_model

PLAIN = 'method = "exact"\nrank = 3\n'
"""Without a seed, which `run` then draws: sites refuse one that they have answered before."""
SITES = demo.NAMES[:3]
PATIENCE = 300.0


@dataclass
class Federation:
    """A server and sites as processes; any of them can be killed, stopped and started again.

    `odd` are sites whose node is one of `flower_nodes`, and `policy` is what every site.toml says; the first site has
    many rows, and takes its time.
    """

    folder: Path
    names: tuple[str, ...] = SITES
    odd: Mapping[str, str] = field(default_factory=dict)
    policy: str = "minimum_parties = 3\n"
    server: object = None
    sites: dict = field(default_factory=dict)
    running: demo.Processes = None

    def set_up(self):
        self.server, self.sites = demo.set_up(self.folder, self.names)
        for site in self.sites.values():
            (site.path / "site.toml").write_text(f'maximum_exposure = "rows"\n{self.policy}')  # many runs of one table
        np.save(self.sites["east"].data, demo.rows_of("east", 4000))

    def start(self):
        demo.start_server(self.running, self.server)
        with self.open_control() as control:
            demo.register(control, self.server)
        for name in self.names:
            self.start_node(name)
        self.wait_for_nodes()

    def open_control(self):
        from partsong.federation.flower.control import open_control

        return open_control(self.server)

    def wait_for_nodes(self):
        with self.open_control() as control:
            demo.wait_for(self.running, control, self.server, self.names)

    def start_node(self, name):
        if self.odd.get(name) is None:
            demo.start_node(self.running, self.sites[name])
            return
        script = Path(__file__).with_name("flower_nodes.py")
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running.running[name] = subprocess.Popen(
                [sys.executable, script, self.odd[name], str(self.sites[name].path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def lie(self, how):
        for name in self.odd:
            place = self.sites[name].path / "lie"
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
        return len(self.progress(run))

    def progress(self, run):
        """What was told of each of them."""
        place = self.server.run(run).progress
        lines = place.read_text().splitlines(keepends=True) if place.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait(self, is_so, seconds=PATIENCE):
        until = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < until, "waited for too long"
            time.sleep(0.05)

    def app(self, run):
        """The process of our app at the server; None while there is none."""
        from partsong.federation.locks import holder_of

        return holder_of(self.server.run(run).lock)

    def record(self, run):
        return load_run_state(self.server.run(run).state)

    def is_same(self, run, build=build_plan):
        """Whether the model is, bit for bit, that of one process with the participation, or order, as recorded."""
        place, record = self.server.run(run), self.record(run)
        plan = build(Experiment.read(place.experiment).to_dict(), len(self.names), dict(self.server.roster().keys))
        opened = {name: site.opened().data for name, site in sorted(self.sites.items())}
        shards = [Shard(name, data.matrix(), data.secret) for name, data in opened.items()]
        schedule = Schedule(record.index, record.layout.seed, record.absent(), record.dropouts())
        engine = Asynchronous(record.recorded_order()) if isinstance(record, AsyncRunState) else Sequential()
        *_, last = engine.run(plan.program, shards, schedule, reduction=plan.reduction)
        expected = np.ascontiguousarray(np.asarray(plan.program.components(last.checkpoint.server)))
        found = load_model(place.model).components
        return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())

    def charged(self, run):
        """Rounds and attempts of a run in the ledger of each site."""
        ledgers = {name: site.opened().ledger for name, site in self.sites.items()}
        return {name: [(one.round, one.attempt) for one in ledger.charges(run)] for name, ledger in ledgers.items()}


@contextlib.contextmanager
def federation(folder, names=SITES, prepare=lambda made: None, **settings):
    """Made, prepared (other data, for example) and started; in the end nobody is left."""
    made = Federation(folder, names, **settings)
    made.set_up()
    prepare(made)
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


def limit_files(process, size):
    """The longest file that a process can write, as if the disk were full; None: as before."""
    import resource

    most = resource.RLIM_INFINITY
    resource.prlimit(process, resource.RLIMIT_FSIZE, (most if size is None else size, most))


@contextlib.contextmanager
def sleeping(*words, **settings):
    """A process that does nothing, for a minute at most."""
    made = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *words], **settings)
    try:
        yield made
    finally:
        made.kill()
        made.wait()
