# SPDX-License-Identifier: Apache-2.0
"""What a comparison comes to, from its numbers."""

from dataclasses import replace

import pytest
from records import fit_record

from fl_lightning.report import MetricSeries, write_report
from fl_lightning.report.conclusion import LOCAL, POOLED, conclude
from fl_lightning.report.number_formats import duration, notation, number, spread
from fl_lightning.report.repetitions import Repetition, Spread
from fl_lightning.report.tables import MethodSummary

# By row, the worst client's value and the mean, seed by seed.
OPPOSITE = {
    "FedAvg": ((0.09, 0.102), (0.58, 0.60)),
    "QFedAvg": ((0.32, 0.334), (0.55, 0.57)),
    LOCAL: ((0.70, 0.718), (0.81, 0.82)),
    POOLED: ((0.10, 0.12), (0.60, 0.62)),
}
ALONE = (
    "Clients are better off alone (local only). Whoever is worst has acc 0.709 ± 0.013, with the methods at best 0.327 "
    "± 0.010 (QFedAvg). The mean is 0.815 ± 0.007, with the methods at best 0.590 ± 0.014 (FedAvg)."
)


def repeated(numbers):
    return {Repetition(0, seed): number for seed, number in enumerate(numbers)}


def concluded(rows, mode="max", **changes):
    made = [
        MethodSummary(
            name, name if name in (LOCAL, POOLED) else "", numbers={"worst": repeated(worst), "mean": repeated(mean)}
        )
        for name, (worst, mean) in rows.items()
    ]
    return conclude([replace(one, **changes.get(one.method, {})) for one in made], "acc", mode)[0]


def test_being_better_off_alone_comes_before_what_a_method_brings():
    paragraphs = concluded(OPPOSITE)
    assert paragraphs[0] == ALONE
    assert paragraphs[1] == (
        "One model on all data (pooled) does worse in acc than QFedAvg for whoever is worst, 0.110 ± 0.014 against "
        "0.327 ± 0.010."
    )
    assert paragraphs[2] == (
        "QFedAvg helps: whoever is worst goes from acc 0.096 ± 0.008 with FedAvg to 0.327 ± 0.010, and the mean from "
        "0.590 ± 0.014 to 0.560 ± 0.014."
    )
    assert len(paragraphs) == 3


OPEN = "There is no clear winner: what is compared lies within what repetitions differ by. "
POOLED_IS_WORSE = "One model on all data (pooled) does worse in acc than A "
WEAK = ((0.40, 0.41), (0.60, 0.61))
GOOD = ((0.50, 0.51), (0.70, 0.71))
NOISY = ((0.40, 0.52), (0.60, 0.72))
LOSS = ((2.0, 2.1), (1.0, 1.01))


@pytest.mark.parametrize(
    ("rows", "mode", "starts"),
    [
        ({"A": WEAK, "B": GOOD}, "max", ["B helps: "]),
        ({"A": GOOD, "B": WEAK}, "max", ["B does not help: "]),
        ({"A": WEAK, "B": NOISY}, "max", [OPEN + "B may help or not: "]),
        ({"A": WEAK, "B": (NOISY[0], GOOD[1])}, "max", ["B helps on average; for whoever is worst, that may be cha"]),
        ({"A": WEAK, "B": (NOISY[0], GOOD[1]), "C": WEAK}, "max", [
            "B does best of 2 other methods. It helps on average; for whoever is worst, that may be chance: "
        ]),
        ({"A": WEAK, "B": GOOD, "C": NOISY}, "max", ["Of 2 other methods, B helps most: "]),
        ({"A": GOOD, "B": WEAK, "C": WEAK}, "max", ["None of 2 other methods helps, and B comes closest: "]),
        ({"A": NOISY, "B": WEAK, "C": GOOD}, "max", [OPEN + "Of 2 other methods, C comes out best"]),
        ({"A": WEAK, LOCAL: NOISY}, "max", [OPEN + "Clients may be as well off alone"]),
        ({"A": WEAK, "B": GOOD, LOCAL: WEAK}, "max", ["B helps: ", "Clients are worse off alone (local only). "]),
        ({"A": WEAK, LOCAL: (GOOD[0], WEAK[1])}, "max", ["Whoever is worst is better off alone (local only). "]),
        ({"A": WEAK, LOCAL: (WEAK[0], GOOD[1])}, "max", ["On average, clients are better off alone (local only). "]),
        ({"A": GOOD, LOCAL: (WEAK[0], GOOD[1])}, "max", ["Whoever is worst is worse off alone (local only). "]),
        ({"A": GOOD, LOCAL: (GOOD[0], WEAK[1])}, "max", ["On average, clients are worse off alone (local only). "]),
        ({"A": GOOD, POOLED: WEAK}, "max", [
            POOLED_IS_WORSE + "for whoever is worst, 0.405 ± 0.007 against 0.505 ± 0.007; and than A on average, 0.605 "
        ]),
        ({"A": GOOD, POOLED: (GOOD[0], WEAK[1])}, "max", [POOLED_IS_WORSE + "on average, 0.6"]),
        ({"A": WEAK, POOLED: GOOD}, "max", []),
        ({"A": LOSS, LOCAL: GOOD}, "min", ["Clients are better off alone (local only). "]),
        ({"A": ((0.4,), (0.6,)), "B": ((0.5,), (0.7,))}, "max", ["B helps: "]),
        ({"A": GOOD, "B": ((), ())}, "max", []),
    ],
)  # fmt: skip
def test_what_is_said_and_in_which_order(rows, mode, starts):
    paragraphs = concluded(rows, mode)
    assert len(paragraphs) == len(starts)
    for paragraph, start in zip(paragraphs, starts, strict=True):
        assert paragraph.startswith(start)
        assert paragraph.endswith(" With one seed, this may be chance.") == (len(rows["A"][0]) == 1)


