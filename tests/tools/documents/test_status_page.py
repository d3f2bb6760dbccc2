"""docs/reference/status.md documents the fields of `apex status --json`."""

import re
from pathlib import Path
from typing import get_args, get_type_hints

from apex import facts
from apex.transport.messages.run_status import STATUS_VERSION, RunStatus

TEXT = (Path(__file__).parents[3] / "docs/reference/status.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE))


def records_in(hint):
    """The records that a type contains, by name."""
    if not (isinstance(hint, type) and issubclass(hint, facts.Record)):
        return {name: record for part in get_args(hint) for name, record in records_in(part).items()}
    inner = [records_in(each) for each in get_type_hints(hint).values()]
    return {hint.__name__: hint, **{name: record for records in inner for name, record in records.items()}}


def test_the_page_documents_each_field_of_each_record():
    rows = {name: re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name, text in SECTIONS.items()}
    documented = {name: sorted(re.findall(r"`(\w+)`", " ".join(cells))) for name, cells in rows.items()}
    assert documented == {name: sorted(record.__struct_fields__) for name, record in records_in(RunStatus).items()}


def test_the_page_has_the_version_and_all_phases_ends_and_parts():
    assert f"`version` is\n{STATUS_VERSION}." in TEXT
    for kind in (facts.Phase, facts.EndKind, facts.Part):
        assert [value for value in get_args(kind) if f"`{value}`" not in TEXT] == []
