"""The messages of a service as tables, from the comments in the protos."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

PROTOS = Path(__file__).parents[1] / "protos"
_PACKAGE = ".tandem.v1."
_SCALARS = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}


def messages(services: Sequence[str]) -> Iterator[str]:
    """A paragraph and a table for each message that the services' calls hold, those of the first service first."""
    described = _Described()
    left: list[str] = []
    for service in services:
        for method in described.methods[service]:
            left += [method.input_type, method.output_type]
    seen: set[str] = set()
    while left:
        name = left.pop(0)
        if name in seen or name not in described.of:
            continue
        seen.add(name)
        kind, comment = described.of[name]
        rows = described.values(name) if isinstance(kind, EnumDescriptorProto) else described.fields(name)
        head = "value" if isinstance(kind, EnumDescriptorProto) else "field"
        lines = [f"| {head} | type | meaning |", "| --- | --- | --- |"]
        if head == "value":
            lines = ["| value | meaning |", "| --- | --- |"]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        yield f"### {_short(name)}\n\n{comment}" + ("\n\n" + "\n".join(lines) if rows else "")
        if isinstance(kind, DescriptorProto):
            # Its own parts come next, and what they hold behind them
            left[:0] = [field.type_name for field in kind.field if field.type_name]


class _Described:
    """The protos with their comments."""

    def __init__(self) -> None:
        self.methods: dict[str, Any] = {}
        self.of: dict[str, tuple[DescriptorProto | EnumDescriptorProto, str]] = {}
        self._parts: dict[str, tuple[FileDescriptorProto, tuple[int, ...]]] = {}
        for file in _compile().file:
            self._comments = {
                tuple(each.path): each.leading_comments for each in file.source_code_info.location
            }
            for service in file.service:
                self.methods[service.name] = service.method
            for index, message in enumerate(file.message_type):
                self._add(file, message, _PACKAGE + message.name, (4, index))
            for index, enum in enumerate(file.enum_type):
                self._remember(file, enum, _PACKAGE + enum.name, (5, index))

    def _add(
        self, file: FileDescriptorProto, message: DescriptorProto, name: str, path: tuple[int, ...]
    ) -> None:
        if message.options.map_entry:
            return
        self._remember(file, message, name, path)
        for index, nested in enumerate(message.nested_type):
            self._add(file, nested, f"{name}.{nested.name}", (*path, 3, index))

    def _remember(
        self,
        file: FileDescriptorProto,
        kind: DescriptorProto | EnumDescriptorProto,
        name: str,
        path: tuple[int, ...],
    ) -> None:
        self.of[name] = kind, self._comment(path)
        self._parts[name] = file, path

    def _comment(self, path: tuple[int, ...]) -> str:
        return " ".join(self._comments.get(path, "").split())

    def fields(self, name: str) -> list[tuple[str, str, str]]:
        """A row for each field of a message."""
        message = self.of[name][0]
        assert isinstance(message, DescriptorProto)
        self._use(name)
        path = self._parts[name][1]
        rows = []
        for index, field in enumerate(message.field):
            meaning = self._comment((*path, 2, index))
            if field.HasField("oneof_index") and not field.proto3_optional:
                choice = self._comment((*path, 8, field.oneof_index))
                condition = choice.removesuffix(".").lower()
                meaning = f"One of `{message.oneof_decl[field.oneof_index].name}` ({condition}). {meaning}"
            rows.append((f"`{field.name}`", self._type(message, field), " ".join(meaning.split())))
        return rows

    def values(self, name: str) -> list[tuple[str, str]]:
        """A row for each value of an enum."""
        enum = self.of[name][0]
        assert isinstance(enum, EnumDescriptorProto)
        self._use(name)
        path = self._parts[name][1]
        return [
            (f"`{value.name}`", self._comment((*path, 2, index))) for index, value in enumerate(enum.value)
        ]

    def _use(self, name: str) -> None:
        file = self._parts[name][0]
        self._comments = {tuple(each.path): each.leading_comments for each in file.source_code_info.location}

    @staticmethod
    def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
        entries = {f"{each.name}": each for each in message.nested_type if each.options.map_entry}
        entry = entries.get(field.type_name.rpartition(".")[2])
        if entry is not None:
            key, value = entry.field
            return f"map of {_SCALARS[key.type]} to {_SCALARS[value.type]}"
        name = (
            f"[{_short(field.type_name)}](#{_anchor(field.type_name)})"
            if field.type_name
            else _SCALARS[field.type]
        )
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {name}"
        return f"optional {name}" if field.proto3_optional else name


def _short(name: str) -> str:
    return name.removeprefix(_PACKAGE)


def _anchor(name: str) -> str:
    return _short(name).lower().replace(".", "")


def _compile() -> FileDescriptorSet:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "protos.binpb")
        sources = sorted(map(str, PROTOS.glob("tandem/v1/*.proto")))
        command = [
            *(sys.executable, "-m", "grpc_tools.protoc"),
            f"--proto_path={PROTOS}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            "--include_source_info",
            f"--descriptor_set_out={output}",
            *sources,
        ]
        subprocess.run(command, check=True)
        return FileDescriptorSet.FromString(output.read_bytes())
