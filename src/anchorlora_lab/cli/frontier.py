"""`anchorlora frontier`: learning against keeping, by curves over rate, epochs and scale."""

from __future__ import annotations

from pathlib import Path

import click

from anchorlora.cli.console import example, out, path_option
from anchorlora.text import amount
from anchorlora_lab.cli.engines import seeds_of


def names(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str]:
    """Return comma-separated names."""
    return [name.strip() for name in (value or "").split(",") if name.strip()]


@click.command(
    short_help="Measure methods by their curves of learning and keeping.",
    epilog=example("anchorlora frontier Qwen/Qwen3-0.6B --data skills --out runs/frontier"),
)
@click.argument("model")
@path_option("--out", "to", required=True, help="The folder of records; the same one goes on.")
@path_option("--data", envvar="ANCHORLORA_DATA", required=True, help="The folder that holds standard_cl and cl_benchmark.")
@click.option("--rows", callback=names, help="Rows, comma-separated; all by default.")
@click.option(
    "--skills",
    callback=names,
    help="New skills, comma-separated: labels, card, passage, style; or, on which nothing was chosen, topics, headline, names.",
)
@click.option("--seeds", default="42,7,2026", show_default=True, help="Seeds, comma-separated.")
@click.option("--most", type=click.IntRange(min=0), help="Stop after so many runs; with 0, only write the table.")
@click.option("--chosen-rate", is_flag=True, help="Run each row only at the rate that the records choose.")
@click.option("--choosing", default="labels,card", show_default=True, callback=names, help="Skills that choose each row's setting.")
def frontier(
    model: str,
    to: Path,
    data: Path,
    rows: list[str],
    skills: list[str],
    seeds: str,
    most: int | None,
    chosen_rate: bool,
    choosing: list[str],
) -> None:
    """Train MODEL on new skills by every row of the frontier, and measure what it learns and what it keeps.

    MODEL is a name or a folder. A run is a line of DIR/MODEL/records.jsonl, which grows as runs end. The same command goes on
    with what is left, and several processes can share the folder. frontier.md and frontier.svg beside it hold the table and the
    picture.
    """
    from anchorlora.errors import InvalidValue
    from anchorlora_lab.frontier.bench import bench, folder_of, read_records
    from anchorlora_lab.frontier.skills import refuse_unknown
    from anchorlora_lab.frontier.tables import chosen_rates, frontier_tables, picture
    from anchorlora_lab.report.figures.style import as_bytes
    from anchorlora_lab.report.writers import markdown, text

    drawn = seeds_of(seeds)
    refuse_unknown(choosing)
    if not (data / "standard_cl").is_dir():
        raise InvalidValue(f"--data {data} has no folder standard_cl; give the folder that holds standard_cl and cl_benchmark")
    folder = folder_of(to, model)
    rates = chosen_rates(read_records(folder), choosing=choosing) if chosen_rate else None
    made = bench(model, to, data, rows=rows, skill_names=skills, seeds=drawn, rates=rates, most=most, say=out.print)
    records = read_records(folder)
    if tables := frontier_tables(records, choosing=choosing):
        (folder / "frontier.md").write_text("\n".join(map(markdown, tables)), encoding="utf-8")
        (folder / "frontier.svg").write_bytes(as_bytes(picture(records), ("svg",))["svg"])
        out.print(*map(text, tables), sep="\n")
    out.print(f"{amount(made, 'run')} made; the records are in {folder}")
