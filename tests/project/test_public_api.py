# SPDX-License-Identifier: Apache-2.0
"""What users import and call changes only when somebody means it to."""

import importlib

import public_api


def test_names_and_signatures_are_those_that_were_committed():
    found, expected = public_api.lines(), public_api.recorded()
    gone = [f"- {line}" for line in expected if line not in found]
    new = [f"+ {line}" for line in found if line not in expected]
    renew = "if that is meant: python tests/project/public_api.py --write"
    assert not gone + new, "\n".join([*gone, *new, renew])
    assert found == expected
    assert len(found) > 500


def test_names_are_imported_from_where_they_stand():
    for place, value in public_api.public_objects().items():
        module, _, name = place.rpartition(".")
        assert getattr(importlib.import_module(module), name) is value, place


def test_defaults_and_annotations_are_written_as_in_the_source():
    somewhere = object()

    def odd(a: "int | None" = None, *rest: "int", when: float = 0.5, make=object, place=somewhere) -> "list[str]": ...

    expected = "(a: int | None = None, *rest: int, when: float = 0.5, make = object, place = object) -> list[str]"
    assert public_api.signature_text(odd) == expected
