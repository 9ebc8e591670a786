"""Arguments that imports and exports share: options of a format, and conversions of dtypes."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from geartrain.core.arguments import check_texts, did_you_mean, shown
from geartrain.core.dtypes import as_dtype
from geartrain.errors import ArgumentError


def checked_options(what: str, kind: Any, options: Mapping[str, Any], common: Collection[str]) -> dict[str, Any]:
    """The options that were given, without those that are None.

    Args:
        what: whose options they are, for messages.
        kind: the class whose constructor takes them, by keyword.
        options: by name.
        common: keywords of the constructor that are not options of the format.

    Returns:
        The options by name, with NumPy's flags and numbers as Python's.

    Raises:
        ArgumentError: an option that there is not, or a flag, number or word of another type. Arrays and collections
            are the class's own to check.
    """
    options = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in options.items()
        if value is not None
    }
    known = [
        name
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in common
    ]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ArgumentError(
            f"{what} has no option {', '.join(unknown)}; it has {', '.join(known) or 'none'}"
            f"{did_you_mean(unknown, known)}"
        )
    hints = get_type_hints(kind.__init__)
    for name, value in options.items():
        hint = hints[name]
        kinds = set(get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)) - {type(None)}
        if kinds <= {bool, int, float, str} and type(value) not in kinds:
            wanted = " or ".join(sorted(kind.__name__ for kind in kinds))
            raise ArgumentError(f"the option {name} of {what} is a {wanted}, found {shown(value)}")
    return options


def casts_of(cast: Mapping[str, str] | Sequence[str] | str) -> dict[str, str]:
    """Conversions, {found dtype: wanted dtype}, of a mapping or of texts such as "float64=float32".

    Raises:
        ArgumentError: a text that is no conversion; SchemaError: a dtype that there is not.
    """
    if isinstance(cast, Mapping):
        pairs = list(cast.items())
    else:
        texts = check_texts("cast", [cast] if isinstance(cast, str) else cast)
        pairs = [(found, wanted) for found, _, wanted in (text.partition("=") for text in texts)]
    for found, wanted in pairs:
        if isinstance(found, str) and isinstance(wanted, str) and not (found and wanted):
            raise ArgumentError(f"a cast is found=wanted, such as float64=float32, found '{found}={wanted}'")
    return {as_dtype(found).name: as_dtype(wanted).name for found, wanted in pairs}


__all__ = ["casts_of", "checked_options"]
