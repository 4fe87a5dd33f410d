"""Options that several references share: a record declares each once, with its default and meaning."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["takes"]

F = TypeVar("F", bound=Callable[..., object])


def takes(options: type[Any]) -> Callable[[F], F]:
    """Decorate a function of ``**options``: its signature lists the fields of ``options``."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        fields = inspect.signature(options).parameters.values()
        listed = [field.replace(kind=inspect.Parameter.KEYWORD_ONLY) for field in fields]
        parameters = [*list(signature.parameters.values())[:-1], *listed]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate
