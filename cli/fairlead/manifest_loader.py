"""YAML of Kubernetes manifests, read as kubectl reads it: an unquoted time such as `2026-01-01T00:00:00Z` is a string."""

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Kubernetes has no type for times: kubectl converts YAML to JSON, where a time is its text. It refuses a key that appears twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} appears twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_text(loader: _Loader, node: yaml.ScalarNode) -> Any:
    return loader.construct_scalar(node)


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _read_text)


def describe_yaml_error(error: Exception) -> str:
    """Return an error of reading a file as one line, with the line of the file."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {' '.join(filter(None, (error.context, error.problem)))}"
    return " ".join(str(error).split())


def load_documents(text: str) -> list[Any]:
    """Return the documents of a file. Raises yaml.YAMLError."""
    return list(yaml.load_all(text, _Loader))
