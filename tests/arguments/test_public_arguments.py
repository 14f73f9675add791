# SPDX-License-Identifier: Apache-2.0
"""Every argument of every public constructor and function with values that it may not be able to mean.

Each call ends in an object, and then :func:`reason` says why the value means something; or in an error that names
argument, rule and value. ``-s`` prints how many calls ended how.
"""

import math
import re
from collections import Counter
from functools import cache
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from surface import callees, public_api, shared_arguments

HOSTILE = {
    "None": None,
    "NaN": math.nan,
    "inf": math.inf,
    "-1": -1,
    "1.5": 1.5,
    "''": "",
    "[]": [],
    "object()": object(),
    "True": True,
    "10**400": 10**400,
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.empty(50, device="meta"),
    "0-d": torch.tensor(1.5),
    "NUL": "a\0b",
    "class": Counter,
}
CALLEES = {callee.name.removeprefix("fl_lightning."): callee for callee in callees()}
ends = Counter(clear=0, cryptic=0, accepted=0)

LOSSES = r"ClientMessage\((loss|train_loss)|RoundRecord\(train_loss"
ACCEPTED = {
    "inf 1.5 True 0-d": ((r"server_state\(start$", "a number to begin with"),),
    "-1": (
        (r"\(seed$", "any integer is a seed"),
        (r"ScaledUpdates\(factor$", "turns the update around"),
        (r"server_state\(start$", "a number to begin with"),
        (r"attacks\.\w+\(labels$", "the last part of a batch"),
        (rf"({LOSSES}|LinearProgram\(value)$", "losses and objectives have any sign"),
    ),
    "NaN inf": ((rf"({LOSSES}|RoundRecord\(step_norm)$", "the server sees that a client diverged"),),
    "''": ((r"Backend\(reason$", "nothing faster exists"), (r"FitRecord\(command$", "a notebook has no command line")),
    "[]": (
        (r"attacks\.\w+\(clients$", "nobody is dishonest: what dishonest_clients(share=0) returns"),
        (r"Record\(client_(ids|names)$", "no client took part, or names are the ids"),
        (r"Selection\((client_ids|drop_outs)$", "no client was available, or none dropped out"),
        (r"(RoundSeries|FitRecord)\(", "before the first round"),
        (r"FitDescription\(names$", "clients have numbers alone"),
        (r"UniformSampler\(always$", "all are drawn"),
        (r"Absence\(client_ids$", "no clients"),
        (r"LocalWork\((parameters|rates)$", "before the first step"),
        (r"(labels_of|Samples)\(dataset$", "no samples, no labels"),
        (r"label_counts\(parts$", "no clients, no rows"),
        (r"check_server_rule\(skip$", "all checks"),
    ),
    "class": (
        (r"(ByKey\(keys|LoaderSettings\((collate_fn|worker_init_fn))$", "a function of a sample, or of samples"),
        (r"LocalWork\((forward_context|batches)$", "a function"),
    ),
}
"""By value: the arguments that take it, and what it means there. What annotations allow is in :func:`reason`."""


def reason(call: str, label: str, annotation: Any) -> str | None:
    """Why an argument takes a value; ``None`` if it should not."""
    kinds = (annotation, *get_args(annotation))
    if label == "None" and type(None) in kinds:
        return "None is in the annotation"
    if label == "True" and bool in kinds:
        return "a flag"
    if label in ("1.5", "0-d") and float in kinds:
        return "in the number's range"
    if label == "0-d" and torch.Tensor in kinds:
        return "a tensor"
    rules = [rule for labels, rules in ACCEPTED.items() if label in labels.split() for rule in rules]
    return next((why for pattern, why in rules if re.search(pattern, call)), None)


def words(value: Any) -> list[str]:
    """How an error may show a value."""
    if isinstance(value, torch.Tensor):
        return ["tensor", "Tensor", "1.5", "()", "meta", "cpu", str(value.dtype), str(list(value.shape))]
    if type(value) is int and value > 2**1023:
        return ["int", f"an integer of {value.bit_length()} bits"]
    return [repr(value), type(value).__name__, *(("none", "0", "()") if value == [] else ())]


def is_clear(error: Exception, argument: str, value: Any) -> bool:
    """Whether an error names argument, rule and value, in one short line."""
    rule, _, found = str(error).partition(", found ")
    named = re.search(rf"\b{argument}\b", rule) is not None and "must" in rule and "\n" not in rule + found
    return isinstance(error, (TypeError, ValueError)) and named and any(word in found for word in words(value))


@cache
def valid(name: str) -> dict[str, Any]:
    return CALLEES[name].valid()


