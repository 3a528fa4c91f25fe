"""A first training configuration for a model and this machine: sizes that fit, with reasons as comments."""

from .base import Machine
from .sizes import RunSizes
from .tables import Tables
from .write import first_config, write_config

__all__ = ["Machine", "RunSizes", "Tables", "first_config", "write_config"]
