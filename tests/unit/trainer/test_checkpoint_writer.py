# SPDX-License-Identifier: Apache-2.0
"""What the driver knows of the checkpoints that a second thread writes."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from lockstep.errors import CheckpointWriteError
from lockstep.trainer.checkpoint_writer import CheckpointWriter
from lockstep.worker import CheckpointOnDisk, Snapshot


@pytest.fixture
def folder(tmp_path):
    """Writes a snapshot into a file of its step; `steps` are those that were written."""

    def write(snapshot):
        found.begun.set()
        path = tmp_path / f"step-{snapshot.step}"
        path.write_text(f"call {snapshot.call}")
        found.steps.append(snapshot.step)
        return str(path)

    found = SimpleNamespace(
        steps=[],
        write=write,
        path=tmp_path,
        begun=threading.Event(),
        end_stopped_workers=lambda: None,
    )
    return found


def writer_to(folder):
    fetcher = SimpleNamespace(
        finish=lambda: None,
        request=lambda: None,
        drop=lambda: None,
    )
    engine = SimpleNamespace(
        start_snapshot_fetcher=lambda to: fetcher, end_stopped_workers=folder.end_stopped_workers
    )
    return CheckpointWriter(folder.write, engine)


def written_after(writer, *snapshots):
    for snapshot in snapshots:
        writer.keep(snapshot)
        assert writer.finish() is None
    return list(writer.written)


def test_a_step_that_a_recovery_has_led_to_again_is_written_once(folder):
    writer = writer_to(folder)
    first, again, later = (Snapshot(5, {}, call=call) for call in (0, 0, 1))
    (known,) = written_after(writer, first, again)
    assert known == CheckpointOnDisk(5, 0, str(folder.path / "step-5"))
    # After `load` another call has led there, to another state, in the same place.
    assert [each.call for each in written_after(writer, later)] == [1]
    assert folder.steps == [5, 5]
    # Between two calls (SIGTERM, `save`) the state may have been changed by anything.
    written_after(writer, Snapshot(6, {}), Snapshot(6, {}))
    assert folder.steps == [5, 5, 6, 6]
    writer.close(raises=True)


def test_one_that_is_not_there_any_more_is_not_known(folder):
    writer = writer_to(folder)
    written_after(writer, Snapshot(5, {}, call=0), Snapshot(10, {}, call=0))
    (folder.path / "step-5").unlink()  # as the rotation does
    assert [each.step for each in writer.written] == [10]
    writer.close(raises=True)


def test_none_is_written_while_they_are_read(folder):
    writer = writer_to(folder)
    with writer.keep_written():
        writer.keep(Snapshot(5, {}, call=0))
        assert not folder.begun.wait(0.2)
    assert writer.finish() is None
    assert folder.begun.is_set()
    writer.close(raises=True)


def test_a_write_is_waited_for_and_not_for_ever(folder):
    may_write, write = threading.Event(), folder.write

    def slowly(snapshot):
        may_write.wait()
        return write(snapshot)

    folder.write = slowly
    writer = writer_to(folder)
    writer.finish_writing(1000)  # nothing is written
    writer.keep(Snapshot(5, {}, call=0))
    writer.finish_writing(0.05)
    assert folder.steps == []
    may_write.set()
    writer.finish_writing(1000)
    assert folder.steps == [5]
    with writer.keep_written():
        writer.keep(Snapshot(10, {}, call=0))
        writer.finish_writing(1000)
    writer.close(raises=True)
    assert folder.steps == [5, 10]


def test_while_a_write_is_waited_for_stopped_workers_are_ended(folder):
    """One that was stopped as it wrote its part would make the driver wait for ever."""
    is_ended, write = threading.Event(), folder.write

    def wait_for_the_worker(snapshot):
        if not is_ended.wait(20):
            raise OSError("the worker is still stopped")
        return write(snapshot)

    folder.write, folder.end_stopped_workers = wait_for_the_worker, is_ended.set
    writer = writer_to(folder)
    writer.keep(Snapshot(5, {}, call=0))
    assert writer.finish() is None
    assert folder.steps == [5]
    writer.close(raises=True)


def test_what_waits_is_dropped_and_what_is_being_written_is_waited_for(folder):
    may_write, write = threading.Event(), folder.write

    def slowly(snapshot):
        folder.begun.set()
        may_write.wait()
        return write(snapshot)

    folder.write = slowly
    writer = writer_to(folder)
    writer.keep(Snapshot(5, {}, call=0))
    folder.begun.wait()
    given_back = SimpleNamespace(put_back=lambda state: may_write.set())
    writer.keep(Snapshot(10, {}, given_back, call=0))
    writer.go_on_from(0)
    assert folder.steps == [5]
    writer.close(raises=True)
    assert folder.steps == [5]


def test_the_failure_of_a_checkpoint_of_steps_that_were_left_is_no_later_calls(folder):
    writer = writer_to(folder)
    writer.note_failure(OSError("full"))
    writer.go_on_from(0)
    assert writer.result("of the next call") == "of the next call"
    writer.close(raises=True)


def test_after_an_error_what_was_copied_is_fetched_and_not_waited_for_for_long(folder):
    writer, waits = writer_to(folder), []
    writer._fetcher.finish = waits.append
    with pytest.raises(ZeroDivisionError), writer.during_training(lambda: Snapshot(5, {})):
        1 / 0  # noqa: B018
    assert waits == [2.0]
    writer.close(raises=True)


def test_a_failure_under_sigterm_is_told_where_the_program_goes_on(folder):
    """A program whose own handler only notes the signal."""

    def full(snapshot):
        raise OSError("no space left")

    folder.write = full
    writer, noted = writer_to(folder), []
    before = signal.signal(signal.SIGTERM, lambda *_: noted.append("SIGTERM"))
    try:
        with writer.during_training(lambda: Snapshot(5, {})):
            os.kill(os.getpid(), signal.SIGTERM)
        assert noted == ["SIGTERM"]
        with pytest.raises(CheckpointWriteError, match="could not be written"):
            writer.result({})
    finally:
        signal.signal(signal.SIGTERM, before)
    writer.close(raises=True)


def no_threads(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_one_for_which_no_thread_can_be_started_ends_no_later_one(folder, monkeypatch):
    writer = writer_to(folder)
    with monkeypatch.context() as limited:
        no_threads(limited)
        writer.keep(Snapshot(5, {}, call=0))
        assert writer.finish() is None
        writer.keep(Snapshot(10, {}, call=0))
    assert folder.steps == [5]
    writer.keep(Snapshot(15, {}, call=0))
    writer.close(raises=True)
    assert folder.steps == [5, 15]


def test_ctrl_c_as_one_is_handed_over_ends_no_later_one(folder, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    writer = writer_to(folder)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(ThreadPoolExecutor, "submit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.keep(Snapshot(5, {}, call=0))
    writer.keep(Snapshot(10, {}, call=0))
    writer.close(raises=True)
    assert folder.steps == [10]


def test_an_older_checkpoint_does_not_make_up_for_one_that_was_lost_on_its_way(folder):
    writer = writer_to(folder)
    with writer.keep_written():
        writer.keep(Snapshot(5, {}, call=0))
        writer.note_failure(OSError("it does not fit into the object store"))
    with pytest.raises(CheckpointWriteError, match="object store"):
        writer.result({})
    assert folder.steps == [5]
    with writer.keep_written():
        writer.note_failure(OSError("once more"))
        writer.keep(Snapshot(10, {}, call=0))
    writer.close(raises=True)  # the later one makes up for it
