"""A YAML file as plain values. What is wrong with one is told without its lines, which may hold a password."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


class YamlUnusable(ValueError):
    """The message names the file."""


def read_yaml(path: Path) -> Any:
    """Raises `YamlUnusable`."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
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
