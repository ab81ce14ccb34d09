"""The commands and their options. Imported only where typer is installed."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as RichTable

from fxcomm.analysis.roofline import DEVICES
from fxcomm.commands.calibrate import calibrate as calibrated
from fxcomm.commands.compare_plans import compare_plans, read_plan
from fxcomm.commands.doctor import doctor as examined
from fxcomm.commands.document import Document
from fxcomm.commands.explain import explain as explained
from fxcomm.commands.explain import read_tuned, write_report
from fxcomm.commands.simulate import NAMES, capture_named
from fxcomm.commands.simulate import simulate as simulated

app = typer.Typer(
    help="fxcomm: what it planned, why a step takes its time, and what links cost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print data for programs.")]


@app.command()
def explain(
    path: Annotated[Path, typer.Argument(help="A dump directory, or its tuned-N.json.")],
    html: Annotated[Path | None, typer.Option(help="Write the report as this HTML file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Why a step takes as long as it does, and what would help."""
    tuned = read_tuned(path)
    document = explained(tuned)
    if html is not None:
        write_report(html, tuned)
    show(document, as_json)


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="A plan-N.json or tuned-N.json.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
    as_json: AsJson = False,
) -> None:
    """What differs between two plans. Exits with 1 if anything does."""
    show(compare_plans(read_plan(first), read_plan(second)), as_json)


Model = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(NAMES)}; a script.py whose model() returns a module and the keyword "
        "arguments of a batch; or a file that 'fxcomm capture' wrote."
    ),
]
Device = Annotated[str, typer.Option(help=f"What computes: {', '.join(DEVICES)}.")]
Batch = Annotated[int, typer.Option(help="Sequences of a rank, for a model by name.", min=1)]
Sequence = Annotated[int, typer.Option(help="Tokens of a sequence.", min=2)]


@app.command()
def simulate(
    model: Model,
    world: Annotated[int, typer.Option(help="How many ranks.", min=1)],
    link: Annotated[str, typer.Option(help="What a rank sends: 100Gbit/s, 12.5GB/s.")],
    device: Device = "h100",
    batch: Batch = 1,
    sequence: Sequence = 2048,
    seconds: Annotated[float, typer.Option(help="How long to search.", min=0.0)] = 1.0,
    as_json: AsJson = False,
) -> None:
    """A training step of a model on any number of ranks, without one of them."""
    show(
        simulated(
            model,
            world_size=world,
            link=link,
            device=device,
            batch=batch,
            sequence=sequence,
            budget_s=seconds,
        ),
        as_json,
    )


@app.command()
def capture(
    model: Model,
    out: Annotated[Path, typer.Option(help="The file to write: .json or .json.gz.")],
    device: Device = "h100",
    batch: Batch = 1,
    sequence: Sequence = 2048,
) -> None:
    """Saves a model's training step, for 'simulate' without the model."""
    capture_named(model, device, batch, sequence).save(out)


@app.command()
def calibrate(
    seconds: Annotated[float, typer.Option(help="How long to measure.", min=0.1)] = 1.8,
    as_json: AsJson = False,
) -> None:
    """What collectives cost between the ranks that torchrun started."""
    document = calibrated(seconds)
    if document is not None:
        show(document, as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Whether this machine can train with fxcomm, and what would fail. Exits with 1 if so."""
    show(examined(), as_json)


def show(document: Document, as_json: bool) -> None:
    """Prints a document, with colours and frames only on a terminal, and exits with its code."""
    if as_json:
        sys.stdout.write(document.to_json() + "\n")
    elif sys.stdout.isatty():
        _show_on_terminal(document)
    else:
        sys.stdout.write(document.to_text())
    raise typer.Exit(document.exit_code)


def _show_on_terminal(document: Document) -> None:
    console = Console()
    for part in document.parts:
        if isinstance(part, str):
            console.print(part + "\n", markup=False, highlight=False)
            continue
        table = RichTable(title=part.title, title_justify="left")
        for name, numeric in zip(part.columns, part.numeric, strict=True):
            table.add_column(name, justify="right" if numeric else "left")
        for row in part.rows:
            table.add_row(*row)
        console.print(table)
