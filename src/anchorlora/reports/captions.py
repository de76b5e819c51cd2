"""Sentences of the page that explain its tables and figures to a reader who ran nothing."""

from typing import Any

from anchorlora.schemas.text import visible

SEQUENCE = (
    "Each method learns the tasks one after another with LoRA; after every task, all tasks so far are tested. A method that "
    "protects the past should keep the accuracy of earlier tasks."
)
TRACE = (
    "While the second task is learned, every recorded step measures rho, the share of the task's change that falls on "
    "directions which the first task used. An unaligned change reads the chance level; a method that protects these "
    "directions stays under the largest value that counts as zero. The figure shows means over seeds with one standard "
    "deviation."
)
STARTS = "All methods of a seed start from one and the same state after the first task."
VIOLATIONS = (
    "One optimizer step moves the routing factor A; the violation is the part of that move on protected directions, as the "
    "optimizer made it and after the method's projection. A projected gradient does not keep an adaptive optimizer's step "
    "off them."
)
SCORES = (
    "AA: accuracy over all tasks at the end. LA: accuracy right after learning. BWT: change of earlier tasks since then; "
    "negative means forgetting. FM: loss since the best earlier score; lower is better. Bold is best, underlined second. "
    "cells: how many runs a mean is over, of how many there would be if every method had every order and seed. Bands in the "
    "figure, drawn where there is one order, are one standard deviation over its seeds."
)
PAIRS = (
    "Runs that differ in one intervention only, at the same order and seed. Learning accuracy tells whether protection was "
    "paid for with less learning."
)
COMPONENTS = "Methods that differ by single parts: which part does what?"
DRIFT = (
    "Did a task's change touch the directions that earlier tasks used? rho is the share of the change on protected "
    "directions (the core). Those directions are chosen from samples, so the same share is also shown on the first task's "
    "core and on all past cores together, and the effect on feature rows that no core was made from."
)
ANSWERS = (
    "Answers that are no label of their task, after the last task. They count as wrong; many of them mean that the format was lost."
)
GENERAL = "What the model could do before, and can still do: a benchmark that no method was trained on."
ENERGY = (
    "A core is the leading directions of sampled features. The share of their energy that it holds says how much of the "
    "past it stands for, layer by layer."
)
COST = "Time and memory depend on the machine; compare methods only where they ran on one machine in one go."
PROTOCOL = "What each method is made of, in which order tasks were learned, and every setting."
RUNS = "Accuracy of every task (columns) after every task (rows)."
BACKBONES = "The same methods, tasks, order and seeds on several backbones: does the comparison depend on one of them?"


def plain(value: Any) -> Any:
    """What a page's template puts out: text without what turns lines round; markup that was made here as it is."""
    return visible(value) if type(value) is str else value
