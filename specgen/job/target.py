"""Where the answers go: what is there already, whether it may be continued, and what is put beside it.

Knows output, manifest and recipe files. Does not know rows or engines.
"""

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from specgen.errors import InputError
from specgen.job.journal import Journal, cut_torn_line, drop_failed, read_journal, sort_output, waiting_lines
from specgen.job.manifest import Manifest, refusal
from specgen.job.places import files_beside, is_special, move_aside, recipe_beside, waiting_beside, write_file
from specgen.job.record import Form
from specgen.job.writer import FileSink, Sink, StreamSink
from specgen.recipe import Recipe
from specgen.stats import counted

logger = logging.getLogger(__name__)


class Target:
    """The output of a run. old: the manifest of the answers that are there, None if there are none.

    journal: those answers. is_file: whether it is a file, which can be continued. moved_to: where `fresh` put them.
    """

    def __init__(self, path: str, *, fresh: bool) -> None:
        """Look at what is there.

        Raises: InputError if it is not known what made it.
        """
        self.path = path
        self.is_file = path != "-" and not is_special(path)
        self.journal = Journal()
        self.old: Manifest | None = None
        self.moved_to: str | None = None
        self._fresh = fresh
        self._sink: FileSink | None = None
        self._fsync: tuple[float | None, int | None] = (None, None)
        self._manifest: Manifest | None = None
        self._recipe: object = None  # the manifest's, once a run begins with it
        self._changes: list[str] = []
        if not self.is_file or fresh or not os.path.isfile(path):
            return
        if not os.path.getsize(path) and not os.path.exists(waiting_beside(path)):
            return
        self.old = Manifest.read(path)
        if self.old is None:
            raise InputError(
                "the output is there already, and no manifest beside it says what made it",
                where=path,
                hint="--fresh moves it aside; --output names another",
            )

    def prepare(self, recipe: Recipe, new: Manifest, form: Form, *, retry_failed: bool) -> list[str]:
        """Read what is there and make it fit to be continued; returns what the user should be told.

        new: what the manifest would be if nothing were there. retry_failed: take the lines of failed rows out.

        Raises: InputError if it was made with settings that give other answers, is damaged, or is being written to.
        """
        self._fsync = (recipe.output.fsync_seconds, recipe.output.fsync_rows)
        self._manifest, self._recipe = new, new.content["recipe"]
        if self.old is None:
            return []
        content, self._changes = self.old.differences(new)
        if content:
            raise refusal(self.path, content)
        self._manifest = Manifest(dict(self.old.content))
        lock = FileSink(self.path)
        try:
            self.journal = read_journal(self.path, form)
            if self.journal.torn_bytes:
                logger.warning(
                    "%s: the last line was torn: its %d bytes are cut off", self.path, self.journal.torn_bytes
                )
                cut_torn_line(self.path, self.journal)
            if retry_failed and self.journal.failed:
                drop_failed(self.path, form)
                self.journal = read_journal(self.path, form)
        finally:
            lock.close()
        self._sink = self._file_sink()  # of the file that is there now: a new one, if lines were taken out
        if self._sink.size != self.journal.size:
            self.close()
            raise self._written_meanwhile()
        notes = [f"changed since the last run: {change}" for change in self._changes]
        num_taken = self._take_waiting(self._sink, form, with_failed=not retry_failed)
        if num_taken:
            notes.append(f"{counted(num_taken, 'answer')} of a killed run waited for earlier rows: added to the output")
        return notes

    def _take_waiting(self, sink: FileSink, form: Form, *, with_failed: bool) -> int:
        """Append the lines that waited when a run was killed; returns how many."""
        path = waiting_beside(self.path)
        num_taken = 0
        try:
            for line in waiting_lines(path, form, self.journal, with_failed=with_failed):
                sink.write(line)
                num_taken += 1
        except InputError:
            self.close()
            raise
        with suppress(OSError):  # next time, all of them are there already
            os.unlink(path)
        return num_taken

    def _written_meanwhile(self) -> InputError:
        return InputError(
            "another run has written this output meanwhile",
            where=self.path,
            hint="the same command goes on from there",
        )

    def _file_sink(self) -> FileSink:
        return FileSink(self.path, fsync_seconds=self._fsync[0], fsync_rows=self._fsync[1])

    def open(self) -> Sink:
        """Return what takes the lines; answers that are there stay; `fresh` moves them, and what is beside them, aside.

        Raises: InputError.
        """
        if not self.is_file:
            return StreamSink(self.path)
        if self._sink is None:
            if os.path.exists(self.path):
                self._file_sink().close()  # nobody else may be writing to it
            if not self._fresh and os.path.exists(self.path) and os.path.getsize(self.path):
                raise self._written_meanwhile()
            is_there = self._fresh and os.path.lexists(self.path)
            suffix = move_aside(([self.path] if self._fresh else []) + files_beside(self.path))
            self.moved_to = f"{self.path}{suffix}" if is_there else None
            self._sink = self._file_sink()
        sink, self._sink = self._sink, None
        return sink

    def begin(self, recipe: Recipe, resolved: Mapping[str, object], device: Mapping[str, object]) -> None:
        """Put manifest and recipe beside the output, before its first line.

        Raises: InputError if that fails, or what the engine resolved gives other answers than those that are there.
        """
        if self._manifest is None:
            return
        if self.old is not None:
            content, _ = self.old.differences(Manifest(self._manifest.content | {"resolved": dict(resolved)}))
            if content:
                raise refusal(self.path, content)
        self._manifest.content |= {"resolved": dict(resolved), "recipe": self._recipe}
        self._manifest.begin_session(device, self._changes)
        self._manifest.write(self.path)
        recipe_path = recipe_beside(self.path)
        assert recipe_path is not None
        write_file(recipe_path, recipe.to_yaml_with_origins(), "recipe beside the output")

    def put_down(
        self, session: Mapping[str, Any], *, lines: int, failed: int, rows: int | None = None, rows_in_shard: int = 0
    ) -> None:
        """Put down what is there now: so many lines more, so many of them failed.

        session: what there is to say of the run that runs, or ends. rows: of the whole input, None unless all have
        their lines now.

        Raises: InputError if that fails.
        """
        if self._manifest is None:
            return
        self._manifest.note_session(session)
        self._manifest.content |= {
            "complete": rows is not None,
            "lines": self.journal.lines + lines,
            "failed": self.journal.failed + failed,
            "rows": rows,
            "rows_in_shard": rows_in_shard if rows is not None else None,
        }
        self._manifest.write(self.path)

    def touch(self) -> None:
        """Make the output, empty, if it is not there: a shard may have no rows."""
        if self.is_file and self.old is None and (self._fresh or not os.path.exists(self.path)):
            self.open().close()

    def sort(self, form: Form) -> None:
        """Put the lines into the order of the input."""
        lock = self._file_sink()
        try:
            sort_output(self.path, form)
        finally:
            lock.close()

    def close(self) -> None:
        """Let others write; for an output that was not opened."""
        if self._sink is not None:
            self._sink.close()
            self._sink = None
