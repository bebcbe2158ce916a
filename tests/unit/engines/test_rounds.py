"""Whether a caller has raised in its loop or broken out of it: for a bare loop Python ends a generator alike."""

from __future__ import annotations

import sys
import threading
from contextlib import closing

import pytest

from partsong.engines.rounds import CallerError, Rounds


class Tired(Exception):
    pass


@pytest.fixture
def ends():
    return []


def generator(ends):
    try:
        while True:
            yield 0
    except CallerError as left:
        ends.append(str(left.as_fault(3)))
        raise
    except GeneratorExit:
        ends.append("")
        raise


def rounds(ends):
    return Rounds(generator(ends))


def within(ends):
    yield from rounds(ends)


def again(ends):
    for one in rounds(ends):  # noqa: UP028
        yield one


def fail():
    raise Tired("of it")


def raise_here(start):
    for _ in start():
        raise Tired("of it")


def raise_deeper(start):
    for _ in start():
        fail()


def raise_in_with(start):
    for _ in start():
        with threading.Lock():
            fail()


def raise_before_finally(start):
    for _ in start():
        try:
            fail()
        finally:
            len("")


def raise_again(start):
    for _ in start():
        try:
            fail()
        except Tired:
            raise


def raise_another(start):
    for _ in start():
        try:
            len(3)
        except TypeError as error:
            raise Tired("of it") from error


def raise_and_catch_outside_of_the_loop(start):
    try:
        for _ in start():
            fail()
    except Tired:
        raise


def raise_in_enumerate(start):
    for _, _ in enumerate(start()):
        fail()


def exit_python(start):
    for _ in start():
        sys.exit(1)


def raise_in_its_block(start):
    with start() as some:
        for _ in some:
            fail()


def break_out_of_its_block(start):
    with start() as some:
        for _ in some:
            break


def break_out(start):
    for _ in start():
        break


def return_from_it(start):
    for _ in start():
        return


def break_while_handling(start):
    for _ in start():
        try:
            fail()
        except Tired:
            break


def break_after_an_error_that_is_kept(start):
    kept = None
    for _ in start():
        try:
            fail()
        except Tired as error:
            kept = error
        if kept is not None:
            break
    assert kept.__traceback__ is not None


def begin_while_handling(start):
    try:
        fail()
    except Tired:
        break_out(start)
        with closing(start()) as some:
            next(some)


def close_by_hand(start):
    some = start()
    next(some)
    some.close()


def let_go(start):
    some = start()
    next(some)


RAISING = [
    raise_here,
    raise_deeper,
    raise_in_with,
    raise_before_finally,
    raise_again,
    raise_another,
    raise_and_catch_outside_of_the_loop,
    raise_in_enumerate,
    exit_python,
]
BREAKING = [
    break_out,
    return_from_it,
    break_while_handling,
    break_after_an_error_that_is_kept,
    begin_while_handling,
    close_by_hand,
    let_go,
]
INIT_MODES = [rounds, within, again]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_caller_that_raises_within_its_block_is_told_from_one_that_breaks_out(wrapped, ends):
    def start():
        return Rounds(within(ends)) if wrapped else rounds(ends)

    with pytest.raises(Tired, match="of it"):
        raise_in_its_block(start)
    (said,) = ends
    assert said.startswith("The caller at rank 3 ended the run: ")
    assert "raised Tired: of it" in said
    break_out_of_its_block(start)
    assert ends[1:] == [""]


def test_an_error_on_the_way_out_is_raised_instead_of_the_callers():
    def broken():
        try:
            yield 0
        except CallerError:
            raise OSError("the others cannot be reached") from None

    with pytest.raises(OSError, match="cannot be reached"):
        raise_in_its_block(lambda: Rounds(broken()))


@pytest.mark.parametrize("start", INIT_MODES)
@pytest.mark.parametrize("loop", RAISING)
def test_a_bare_loop_that_raises_has_broken_out(loop, start, ends):
    with pytest.raises((Tired, SystemExit)):
        loop(lambda: start(ends))
    assert set(ends) <= {""}


@pytest.mark.parametrize("start", INIT_MODES)
@pytest.mark.parametrize("loop", BREAKING)
def test_a_caller_that_breaks_out_is_told_from_one_that_raises(loop, start, ends):
    loop(lambda: start(ends))
    assert ends
    assert set(ends) == {""}
