"""Names of a configuration that mean code: imported from the installed environment, never from the current directory.

A run's folder may come from somebody else: a module that lies in it must not run because a command was typed there.
"""

import importlib
import sys
from typing import Any

from ...child_process import import_path
from ...config import ConfigError


def load_installed(name: str, key: str) -> Any:
    """Return the object that "package.module:name" means. key: the key of the configuration that has the name.

    The module is imported from `import_path`: the library and the packages of the environment, not the current
    directory. Raises ConfigError where the name has another form, or no module or object of this name is installed;
    what the module itself raises passes unchanged.
    """
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise ConfigError(f'{key} has {name!r}; allowed: "package.module:name"')
    before = list(sys.path)
    sys.path[:] = import_path()
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        raise ConfigError(
            f"{key} has {name!r}, and no module {error.name!r} is installed; allowed: modules of the environment, not "
            "of the current directory (pip install -e . makes one of a folder)"
        ) from None
    finally:
        sys.path[:] = before
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{key} has {name!r}, and {module} has no {attribute!r}")
        found = getattr(found, part)
    return found
