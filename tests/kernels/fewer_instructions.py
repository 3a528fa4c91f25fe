"""Libraries of C++ for processors with fewer instructions than this one."""

from collections.abc import Callable
from typing import Any

from te_models.kernels import cpp_library
from tests.covering import EVERYDAY
from tests.patches import Patches


def compiled_quickly(function: Callable[..., Any], *arguments: object) -> Any:
    """Call what loads a library for another processor than this one: `make test` has it compiled with little
    optimization, in half the time. `make test-all` tests what users get, as both do of the processor's own library."""
    command = cpp_library._command()
    with Patches() as patches:
        if EVERYDAY[0]:
            patches.setattr(cpp_library, "_command", lambda: (*command, "-O1"))
        return function(*arguments)
