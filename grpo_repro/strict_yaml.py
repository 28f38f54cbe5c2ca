"""Safe YAML without the surprises of YAML 1.1: `1e-4` is a number, a key is always its own text, and no key may come twice."""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError


class _Loader(yaml.SafeLoader):
    """PyYAML reads `lr: 1e-4` as text, the keys `null`, `off` and `0.28` as None, False and a float, and drops repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:  # before merging: a key may override what `<<` brings in
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
            if key_node.value in seen:
                raise ConstructorError(None, None, f"the key {key_node.value!r} is here twice", key_node.start_mark)
            seen.add(key_node.value)
        self.flatten_mapping(node)
        return {key_node.value: self.construct_object(value_node, deep=deep) for key_node, value_node in node.value}  # type: ignore[no-untyped-call]


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse(text: str) -> Any:
    """The content of a YAML document. Raises yaml.YAMLError."""
    loader = _Loader(text)  # a SafeLoader: it makes plain data only
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
