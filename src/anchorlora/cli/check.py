"""`anchorlora check` and `anchorlora measure`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from anchorlora.cli.console import example, fitted, hide_loading, out, path_option, print_json
from anchorlora.cli.options import methods_beginning
from anchorlora.errors import Failed
from anchorlora.text import amount

LABELS = {  # condition -> its name, and what is measured
    "displacement": ("displacement", "|ΔA V| / |ΔA|"),
    "state": ("state", "|A V| / |A|"),
    "delta_b": ("ΔB A₀ V", "|ΔB| / |B|"),
    "response": ("response", "rho"),
    "singular": ("singular", "on U_k, V_k"),
}


@click.command(short_help="Measure which conditions a method preserves.", epilog=example("anchorlora check sfor"))
@click.argument("method", shell_complete=methods_beginning)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(method: str, as_json: bool) -> None:
    """Measure which conditions METHOD preserves, on a two-layer base model, under SGD, AdamW, and AdamW with weight decay.

    METHOD is a name (see `anchorlora methods`) or file.py:variable. Exit status 1 if a condition that it
    promises is violated.
    """
    from anchorlora.cli.parsing import method_named
    from anchorlora.measurement.check import OPTIMIZERS, violation
    from anchorlora.measurement.check import check as try_conditions

    chosen = method_named(method)
    findings = try_conditions(chosen)
    wrong = violation(findings)
    if as_json:
        rows = [{**vars(f), "preserved": f.preserved} for f in findings]
        print_json({"method": chosen.name, "definition": chosen.definition, "findings": rows, "ok": not wrong})
    else:
        out.print(f"{chosen.name} = {chosen.definition}\n")
        table = []
        for condition, label in LABELS.items():
            row = [f for f in findings if f.condition == condition]
            if row:  # no promise about singular directions
                table.append([*label, *(f"{f.value:.1e}" if f.value else "0" for f in row), verdict(row)])
        out.print(fitted(["condition", "measured", *OPTIMIZERS, "verdict"], table))
    if wrong:
        f = wrong[0]
        raise Failed(
            f"{chosen.name} promises to preserve {f.condition}, but under {f.optimizer} it is {f.value:.1e}, "
            f"and float32 storage explains at most {f.allowed:.1e}"
        )


def verdict(row: list[Any]) -> str:
    """Say in words whether a condition was preserved; what a method does not promise cannot be violated."""
    under = [f.optimizer for f in row if f.preserved]
    if len(under) == len(row):
        return "preserved"
    if not any(f.promised for f in row):
        return f"not claimed (preserved only under {', '.join(under)})" if under else "not claimed"
    return f"violated (preserved only under {', '.join(under)})" if under else "violated"


@click.command(
    short_help="Measure what changed between two PEFT adapters.",
    epilog=example("anchorlora measure adapters/old adapters/new --cores old-cores.safetensors"),
)
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@path_option("--cores", required=True, help="A cores.safetensors file from a run.")
@click.option("--data", metavar="OLD", help="Old text: also measure the loss on it, before and after.")
@click.option("--model", help="With --data: the base model, if it is not the one that AFTER names.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with every layer.")
def measure(before: Path, after: Path, cores: Path, data: str | None, model: str | None, as_json: bool) -> None:
    """Measure what changed between two saved PEFT adapters, and how much of it lies on protected directions.

    BEFORE and AFTER are runs, tasks of runs, or adapters; BEFORE may also be the base model, which had no adapter yet.
    """
    from anchorlora.measurement.adapters import compare

    drift, changed = compare(before, after, cores=cores), None
    if data is not None:
        from anchorlora.train.stages import change_on

        hide_loading()
        changed = change_on(data, before, after, model=model)
    if as_json:
        layers = {layer: layer_drift.as_dict() for layer, layer_drift in drift.layers.items()}
        extra = {} if changed is None else {"data": changed}
        print_json({**drift.as_dict(), "exact": drift.exact, "unprotected": drift.unprotected, **extra, "layers": layers})
        return
    for name, value in drift.as_dict().items():
        out.print(f"{name:10} {'-' if value is None else format(value, '.4e')}")
    if drift.rho is None:
        out.print("nothing moved")
    elif drift.exact:
        out.print(f"protected: rho is no more than rounding explains ({drift.bound:.1e})")
    elif not drift.resolved and drift.rho <= drift.bound:
        out.print(f"cannot tell: rounding explains a rho of {min(drift.bound, 1):.1e}, and chance {drift.chance:.1e}")
    else:
        out.print(f"not protected: rounding explains a rho of {drift.bound:.1e} at most")
    if drift.unprotected:
        out.print(f"not protected at all, whole weights that differ: {', '.join(drift.unprotected)}")
    if changed is None:
        return
    for name in ("loss", "metric"):
        comparison = changed[name]
        low, high = comparison["interval"]
        unit, digits = ("", 4) if name == "loss" else (" %", 1)
        out.print(
            f"{comparison['name'].replace('_', ' ')} on {amount(changed['n'], 'example')}: {comparison['before']:.{digits}f} -> "
            f"{comparison['after']:.{digits}f}{unit} (95 % interval of the change {low:+.{digits}f} to {high:+.{digits}f})"
        )
