"""One run of a recipe, from its rows to its lines: what is left to do, and the job that does it.

Knows how the parts of a job fit together; the command line and `specgen.generate` both go through here. Prints nothing.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from specgen.errors import InputError
from specgen.job.digest_map import digest_of
from specgen.job.inputs import GivenRows, Input, duplicates_error
from specgen.job.job import Engine, Job, Progress
from specgen.job.journal import pending
from specgen.job.manifest import Manifest, TimeSeries, fingerprints, now
from specgen.job.openai_answers import BatchForm
from specgen.job.places import waiting_beside
from specgen.job.plan import Plan, RowPlanner
from specgen.job.prompts import PromptBuilder, chat_template_of, check_token_ids
from specgen.job.read_ahead import ReadAhead
from specgen.job.readers import no_rows
from specgen.job.record import Form, RecordForm
from specgen.job.target import Target
from specgen.job.writer import LineWriter
from specgen.recipe import Recipe
from specgen.stats import RunStats
from specgen.tokenizer import Tokenizer

# Seconds after which the manifest is told how far a run is: whatever ends it, no more than that is not in the report.
_NOTE_SECONDS = 60.0


class DescribedEngine(Engine, Protocol):
    """An engine that says what it runs on."""

    description: dict[str, object]


@dataclass(slots=True)
class Counts:
    """Rows that were read: in all, those of this shard, and those of them that were done before.

    changed: those of the latter whose columns are not what they were. first_changed: where the first of them stands.
    """

    rows: int = 0
    in_shard: int = 0
    skipped: int = 0
    changed: int = 0
    first_changed: str = ""


class Session:
    """A run of a recipe: its rows are being read, and what is done of them is known; then `run` it on an engine.

    recipe: as it is run (a drawn seed is that of the answers which are continued). total: rows of the input, about so
    many of a shard, None if that cannot be known before. stats: of the run, also of one that failed. has_work: whether
    any row is left to do. notes: what the user should be told.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        tokenizer: Tokenizer,
        rows: Input | GivenRows,
        target: Target,
        *,
        retry_failed: bool = False,
        shard: tuple[int, int] | None = None,
    ) -> None:
        """Look at input and output, mend what a run that was broken off left, and begin to read.

        Raises: InputError, RecipeError, ModelError for what cannot be run.
        """
        old = target.old
        if old is not None and recipe.origins.get("sampling.seed") == "drawn":
            recipe = replace(recipe, sampling=replace(recipe.sampling, seed=old.value("sampling.seed")))
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.target = target
        self.counts = Counts()
        self.stats = RunStats()
        self.total: int | None = None
        self._shard = shard
        self._series = TimeSeries()
        check_token_ids(recipe, folder)
        self._template = chat_template_of(recipe, folder, needed=rows.is_batch or recipe.input.messages is not None)
        self._planner = RowPlanner(recipe, is_batch=rows.is_batch)
        keeps_duplicates = recipe.input.duplicate_ids == "keep"
        if rows.can_be_read_twice:
            scan = rows.scan()
            if scan.duplicates and not keeps_duplicates:
                raise duplicates_error(scan.num_duplicates, scan.duplicates, rows.name)
            self.total = scan.rows if shard is None else round(scan.rows / shard[1])
        new = Manifest.of(
            recipe,
            form="openai-batch" if rows.is_batch else "record",
            shard=shard,
            prints=fingerprints(folder, self._template.text if self._template is not None else None),
        )
        created = (old or new).created
        self._form: Form = BatchForm(created, tokenizer.token_text) if rows.is_batch else record_form(recipe)
        self.notes = target.prepare(recipe, new, self._form, retry_failed=retry_failed) if target.is_file else []
        self._rows = rows.rows(unique_ids=not rows.can_be_read_twice and not keeps_duplicates)
        self._source: ReadAhead[Plan] = ReadAhead(self._plans())
        try:
            self._first = self._source.peek()
            if self._first is None and not self._rows.rows:
                raise no_rows(rows.name)
        except BaseException:
            self.close()
            raise
        self.has_work = self._first is not None

    def _plans(self) -> Iterator[Plan]:
        own = self._own(self._planner.plans(self._rows))
        return pending(own, self.target.journal, self._form, self._skip)

    def _own(self, plans: Iterable[Plan]) -> Iterator[Plan]:
        """Yield the plans of this shard's rows; a row's key decides, so it stays where it is if others come or go."""
        counts, shard = self.counts, self._shard
        for plan in plans:
            counts.rows += 1
            if shard is not None and int.from_bytes(digest_of(plan.key), "little") % shard[1] != shard[0] - 1:
                continue
            counts.in_shard += 1
            yield plan

    def _skip(self, plan: Plan) -> None:
        self.counts.skipped += 1
        if self.target.journal.has_changed(self._form.key(plan), plan.samples[0], self._form.mark(plan)):
            self.counts.changed += 1
            self.counts.first_changed = self.counts.first_changed or f"line {plan.row.line}"

    def run(
        self,
        engine: DescribedEngine,
        *,
        stop: threading.Event | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        on_begin: Callable[[LineWriter], None] | None = None,
    ) -> RunStats:
        """Run what is left and return its statistics.

        on_begin: told the writer before the first row.

        Raises: what `Job.run` raises; InputError if files cannot be made, or the engine does not fit the answers that
        are there.
        """
        target = self.target
        resolved = {
            "dtype": engine.description.get("dtype"),
            "max_model_len": engine.max_model_len,
            "eos_token_ids": list(engine.eos_token_ids),
        }
        waiting_path = waiting_beside(target.path) if target.is_file else None
        ordered = self.recipe.output.order == "input"
        with LineWriter(target.open(), ordered=ordered, waiting_path=waiting_path) as writer:
            target.begin(self.recipe, resolved, engine.description)
            job = self.job(engine, writer, stop=stop, on_progress=on_progress)
            self.stats = job.stats
            if on_begin is not None:
                on_begin(writer)
            try:
                job.run()
            except BaseException as error:
                job.stats.interrupted = True
                with suppress(InputError):
                    told = str(error) or type(error).__name__
                    self._end(job.stats, writer.num_written, is_complete=False, error=told)
                raise
        if job.is_complete:
            self._sort_if_needed()
        self._end(job.stats, writer.num_written, is_complete=job.is_complete)
        return job.stats

    def finish(self) -> None:
        """Put down that everything was done already."""
        self._sort_if_needed()
        self.close()
        self.target.touch()
        self.target.put_down({}, lines=0, failed=0, rows=self.counts.rows, rows_in_shard=self.counts.in_shard)

    def job(
        self,
        engine: Engine,
        writer: LineWriter,
        *,
        stop: threading.Event | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Job:
        """Return the job of what is left."""
        prompts = PromptBuilder(
            self.recipe,
            self.tokenizer,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            template=self._template,
            planner=self._planner,
            eos_token_ids=engine.eos_token_ids,
        )

        last_note = 0.0

        def observe(progress: Progress) -> None:
            nonlocal last_note
            self._series.observe(progress)
            if progress.seconds - last_note > _NOTE_SECONDS:
                last_note = progress.seconds
                with suppress(InputError):  # if the disk is full, the output says so
                    self.target.put_down(self._figures(job.stats), lines=writer.num_written, failed=job.stats.failed)
            if on_progress is not None:
                on_progress(progress)

        job = Job(
            self.recipe,
            engine,
            self.tokenizer,
            prompts,
            self._source,
            writer,
            self._form,
            stop=stop,
            on_progress=observe,
        )
        return job

    def _sort_if_needed(self) -> None:
        """Several runs leave lines out of order: what one had finished early, rows that failed before, new rows.

        (A batch's lines do not say where their requests stand: they stay as they are.)
        """
        journal = self.target.journal
        if self.recipe.output.order != "input" or not journal.lines:
            return
        goes_on = self._first is None or self._first.row.index > journal.last_index
        if not (journal.in_order and goes_on) and isinstance(self._form, RecordForm):
            self.target.close()
            self.target.sort(self._form)

    def _end(self, stats: RunStats, lines: int, *, is_complete: bool, **results: object) -> None:
        self.target.put_down(
            {"ended": now(), **self._figures(stats), **results},
            lines=lines,
            failed=stats.failed,
            rows=self.counts.rows if is_complete else None,
            rows_in_shard=self.counts.in_shard,
        )

    def _figures(self, stats: RunStats) -> dict[str, object]:
        stats.blank_lines = self._rows.blank_lines
        return {"statistics": stats.as_dict(), "series": self._series.points}

    def close(self) -> None:
        """Stop reading and let others write; for a session that is not run."""
        self._source.close()
        self.target.close()


def record_form(recipe: Recipe) -> RecordForm:
    """Return the form of a recipe's own lines."""
    return RecordForm(with_token_ids=recipe.output.token_ids, with_truncation=recipe.input.truncate is not None)
