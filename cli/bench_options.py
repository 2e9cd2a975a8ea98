"""The arguments of `specgen bench` and `specgen profile`."""

from pathlib import Path
from typing import Annotated

import typer

Drafts = Annotated[
    str | None,
    typer.Option(
        "--num-spec-tokens",
        "-k",
        metavar="K[,K…]",
        help="Drafts a step; several are measured one after another. none: plain decoding of the model as if it had no"
        " draft layers (random weights only). Without --shape, plain decoding (0) is always among them. [default: 0"
        " and the recipe's, or 3]",
    ),
]
Recipe = Annotated[Path | None, typer.Option(help="The recipe to measure. [default: the bundled model and prompts]")]
Model = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="model.path, over the recipe's: a bundled name, a folder, a hub id."),
]
Config = Annotated[
    Path | None,
    typer.Option(  # by name: typer 0.27 calls --CONFIG what has its own name as metavar
        "--config", metavar="CONFIG", help="A config.json; with --random-weights, in place of a model's folder."
    ),
]
RandomWeights = Annotated[
    bool, typer.Option("--random-weights", help="Fill the model of --config with random weights, at a real scale.")
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="ROWSxINxOUT",
        help="Rows, prompt tokens, answer tokens: all rows at once, prompts of random ids in place of a file's rows, no"
        " prefix cache, temperature 1. May be repeated, or a list with commas. With --set engine.max_num_seqs=N, N rows"
        " at once, whose places the others take. [with --random-weights: 32x512x256]",
    ),
]
SkipPrompts = Annotated[
    bool,
    typer.Option(
        "--skip-prompts",
        help="Of shapes: take the prompts as computed, whatever the cache holds for them. Times decoding alone, which"
        " with long prompts is a small part of a run.",
    ),
]
Acceptance = Annotated[
    str | None,
    typer.Option(
        "--synthetic-acceptance",
        metavar="R1,R2,…",
        help="Accept drafts by lot: R1 is the share of steps that keep the first draft, R2 the first two, …",
    ),
]
Exactness = Annotated[
    str | None,
    typer.Option(
        metavar="MODE[,MODE]",
        help="engine.exactness; with exact,fast both are measured, each in a process of its own. [default: the"
        " recipe's, or exact]",
    ),
]
Rows = Annotated[int, typer.Option(min=1, help="Rows of the input to use.")]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens of an answer. [default: the recipe's, or 128; of a shape its own]")
]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds of each side; medians are shown.")]
Temperature = Annotated[float | None, typer.Option(help="Temperature. [default: the recipe's, or 0; 1 with --shape]")]
Peer = Annotated[
    bool, typer.Option("--peer", help="Run the rows through transformers' generate too (greedy rows only).")
]
Traced = Annotated[
    bool,
    typer.Option(
        "--idle/--no-idle",
        help="On a GPU: after everything that is timed, trace some steps of each shape and K, for the device's idle"
        " share and attention's time.",
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Keep these traces there, for Perfetto (.json or .json.gz), on the CPU too; with several shapes or K's,"
        " one beside it for each.",
    ),
]

RowCounts = Annotated[str, typer.Option("--rows", metavar="N[,N…]", help="Rows at once; a table for each.")]
NumDrafts = Annotated[int, typer.Option("--num-spec-tokens", "-k", min=0, help="Drafts a step.")]
Contexts = Annotated[
    str,
    typer.Option(
        "--context", metavar="N[,N…]", help="Tokens that each row holds; a table for each, by each of --rows."
    ),
]
OneExactness = Annotated[str | None, typer.Option("--exactness", help="engine.exactness. [default: exact]")]
Top = Annotated[int, typer.Option(min=0, help="Kernels to list for each kind of work, the longest first.")]
Traces = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep the traces there, two for each table.")]
Markdown = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Write the tables there, as Markdown (an old file is replaced); - is stdout."),
]