def test_a_bound_with_one_of_the_seeds_may_be_chance():
    first, second = concluded({"A": WEAK, "B": GOOD, LOCAL: ((0.9,), (0.9,))})
    assert first.startswith("Clients are better off alone (local only). Whoever is worst has acc 0.900, with")
    assert first.endswith(" With one seed, this may be chance.")
    assert second.startswith("B helps: ")


def test_rows_with_an_infinite_value_are_named_and_left_out():
    found = concluded({"A": WEAK, "B": GOOD, "C": NOISY}, B={"infinite": True})
    assert found[0] == "With B, the acc of a client is infinite at the end."
    assert found[1].startswith(OPEN + "C may help or not")


def test_a_report_begins_with_it_and_counts_the_clients_own_models(tmp_path):
    def record(method):
        return fit_record(method, rounds=1)

    def personal(one, value):
        """The same fit, with an own model for each client, all as good as this."""
        last, series = one.evaluations[-1], one.metrics[0]
        values = replace(last, values={**last.values, "personal/test_acc": (value,) * 4},
                         modes={**last.modes, "personal/test_acc": "max"})  # fmt: skip
        summaries = dict.fromkeys(series.summaries, (value,))
        own = MetricSeries("personal/test_acc", "test", "max", (1,), summaries)
        return replace(one, evaluations=(*one.evaluations[:-1], values), metrics=(*one.metrics, own))

    pytest.importorskip("plotly")
    alone = replace(record(LOCAL), is_bound=True)
    rows = [record("FedAvg"), personal(record("Ditto"), 0.987), personal(alone, 0.9871)]
    text = write_report(rows, tmp_path / "report.html").read_text(encoding="utf-8")
    lede = text.split('<div class="lede">')[1].split("</div>")[0]
    assert lede.startswith(
        "<p>Clients are better off alone (local only). Whoever is worst has test_acc 0.987, with the"
    )
    assert "\u2068Ditto\u2069 helps: whoever is worst goes from test_acc 0." in lede
    assert "Clients have models of their own with Ditto" in text


def test_numbers_that_are_read_together_have_as_many_digits():
    assert [number(value, notation(column)) for column in ([0.664, 9.95e-4], [3e-5], [5e8]) for value in column] == [
        "0.664", "0.001", "3.00e-05", "5.00e+08",
    ]  # fmt: skip
    assert spread(Spread(0.664, 9.95e-4), notation([0.717, 3.04e-5])) == "0.664 ± 0.001"
    assert [duration(value) for value in (0.04, 9.96, 59.6, 319.99, 599.6, 6000.0, 21570.0)] == [
        "0.0 s", "10 s", "1 min 0 s", "5 min 20 s", "10 min", "1 h 40 min", "6 h 0 min",
    ]  # fmt: skip
    assert [number(value) for value in (None, 0.0, 12.3456, 12345.67)] == ["-", "0.000", "12.346", "12,345.7"]
