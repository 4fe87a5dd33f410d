"""Scopes of names: an inline-asm ``{ }`` may declare registers and labels that the function has too."""

from __future__ import annotations

__all__ = ["Scope"]


class Scope:
    """Names declared in one ``{ }``, and the names of the ones around it."""

    def __init__(self, outer: Scope | None, suffix: str) -> None:
        self.outer, self.suffix = outer, suffix
        self.names: set[str] = set()

    def resolve(self, name: str) -> str:
        """The name as it is unique in the function."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return name + scope.suffix
            scope = scope.outer
        return name
