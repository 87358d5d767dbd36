"""A YAML file as plain values. What is wrong with one is told without its lines, which may hold a password."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

MERGED = "<<"


class YamlUnusable(ValueError):
    """The message names the file."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which PyYAML drops the first without a word; but for `<<`."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            named = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if named in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} stands twice", problem_mark=key.start_mark)
            if named is not None and key.value != MERGED:
                seen.add(named)
        return node


def read_yaml(path: Path) -> Any:
    """Raises `YamlUnusable`."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise YamlUnusable(f"cannot read the configuration {path}: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}" if mark else ""
        raise YamlUnusable(f"{path} is not valid YAML{where}: {error.problem or error.context}") from error
    except RecursionError as error:
        raise YamlUnusable(f"{path} is not valid YAML: it is nested too deep") from error
    except (yaml.YAMLError, ValueError, KeyError) as error:  # the last two: `!!int x`, `!!bool x`, 2020-99-99
        raise YamlUnusable(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from error
