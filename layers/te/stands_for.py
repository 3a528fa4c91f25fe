"""What a class with Transformer Engine's arguments has to do with the class of the core that it is built on."""

from typing import Any


class StandsFor(type):
    """Metaclass: a class that names its CORE is the name under which users know that class, so that instances of CORE,
    such as the layers of a model, are instances of it, too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(vars(cls).get("CORE", cls), instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return type.__subclasscheck__(vars(cls).get("CORE", cls), subclass)
