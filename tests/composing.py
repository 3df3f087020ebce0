"""Configs of tests are composed once for the same arguments, by all processes of a session together."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

FOLDER = "TTRAIN_TESTS_COMPOSED"  # names the folder of a session in which its processes find what others composed


def compose_once() -> None:
    """Let Hydra compose and parse once for the same arguments, where these name no files but our own."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from ttrain.config import compose
    from ttrain.config.compose import Composer

    composing, completing, latest = Composer._compose, compose._completed, [None, None]

    def trees(composer: Composer, lines: list[str]) -> tuple[Any, Any]:
        root = composing(composer, lines)
        composer._join(root, lines)
        return root, completing(root)

    kept = once(trees, lambda composer, lines: of_ours(composer.files.name, lines), shared=True)

    def composed(composer: Composer, lines: list[str]) -> Any:
        latest[:] = kept(composer, lines)
        root: Any = latest[0]
        root.hydra.runtime.cwd = os.getcwd()
        return root

    Composer._compose = composed  # type: ignore[method-assign]
    compose._completed = lambda root: latest[1] if root is latest[0] else completing(root)  # type: ignore[return-value]
    listed = once(ConfigLoaderImpl.compute_defaults_list, lambda _, *given: of_ours(*given), shared=True)
    ConfigLoaderImpl.compute_defaults_list = listed  # type: ignore[method-assign]
    parsed = once(OverridesParser.parse_rule, lambda _, *given: given)
    OverridesParser.parse_rule = parsed  # type: ignore[method-assign]
    OverridesParser.create = cache(OverridesParser.create)  # type: ignore[method-assign]
    for name in ("is_config", "is_group"):  # of Hydra's own files
        found = once(getattr(ImportlibResourcesConfigSource, name), lambda source, path: (source.path, path))
        setattr(ImportlibResourcesConfigSource, name, found)


def once(function: Callable[..., Any], key: Callable[..., Any], shared: bool = False) -> Callable[..., Any]:
    """Return the function with a memory: it copies its earlier result for an equal key. A key None is not kept.

    With `shared` it takes what another process of the session found.
    """
    kept: dict[Any, bytes] = {}
    folder = os.environ.get(FOLDER)

    def found(*given: Any) -> Any:
        if (wanted := key(*given)) is None:
            return function(*given)
        if wanted not in kept:
            file = (
                Path(folder, sha256(f"{function.__qualname__}{wanted!r}".encode()).hexdigest())
                if folder and shared
                else None
            )
            if file is not None and file.exists():
                kept[wanted] = file.read_bytes()
            else:
                kept[wanted] = pickle.dumps(function(*given))
            if file is not None and not file.exists():
                own = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
                own.write_bytes(kept[wanted])
                own.rename(file)
        return pickle.loads(kept[wanted])

    return found


def of_ours(name: str | None, overrides: Sequence[str], *more: Any) -> Any:
    """The key of a composition; None where it looks into other files than our own, or plugins may add to them."""
    from hydra.core.global_hydra import GlobalHydra

    from ttrain.config import registry
    from ttrain.config.files import packaged

    places = {place.path for place in GlobalHydra.instance().config_loader().get_search_path().get_path()}
    ours = str(packaged()) in places and [*overrides[:1]] == ["hydra.searchpath=[]"]
    return (name, *overrides, *more) if ours and not registry._LOADED_PLUGINS else None
