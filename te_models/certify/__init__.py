"""Certificates: what a conversion of a checkpoint would do, from its configuration, index and headers alone."""

from .certificate import Certificate, certify

__all__ = ["Certificate", "certify"]
