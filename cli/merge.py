"""`specgen merge`: puts the outputs of shards together."""

from collections.abc import Sequence

from specgen.cli import codes
from specgen.cli.render import Console
from specgen.job.merge import merge, parts_of
from specgen.stats import counted


def merge_outputs(output: str, parts: Sequence[str]) -> int:
    """Write the merged output and return the exit code: 3 if some rows failed.

    Raises: SpecgenError if the parts do not make a whole.
    """
    found = list(parts) or parts_of(output)
    content = merge(output, found).content
    failed = f", {content['failed']:,} failed" if content["failed"] else ""
    Console().note(f"{output}: {counted(content['lines'], 'answer')} from {counted(len(found), 'part')}{failed}")
    return codes.FAILED_ROWS if content["failed"] else codes.OK
