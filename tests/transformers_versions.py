"""Tests that need a later transformers than 5.17, which lacks a family, or computes it or warns otherwise."""

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
from packaging.version import Version

SINCE = {
    "5.18": r"deepseek_v32\]|glm_moe_dsa\]|/test_glm5_next\.py|::test_real_text_has_the_same_tokens",
    "5.20": r"bailing_hybrid|kolibri1\]|::test_the_published_spelling_of_ling|_defaults_.*mimo_v2_flash\]"
    r"|_masks_.*dbrx\]",
    "5.21": r"flint\]|gemma3n\]|::test_gemma3n_beside_models",
    "5.23": r"internlm3|iquestcoder\]|lfm3\]|gpt_bigcode\]|_and_logits\[mamba2\]|::test_alpha_beside_dynamic_scaling"
    r"|::test_files_store_whole_matrices|/test_exports_in_transformers\.py|::test_peft_and_transformers_read",
}
"""Names of tests by the first version of transformers that has what they compare."""


def skip_with_older_transformers(items: list[Any]) -> None:
    """Skip the tests that the installed transformers is too old for."""
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        return
    for since, names in SINCE.items():
        if Version(installed) < Version(since):
            reason = f"compares with what transformers has since {since}; installed: {installed}"
            for item in items:
                if re.search(names, item.nodeid):
                    item.add_marker(pytest.mark.skip(reason=reason))
