"""Before the first round, at a site: would it take part at all, and what does it start with. Nothing is released."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partsong import threads
from partsong.core import Layout, Message, Shard, type_name
from partsong.engines.boundary import check_together, stated_by
from partsong.federation.columns import SAME, Names, Wanted, hashed, key_mark, require_key_mark
from partsong.federation.consent import keys_among
from partsong.federation.data_state import mark_of, require_sound
from partsong.federation.refusals import Denied
from partsong.federation.site_files import RunFolder, Started, Tally
from partsong.federation.site_plan import Plan, experiment_in, layout_in, names_in
from partsong.federation.site_work import Answered
from partsong.federation.told_alike import context_of
from partsong.federation.wire import Request
from partsong.federation.word_data import SUFFIX, CountedData
from partsong.federation.word_site import require_table, told_of_empty, told_of_long

if TYPE_CHECKING:
    from partsong.federation.site import Site


def hello(site: Site, request: Request) -> Answered:
    """Hashes of the columns that may leave, and the number type, if the site would take part at all."""
    require_willing(site, request)
    require_sound(site.data)
    columns = site.policy.leaving(site.data.columns)
    if not columns:
        raise Denied("no-columns", "site.toml lets no column of these data leave.")
    mark = key_mark(site.key, request.nonce.run)
    require_key_mark(mark, str(request.note.get("shared_key", mark)))
    body = Message({"columns": hashed(columns, request.nonce.run, site.key)})
    return site.plain(request, body, {"type": type_name(site.data.matrix().dtype), "shared_key": mark})


def require_willing(site: Site, request: Request) -> None:
    """Refuse where the site would not begin a run of this experiment with these parties."""
    parties = names_in(request.note.get("parties"))
    _require_kind(site, request)
    plan = site.build(experiment_in(request.note), len(parties), site.roster)
    _require_plan(site, plan, parties, request.nonce.run)
    site.policy.require_run(site.data.run_of(request.nonce.run), _runs(site))
    site.consent.require_budget(plan, request.nonce.run)


def start(site: Site, request: Request) -> Answered:
    """Look at what is asked for, match the columns, and make the first state; nothing is released."""
    files = site.files_of(request)
    before = files.started()
    if before is not None:
        _require_same_start(site, request, before)
    if before is None:
        _require_kind(site, request)
        site.policy.require_run(site.data.run_of(request.nonce.run), _runs(site))
        passed = _passed(site, request.nonce.run)
        layout, experiment = layout_in(request.note), experiment_in(request.note)
        plan = site.build(experiment, len(layout.parties), site.roster)
        order = _order(site, request)
        shard = Shard(site.name, site.data.matrix(order), site.data.secret)
        _require_plan(site, plan, layout.parties, request.nonce.run)
        _check(plan, layout, shard, len(order))
        site.consent.require_budget(plan, request.nonce.run)
        require_sound(site.data)
        with threads.kernels_on(site.kernel_threads):
            state = plan.program.start_party(shard, layout)
        standing = plan.reduction.enrol(site.name, site.data.secret, layout)
        files.save_tally(Tally(None, standing, passed=passed), plan.source)
        columns = tuple(site.data.columns[at] for at in order)
        rows = (site.data.n_rows, site.data.type)
        mark = mark_of(site.data, order)
        of_words = site.data.context if isinstance(site.data, CountedData) else ""
        context = of_words + context_of(experiment, request.body["columns"], layout)
        keys = keys_among(site.roster, layout.parties)
        files.save_start(Started(request.digest, experiment, layout, columns, rows, state, mark, context, keys))
        if isinstance(site.data, CountedData) and (empty := told_of_empty(site.data.rows)):
            site.log(request.nonce, "note", empty)
        if long := told_of_long(state, plan.program):
            site.log(request.nonce, "note", long)
    return site.plain(request, Message({}))


def _require_same_start(site: Site, request: Request, before: Started) -> None:
    """Refuse a start under the name of a run that is over, is another, or is not allowed any more."""
    place = site.workplace(request)
    if place.tally.over is not None:
        raise Denied("over", "The run is over here.")
    if before.digest != request.digest:
        raise Denied("conflict", "This run was started here before, with other settings.")
    place.require_taking_part()
    site.consent.require_budget(place.plan, request.nonce.run)
    site.consent.require_columns(before)


def _runs(site: Site) -> set[str]:
    """All that were ever started or charged here."""
    charged = set(site.ledger.books().runs)
    begun = {path.parent.name for path in (site.folder / "runs").glob("*/start")}
    return {site.data.run_of(name) for name in charged | begun}


def _passed(site: Site, run: str) -> int:
    """The last round that was released in a run whose files are not here: -1 as a rule, for there was none."""
    charges, released = site.ledger.charges_of(run), site.audit.released(run)
    if released is not None and released.is_over:
        raise Denied("over", "The run was over here, and its files are gone.")
    charged = [one.round for one in charges]
    rounds = charged if released is None else [number for number, _ in released.works]
    return max(rounds, default=-1)


def _require_kind(site: Site, request: Request) -> None:
    """A table, where the experiment is about one."""
    if not site.data.hides_names:
        require_table(experiment_in(request.note))


def _require_plan(site: Site, plan: Plan, parties: tuple[str, ...], run: str) -> None:
    """What the site allows; a run over texts has begun with its agreement on words, and is of the same parties."""
    agreement = RunFolder(site.folder / "runs" / f"{run}{SUFFIX}").started()
    if agreement is None or set(agreement.layout.parties) != set(parties):
        site.consent.require_plan(plan, parties)
    else:
        site.consent.require_begun(plan, agreement)


def _check(plan: Plan, layout: Layout, shard: Shard, columns: int) -> None:
    """Whether the parts go together; before anything is computed."""
    if layout.n_features != columns or layout.dtype not in ("float64", type_name(shard.matrix.dtype)):
        raise Denied("layout", f"{layout.n_features} columns of {layout.dtype} were agreed on.")
    check_together(plan.program, plan.reduction, stated_by(plan.program, layout))


def _order(site: Site, request: Request) -> tuple[int, ...]:
    """Where the agreed columns are here; names that are missing go to the log of the site."""
    leaving, nonce = site.policy.leaving(site.data.columns), request.nonce
    wanted = Wanted(request.body["columns"], nonce.run, str(request.note.get("rule", SAME)))
    order, unused = Names(leaving, site.key, site.data.hides_names).order(wanted)
    if unused and not site.data.hides_names:
        site.log(nonce, "note", f"Columns that are not used: {', '.join(unused)}.")
    places = {name: at for at, name in enumerate(site.data.columns)}
    return tuple(places[leaving[at]] for at in order)