@pytest.mark.parametrize("name", CALLEES)
def test_hostile_values(name):
    callee, wrong = CALLEES[name], []
    callee.call(**valid(name))
    for argument in callee.arguments:
        for label, value in HOSTILE.items():
            call = f"{name}({argument}"
            try:
                callee.call(**{**valid(name), argument: value})
            except Exception as error:
                end = "clear" if is_clear(error, argument, value) else "cryptic"
                wrong += [f"{call}={label}): {type(error).__name__}: {error}"] if end == "cryptic" else []
            else:
                end = "accepted"
                known = reason(call, label, callee.annotation(argument))
                wrong += [] if known else [f"{call}={label}) is accepted"]
            ends[end] += 1
    print(f"\n{name}: so far {dict(ends)}")
    assert not wrong, wrong


def choices(annotation: Any) -> tuple[Any, ...]:
    """The strings that an annotation lists, at any depth."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    entries = [entry for entry in get_args(annotation) if not isinstance(entry, (list, str))]
    return tuple(choice for entry in entries for choice in choices(entry))


CHOOSING = [
    (name, argument, choice)
    for name, callee in CALLEES.items()
    for argument in callee.arguments
    for choice in dict.fromkeys(choices(callee.annotation(argument)))
]


@pytest.mark.parametrize(("name", "argument", "choice"), CHOOSING)
def test_misspelt_choices(name, argument, choice):
    callee = CALLEES[name]
    for misspelt in {choice.capitalize(), choice.upper(), f"{choice}_"} - {choice}:
        mapped = "Mapping" in str(callee.hints[argument])
        for value in ({"accuracy": misspelt},) if mapped else (misspelt,):
            with pytest.raises(ValueError, match=rf"{argument}.* must be .*'{choice}'.*, found '{misspelt}'") as caught:
                callee.call(**{**valid(name), argument: value})
            assert f"did you mean '{choice}'?" in str(caught.value)


def test_choices_were_found():
    """Else the annotations were not understood."""
    listed = [text for text in public_api.lines() if re.search(r"^[\w.]+\(.*Literal\[", text)]
    names = {text.partition("(")[0].removeprefix("fl_lightning.") for text in listed}
    assert len(CHOOSING) > 80
    assert {name for name, _, _ in CHOOSING} >= {name for name in names if name in CALLEES}


@pytest.mark.parametrize("method", ["summary", "ranking"])
def test_misspelt_choices_of_methods(method):
    record = shared_arguments()["record"]
    with pytest.raises(ValueError, match=r"mode of EvaluationRecord.* found 'Max': did you mean 'max'"):
        getattr(record, method)("acc", mode="Max")


REMEDIES = [
    ("FederatedClient", "module", torch.nn.Linear(2, 3), r"fl.ClientModule\(net\)"),
    ("FederatedServer", "module", torch.nn.Linear(2, 3), r"fl.ClientModule\(net\)"),
    ("compare", "model", torch.nn.Linear, "wraps a network in fl.ClientModule"),
    ("callbacks.format_client_table", "record", None, "strategy.last_evaluation after a validation or a test"),
    ("FederatedDataModule", "data", torch.zeros(4, 2).numpy(), "array of float32 and shape .*TensorDataset"),
    ("FederatedStrategy", "server_optimizer", torch.nn.Linear, "None or a function that returns an Optimizer such as"),
    ("FederatedStrategy", "partition", Counter, "index vectors, or a function of the data"),
]


@pytest.mark.parametrize(("name", "argument", "value", "words"), REMEDIES, ids=lambda value: str(value)[:20])
def test_errors_say_what_to_give_instead(name, argument, value, words):
    with pytest.raises((TypeError, ValueError), match=rf"(?s)^{argument}\b.* must .*{words}"):
        CALLEES[name].call(**{**valid(name), argument: value})


@pytest.mark.parametrize("number", [torch.tensor(3), torch.tensor(3).numpy(), torch.tensor(3).numpy()[()]], ids=repr)
def test_numbers_of_other_libraries_become_pythons(number):
    """So that checkpoints, which hold plain numbers only, can hold them."""
    sizes = CALLEES["data.IID"].call(number), CALLEES["FederatedStrategy"].call(local_epochs=number, seed=number)
    assert type(sizes[0].num_clients) is int
    options = sizes[1].options
    assert (type(options.local_epochs), type(options.seed)) == (int, int)
    mu = CALLEES["algorithms.FedProx"].call(mu=torch.tensor(0.5).numpy()[()]).mu
    assert (type(mu), mu) == (float, 0.5)
