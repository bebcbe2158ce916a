"""What a promise of privacy says and has cost, as a section of a page."""

from __future__ import annotations

from partsong.evaluate.findings import Report
from partsong.evaluate.page import Column, Markup, element, row, significant, table

MASKED = "Single uploads were masked: nobody but their senders saw them. The server knows their sums."
IN_SIMULATION = (
    "Errors, shares, drifts, numbers of rows and the parties' own parts on this page are known because all parties ran "
    "in one process. None of them was sent, and none is in the model."
)
NO_NOISE = "No noise was added: nothing is promised about rows or parties."
PLAN = (
    "ε is what the whole run has cost, over all rounds a party sent in. If it had stopped early for a reason that "
    "depends on the data, only the ε that it was planned for would be a promise."
)


def privacy(report: Report) -> list[Markup]:
    """About whom ε is, what each party has spent, and what is here that no party would release."""
    masked = [element("p", MASKED, class_="kept")] if report.is_masked else []
    if report.privacy is None:
        return [
            element("p", NO_NOISE, class_="verdict"),
            *masked,
        ]
    told = report.privacy
    verdict = (
        f"ε = {significant(told['epsilon_spent'])} at δ = {told['delta']:g}, unit {told['unit']}, relation "
        f"{told['relation']}: {told['promise']}."
    )
    columns = [Column("Party", False), Column("ε spent")]
    rows = [row(columns, [name, significant(spent)]) for name, spent in told["epsilon_by_party"].items()]
    noise = f"{told['noise']} noise of {significant(told['noise_multiplier'])} times the sensitivity. {PLAN}"
    return [
        element("p", verdict, class_="verdict"),
        table(f"What each party has spent: {noise}", columns, rows),
        element("p", element("strong", "In this simulation only. "), IN_SIMULATION, class_="kept"),
        *masked,
    ]
